// A forked child begins anew on the host device, whatever its parent's threads did; and calls at the
// end of a thread and of the program.
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <sys/wait.h>
#include <unistd.h>

#include "check.h"

// More than the child takes on a slow machine under valgrind.
#define CHILD_SECONDS 120

// GCC's address sanitizer has locks of its own, which a child never gets that was forked while another
// thread, also one of the library, had them: with it, the parent forks before it has threads.
#ifdef __SANITIZE_ADDRESS__
#define FORKS_BESIDE_THREADS false
#else
#define FORKS_BESIDE_THREADS true
#endif

#define MAKERS 2
#define CHILDREN 20

static atomic_bool is_over;

// Makes and closes objects and streams, until the last child has ended.
static void *make_objects(void *argument) {
  while (!atomic_load(&is_over)) {
    warpipe_device *device = NULL;
    OK(warpipe_device_open("host", &device));
    void *stream = test_stream(device);
    OK(warpipe_stream_synchronize(device, NULL, LIMIT));
    OK(warpipe_stream_destroy(device, stream));
    OK(warpipe_close(device));
  }
  return argument;
}

static void *open_and_close(void *argument) {
  warpipe_device *device = NULL;
  OK(warpipe_device_open("host", &device));
  OK(warpipe_close(device));
  return argument;
}

// The parent's default stream has a thread that the child does not have: it gets one of its own.
static void use_the_library(void) {
  warpipe_device *device = NULL;
  OK(warpipe_device_open("host", &device));
  OK(warpipe_stream_synchronize(device, NULL, LIMIT));
  warpipe_publisher_options options = {.size = sizeof options, .device = device};
  warpipe_publisher *publisher = NULL;
  OK(warpipe_publisher_create("c/processes/child", &options, &publisher));
  OK(warpipe_publisher_send_host(publisher, NULL, NULL, "child", 5, NULL));
  OK(warpipe_close(publisher));
  pthread_t thread;
  CHECK(pthread_create(&thread, NULL, open_and_close, NULL) == 0);
  CHECK(pthread_join(thread, NULL) == 0);
  OK(warpipe_close(device));
}

static void count_release(void *calls) {
  atomic_fetch_add((atomic_int *)calls, 1);
}

// A child owns nothing of its parent's: it releases no tensor that the parent lends.
static void fork_with_a_loan(void) {
  warpipe_device *device = NULL;
  OK(warpipe_device_open("host", &device));
  warpipe_publisher_options options = {.size = sizeof options, .device = device};
  warpipe_publisher *publisher = NULL;
  OK(warpipe_publisher_create("c/processes/lender", &options, &publisher));
  warpipe_memory *memory = NULL;
  OK(warpipe_memory_allocate(device, 64, &memory));
  warpipe_published *published = NULL;
  OK(warpipe_memory_publish(memory, "c/processes/memory", NULL, &published));
  warpipe_layout layout;
  const uint64_t shape[1] = {64};
  OK(warpipe_layout_contiguous(WARPIPE_UINT8, shape, 1, &layout));
  atomic_int lent = 0, refused = 0;
  warpipe_loan *loan = NULL, *second = NULL;
  OK(warpipe_publisher_loan_in(publisher, published, 0, &layout, count_release, &lent, &loan));

  const pid_t child = fork();
  CHECK(child >= 0);
  if (child == 0) {
    alarm(CHILD_SECONDS);
    const warpipe_status status = warpipe_publisher_loan_in(publisher, published, 0, &layout,
                                                            count_release, &refused, &second);
    FAILS(status, WARPIPE_INVALID_STATE, "fork");
    CHECK(atomic_load(&refused) == 1 && second == NULL);
    (void)warpipe_close(loan);
    (void)warpipe_close(publisher);
    (void)warpipe_close(published);
    (void)warpipe_close(memory);
    CHECK(atomic_load(&lent) == 0);
    _exit(0);
  }
  int status = 0;
  CHECK(waitpid(child, &status, 0) == child);
  CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0);
  OK(warpipe_close(loan));
  OK(warpipe_close(publisher));
  OK(warpipe_close(published));
  OK(warpipe_close(memory));
  OK(warpipe_close(device));
  while (atomic_load(&lent) == 0)
    CHECK(sched_yield() == 0);
  CHECK(atomic_load(&lent) == 1);
}

static void fork_and_use(void) {
  for (int count = 0; count < CHILDREN; count++) {
    const pid_t child = fork();
    CHECK(child >= 0);
    if (child == 0) {
      alarm(CHILD_SECONDS);
      use_the_library();
      _exit(0);
    }
    int status = 0;
    CHECK(waitpid(child, &status, 0) == child);
    CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0);
  }
}

// Runs when its thread ends, after the library's own thread-local values may have gone.
static pthread_key_t at_end_of_thread;
static void end_of_thread(void *argument) {
  OK(warpipe_close(argument));
  CHECK(warpipe_close(argument) == WARPIPE_INVALID_OBJECT);
  CHECK(warpipe_error_message() != NULL);
  open_and_close(NULL);
}

static void *end_with_an_object(void *argument) {
  warpipe_device *device = NULL;
  OK(warpipe_device_open("host", &device));
  CHECK(pthread_setspecific(at_end_of_thread, device) == 0);
  // The place of this thread's last error is made here: of one made in a destructor nothing is freed.
  CHECK(warpipe_stream_destroy(device, NULL) == WARPIPE_INVALID_INPUT);
  return argument;
}

static warpipe_device *last_device;
static void at_exit(void) {
  OK_AT_EXIT(warpipe_close(last_device));
  warpipe_device *device = NULL;
  OK_AT_EXIT(warpipe_device_open("host", &device));
  OK_AT_EXIT(warpipe_close(device));
}

int main(void) {
  CHECK(atexit(at_exit) == 0);
  if (FORKS_BESIDE_THREADS) fork_with_a_loan();
  if (!FORKS_BESIDE_THREADS) fork_and_use();
  OK(warpipe_device_open("host", &last_device));
  OK(warpipe_stream_synchronize(last_device, NULL, LIMIT));

  pthread_t makers[MAKERS];
  for (int index = 0; index < MAKERS; index++)
    CHECK(pthread_create(&makers[index], NULL, make_objects, NULL) == 0);
  if (FORKS_BESIDE_THREADS) fork_and_use();
  atomic_store(&is_over, true);
  for (int index = 0; index < MAKERS; index++) CHECK(pthread_join(makers[index], NULL) == 0);

  pthread_t thread;
  CHECK(pthread_key_create(&at_end_of_thread, end_of_thread) == 0);
  CHECK(pthread_create(&thread, NULL, end_with_an_object, NULL) == 0);
  CHECK(pthread_join(thread, NULL) == 0);
  return 0;
}
