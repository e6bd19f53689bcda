// The rules for threads: a publisher is shared, a subscriber is for one thread at a time, and any
// object may be closed while another thread is in a call on it.
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>

#include "check.h"

#define SENDERS 4
#define EACH 200

// Races for ThreadSanitizer, which must report them: the main thread writes `unprotected` while the
// senders do, in this program (1) or by a call of the library (2).
#ifndef WARPIPE_RACE
#define WARPIPE_RACE 0
#endif
static uint64_t unprotected;

static warpipe_device *device;
static warpipe_publisher *publisher;
static warpipe_subscriber *subscriber;
static atomic_uint received;

static void *send_all(void *argument) {
  (void)argument;
  void *stream = test_stream(device);
  for (int index = 0; index < EACH; index++)
    OK(warpipe_publisher_send_host(publisher, stream, NULL, "thread", 6,
                                   WARPIPE_RACE == 2 ? &unprotected : NULL));
  if (WARPIPE_RACE == 1)
    unprotected = 1;
  OK(warpipe_stream_synchronize(device, stream, LIMIT));
  return stream;
}

// Two threads receive from one subscriber: one at a time succeeds.
static void *receive_all(void *argument) {
  void *stream = argument;
  while (atomic_load(&received) < SENDERS * EACH) {
    warpipe_sample *sample = NULL;
    const warpipe_status status = warpipe_subscriber_receive(subscriber, stream, SECOND / 100, &sample);
    if (status == WARPIPE_OK) {
      char found[6];
      OK(warpipe_sample_copy_to(sample, NULL, found, sizeof found, LIMIT));
      CHECK(memcmp(found, "thread", sizeof found) == 0);
      OK(warpipe_sample_finish(sample, LIMIT));
      atomic_fetch_add(&received, 1);
    } else {
      CHECK(status == WARPIPE_TIMEOUT || status == WARPIPE_INVALID_STATE);
      CHECK(sample == NULL);
      // While the other thread is in a call, this one is refused at once.
      sched_yield();
    }
  }
  return NULL;
}

// Waits in a call until the subscriber, which another thread closes, sees the publisher's end.
static atomic_int waiting;
static void *wait_for_the_end(void *argument) {
  warpipe_sample *sample = NULL;
  atomic_store(&waiting, 1);
  const warpipe_status status = warpipe_subscriber_receive(subscriber, argument, LIMIT, &sample);
  CHECK(status == WARPIPE_PEER_GONE || status == WARPIPE_INVALID_OBJECT);
  return NULL;
}

int main(void) {
  device = test_device();
  warpipe_publisher_options options = {.size = sizeof options, .device = device, .depth = 64,
                                       .block_timeout_ns = LIMIT};
  OK(warpipe_publisher_create("c/threads", &options, &publisher));
  warpipe_subscriber_options attach = {.size = sizeof attach, .device = device};
  OK(warpipe_subscriber_open("c/threads", &attach, &subscriber));

  pthread_t senders[SENDERS], receivers[2];
  void *streams[2] = {test_stream(device), test_stream(device)};
  for (int index = 0; index < 2; index++)
    CHECK(pthread_create(&receivers[index], NULL, receive_all, streams[index]) == 0);
  for (int index = 0; index < SENDERS; index++)
    CHECK(pthread_create(&senders[index], NULL, send_all, NULL) == 0);
  // Between a thread's start and its end nothing orders the main thread's writes with it, so every
  // run has the race, whichever comes first.
  if (WARPIPE_RACE)
    unprotected = 0;
  for (int index = 0; index < SENDERS; index++) {
    void *stream = NULL;
    CHECK(pthread_join(senders[index], &stream) == 0);
    OK(warpipe_stream_destroy(device, stream));
  }
  for (int index = 0; index < 2; index++)
    CHECK(pthread_join(receivers[index], NULL) == 0);
  CHECK(atomic_load(&received) == SENDERS * EACH);

  pthread_t waiter;
  CHECK(pthread_create(&waiter, NULL, wait_for_the_end, streams[0]) == 0);
  while (!atomic_load(&waiting)) {
  }
  OK(warpipe_close(subscriber));
  FAILS(warpipe_close(subscriber), WARPIPE_INVALID_OBJECT, "closed");
  OK(warpipe_close(publisher));
  CHECK(pthread_join(waiter, NULL) == 0);
  for (int index = 0; index < 2; index++)
    OK(warpipe_stream_destroy(device, streams[index]));
  OK(warpipe_close(device));
  puts("ok: 800 samples from 4 threads");
  return 0;
}
