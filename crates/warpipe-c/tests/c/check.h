// What the test programs share: the device and domain of the test, and checks that end the program.
#ifndef CHECK_H
#define CHECK_H

#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <warpipe.h>

#define SECOND UINT64_C(1000000000)
#define LIMIT (20 * SECOND)

#define CHECK(condition)                                                                           \
  do {                                                                                             \
    if (!(condition)) {                                                                            \
      fprintf(stderr, "%s:%d: %s (last error: %s)\n", __FILE__, __LINE__, #condition,              \
              warpipe_error_message());                                                            \
      exit(1);                                                                                     \
    }                                                                                              \
  } while (0)

#define OK(call) CHECK((call) == WARPIPE_OK)

// As OK, where the program is ending already.
#define OK_AT_EXIT(call)                                                                           \
  do {                                                                                             \
    if ((call) != WARPIPE_OK) {                                                                    \
      fprintf(stderr, "%s:%d: %s (last error: %s)\n", __FILE__, __LINE__, #call,                   \
              warpipe_error_message());                                                            \
      _exit(1);                                                                                    \
    }                                                                                              \
  } while (0)

// The call fails with this status, and its message has this text in it.
#define FAILS(call, status, text)                                                                  \
  do {                                                                                             \
    const int found_ = (int)(call);                                                                \
    if (found_ != (int)(status) || strstr(warpipe_error_message(), text) == NULL) {                \
      fprintf(stderr, "%s:%d: %s gave %s: %s\n", __FILE__, __LINE__, #call,                        \
              warpipe_status_name((uint32_t)found_), warpipe_error_message());                     \
      exit(1);                                                                                     \
    }                                                                                              \
  } while (0)

// The device that the test runs on: WARPIPE_TEST_DEVICE, "host" by default.
static inline warpipe_device *test_device(void) {
  const char *name = getenv("WARPIPE_TEST_DEVICE");
  warpipe_device *device = NULL;
  OK(warpipe_device_open(name == NULL ? "host" : name, &device));
  return device;
}

static inline void *test_stream(const warpipe_device *device) {
  void *stream = NULL;
  OK(warpipe_stream_create(device, &stream));
  return stream;
}

#endif
