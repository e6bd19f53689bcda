// A channel between two processes: the child subscribes first, receives tensors of three layouts,
// one that lies in memory of the publisher's own, and sees its publisher's end.
#include <sched.h>
#include <spawn.h>
#include <stdatomic.h>
#include <sys/wait.h>
#include <unistd.h>

#include "check.h"

extern char **environ;

#define SAMPLES 200

static float value(uint64_t sample, uint64_t index) {
  return (float)sample * 0.5f + (float)index;
}

// Sent where it lies, from this byte of its memory on.
static const char IN_PLACE[] = "in place";
#define OFFSET 512

static void set_flag(void *flag) {
  atomic_store((atomic_bool *)flag, true);
}

// Sends memory of its own without a copy, and waits until the subscriber has released it.
static void send_in_place(const warpipe_device *device, void *stream,
                          const warpipe_publisher *publisher) {
  warpipe_memory *memory = NULL;
  OK(warpipe_memory_allocate(device, 4096, &memory));
  OK(warpipe_memory_write(memory, stream, OFFSET, IN_PLACE, sizeof IN_PLACE));
  warpipe_published *published = NULL;
  OK(warpipe_memory_publish(memory, "c/memory", NULL, &published));
  warpipe_layout layout;
  const uint64_t shape[1] = {sizeof IN_PLACE};
  OK(warpipe_layout_contiguous(WARPIPE_UINT8, shape, 1, &layout));

  atomic_bool refused = false, released = false;
  warpipe_loan *loan = NULL;
  FAILS(warpipe_publisher_loan_in(publisher, published, 4096, &layout, set_flag, &refused, &loan),
        WARPIPE_INVALID_INPUT, "4096");
  CHECK(atomic_load(&refused) && loan == NULL);
  OK(warpipe_publisher_loan_in(publisher, published, OFFSET, &layout, set_flag, &released, &loan));
  OK(warpipe_loan_send(loan, stream, WARPIPE_USUAL_TIMEOUT, NULL));
  while (!atomic_load(&released))
    CHECK(sched_yield() == 0);
  OK(warpipe_close(published));
  OK(warpipe_close(memory));
}

static int subscribe(void) {
  warpipe_device *device = test_device();
  void *stream = test_stream(device);
  warpipe_subscriber_options options = {.size = sizeof options, .device = device, .wait_ns = LIMIT};
  warpipe_subscriber *subscriber = NULL;
  OK(warpipe_subscriber_open("c/channel", &options, &subscriber));

  warpipe_sample *previous = NULL;
  for (uint64_t number = 1; number <= SAMPLES; number++) {
    warpipe_sample *sample = NULL;
    if (previous == NULL) {
      OK(warpipe_subscriber_receive(subscriber, stream, LIMIT, &sample));
    } else {
      FAILS(warpipe_subscriber_receive_next(subscriber, previous, LIMIT, NULL),
            WARPIPE_INVALID_INPUT, "sample");
      OK(warpipe_subscriber_receive_next(subscriber, previous, LIMIT, &sample));
      FAILS(warpipe_close(previous), WARPIPE_INVALID_OBJECT, "");
      previous = NULL;
    }
    warpipe_sample_info info;
    OK(warpipe_sample_get_info(sample, &info));
    CHECK(info.sequence == number && info.missing == 0 && !info.is_discontinuity);
    CHECK(info.layout.dtype == WARPIPE_FLOAT32 && info.layout.rank == 2);
    CHECK(info.layout.shape[0] == 3 && info.layout.shape[1] == number % 7 + 1);
    CHECK(info.metadata_bytes == sizeof number);
    CHECK(memcmp(info.metadata, &number, sizeof number) == 0);
    float found[21];
    CHECK(info.layout.bytes <= sizeof found);
    OK(warpipe_sample_copy_to(sample, NULL, found, info.layout.bytes, LIMIT));
    for (uint64_t index = 0; index < info.layout.bytes / sizeof(float); index++)
      CHECK(found[index] == value(number, index));
    if (number % 3 == 0) {
      previous = sample;
    } else if (number % 2 == 0) {
      OK(warpipe_sample_finish(sample, LIMIT));
    } else {
      warpipe_receipt *receipt = NULL;
      OK(warpipe_sample_release(sample, &receipt));
      OK(warpipe_receipt_wait(receipt, LIMIT));
      OK(warpipe_close(receipt));
    }
  }
  warpipe_sample *sample = NULL;
  OK(warpipe_subscriber_receive(subscriber, stream, LIMIT, &sample));
  warpipe_sample_info info;
  OK(warpipe_sample_get_info(sample, &info));
  CHECK(info.is_in_place && info.layout.bytes == sizeof IN_PLACE);
  char found[sizeof IN_PLACE];
  OK(warpipe_sample_copy_to(sample, NULL, found, sizeof found, LIMIT));
  CHECK(memcmp(found, IN_PLACE, sizeof found) == 0);
  OK(warpipe_sample_finish(sample, LIMIT));
  FAILS(warpipe_subscriber_receive(subscriber, stream, LIMIT, &sample), WARPIPE_PEER_GONE,
        "c/channel");
  CHECK(sample == NULL);
  OK(warpipe_close(subscriber));
  OK(warpipe_stream_destroy(device, stream));
  OK(warpipe_close(device));
  return 0;
}

int main(int count, char **arguments) {
  OK(warpipe_check_version(WARPIPE_VERSION_MAJOR, WARPIPE_VERSION_MINOR));
  if (count > 1)
    return subscribe();
  char *child_arguments[] = {arguments[0], (char *)"subscribe", NULL};
  pid_t child = 0;
  CHECK(posix_spawn(&child, arguments[0], NULL, NULL, child_arguments, environ) == 0);

  warpipe_device *device = test_device();
  void *stream = test_stream(device);
  warpipe_publisher_options options = {.size = sizeof options, .device = device, .depth = 8};
  warpipe_publisher *publisher = NULL;
  OK(warpipe_publisher_create("c/channel", &options, &publisher));
  OK(warpipe_publisher_wait_for_subscribers(publisher, 1, LIMIT));
  warpipe_subscriber_info subscriber;
  size_t subscribers = 0;
  // While a slow machine or valgrind keeps it from running for a second, it counts as stalled.
  do
    OK(warpipe_publisher_list_subscribers(publisher, &subscriber, 1, &subscribers));
  while (subscribers == 1 && subscriber.state == WARPIPE_PEER_STALLED);
  CHECK(subscribers == 1 && subscriber.pid == child && subscriber.state == WARPIPE_PEER_ALIVE);

  for (uint64_t number = 1; number <= SAMPLES; number++) {
    const uint64_t shape[2] = {3, number % 7 + 1};
    warpipe_layout layout;
    OK(warpipe_layout_contiguous(WARPIPE_FLOAT32, shape, 2, &layout));
    warpipe_loan *loan = NULL;
    OK(warpipe_publisher_loan(publisher, &layout, &loan));
    float data[21];
    for (uint64_t index = 0; index < layout.bytes / sizeof(float); index++)
      data[index] = value(number, index);
    OK(warpipe_loan_write(loan, stream, NULL, data, layout.bytes));
    OK(warpipe_loan_set_metadata(loan, &number, sizeof number));
    uint64_t sequence = 0;
    OK(warpipe_loan_send(loan, stream, WARPIPE_USUAL_TIMEOUT, &sequence));
    CHECK(sequence == number);
  }
  send_in_place(device, stream, publisher);
  OK(warpipe_close(publisher));
  int status = -1;
  CHECK(waitpid(child, &status, 0) == child && WIFEXITED(status) && WEXITSTATUS(status) == 0);
  OK(warpipe_stream_destroy(device, stream));
  OK(warpipe_close(device));
  puts("ok: 200 samples and one in place, each as it was sent");
  return 0;
}
