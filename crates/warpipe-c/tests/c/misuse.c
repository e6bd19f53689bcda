// Wrong calls: each is an error with words, and none harms what is right.
#include "check.h"

static void of_objects(warpipe_device *device, void *stream) {
  warpipe_publisher_options options = {.size = sizeof options, .device = device};
  warpipe_publisher *publisher = NULL;
  OK(warpipe_publisher_create("c/misuse", &options, &publisher));
  warpipe_layout layout;
  const uint64_t shape[1] = {4};
  OK(warpipe_layout_contiguous(WARPIPE_UINT8, shape, 1, &layout));
  warpipe_loan *loan = NULL;

  FAILS(warpipe_publisher_loan(NULL, &layout, &loan), WARPIPE_INVALID_OBJECT, "null");
  FAILS(warpipe_publisher_loan((warpipe_publisher *)device, &layout, &loan), WARPIPE_INVALID_OBJECT,
        "a warpipe_device was passed for a warpipe_publisher");
  int local = 0;
  FAILS(warpipe_publisher_loan((warpipe_publisher *)(void *)&local, &layout, &loan),
        WARPIPE_INVALID_OBJECT, "no warpipe_publisher");
  FAILS(warpipe_publisher_loan(publisher, NULL, &loan), WARPIPE_INVALID_INPUT, "layout is null");
  FAILS(warpipe_publisher_loan(publisher, &layout, NULL), WARPIPE_INVALID_INPUT, "loan is null");

  OK(warpipe_publisher_loan(publisher, &layout, &loan));
  FAILS(warpipe_loan_write(loan, stream, NULL, "abc", 3), WARPIPE_INVALID_INPUT, "4");
  FAILS(warpipe_loan_set_metadata(loan, "abc", 5000), WARPIPE_INVALID_INPUT, "4096");
  OK(warpipe_loan_write(loan, stream, NULL, "abcd", 4));
  OK(warpipe_loan_send(loan, stream, WARPIPE_USUAL_TIMEOUT, NULL));
  FAILS(warpipe_loan_send(loan, stream, WARPIPE_USUAL_TIMEOUT, NULL), WARPIPE_INVALID_OBJECT, "closed");
  FAILS(warpipe_loan_discard(loan, stream), WARPIPE_INVALID_OBJECT, "closed");

  warpipe_publisher *second = NULL;
  FAILS(warpipe_publisher_create("c/misuse", &options, &second), WARPIPE_NAME_CONFLICT, "c/misuse");
  CHECK(second == NULL);
  OK(warpipe_close(publisher));
  FAILS(warpipe_close(publisher), WARPIPE_INVALID_OBJECT, "closed");
  OK(warpipe_close(NULL));
}

static void of_streams(warpipe_device *device) {
  void *stream = test_stream(device);
  OK(warpipe_stream_destroy(device, stream));
  FAILS(warpipe_stream_destroy(device, stream), WARPIPE_INVALID_INPUT, "once");
  FAILS(warpipe_stream_destroy(device, NULL), WARPIPE_INVALID_INPUT, "warpipe_stream_create");
  warpipe_device *host = NULL;
  OK(warpipe_device_open("host", &host));
  int local = 0;
  FAILS(warpipe_stream_synchronize(host, &local, LIMIT), WARPIPE_INVALID_INPUT,
        "warpipe_stream_create");
  OK(warpipe_stream_synchronize(host, NULL, LIMIT));
  OK(warpipe_close(host));
}

static void of_options(warpipe_device *device) {
  warpipe_publisher *publisher = NULL;
  warpipe_publisher_options none = {.size = 0, .device = device};
  FAILS(warpipe_publisher_create("c/options", &none, &publisher), WARPIPE_INVALID_INPUT,
        "sizeof(warpipe_publisher_options)");
  warpipe_publisher_options deep = {.size = sizeof deep, .device = device, .depth = 5000};
  FAILS(warpipe_publisher_create("c/options", &deep, &publisher), WARPIPE_INVALID_INPUT, "4096");
  warpipe_publisher_options policy = {.size = sizeof policy, .device = device, .policy = 9};
  FAILS(warpipe_publisher_create("c/options", &policy, &publisher), WARPIPE_INVALID_INPUT, "policy");
  FAILS(warpipe_publisher_create("../etc", NULL, &publisher), WARPIPE_INVALID_INPUT, "../etc");
  FAILS(warpipe_publisher_create("\xff", NULL, &publisher), WARPIPE_INVALID_INPUT, "UTF-8");
  FAILS(warpipe_publisher_create(NULL, NULL, &publisher), WARPIPE_INVALID_INPUT, "name is null");

  // A program with a newer header: what it does not use is no obstacle, what it uses is.
  struct {
    warpipe_publisher_options known;
    uint64_t newer;
  } newer = {.known = {.size = sizeof newer, .device = device}, .newer = 0};
  OK(warpipe_publisher_create("c/options", &newer.known, &publisher));
  OK(warpipe_close(publisher));
  newer.newer = 1;
  FAILS(warpipe_publisher_create("c/options", &newer.known, &publisher), WARPIPE_PROTOCOL,
        "run one version");
  // One with an older header, which ends behind the device.
  warpipe_publisher_options older = {.size = offsetof(warpipe_publisher_options, depth),
                                     .device = device, .depth = 5000};
  OK(warpipe_publisher_create("c/options", &older, &publisher));
  OK(warpipe_close(publisher));
}

static void of_texts(void) {
  warpipe_domain *domain = NULL;
  OK(warpipe_domain_open(NULL, &domain));
  size_t length = 0;
  char path[4096];
  FAILS(warpipe_domain_get_path(domain, NULL, 0, &length), WARPIPE_INVALID_INPUT, "capacity");
  CHECK(length > 0 && length < sizeof path);
  OK(warpipe_domain_get_path(domain, path, length + 1, NULL));
  CHECK(strlen(path) == length);
  OK(warpipe_close(domain));
}

int main(void) {
  CHECK(strcmp(warpipe_error_message(), "") == 0);
  FAILS(warpipe_check_version(WARPIPE_VERSION_MAJOR + 1, 0), WARPIPE_PROTOCOL, "compile it again");
  FAILS(warpipe_check_version(WARPIPE_VERSION_MAJOR, WARPIPE_VERSION_MINOR + 1), WARPIPE_PROTOCOL,
        warpipe_version());
  CHECK(strcmp(warpipe_status_name(WARPIPE_PEER_GONE), "peer_gone") == 0);
  CHECK(strcmp(warpipe_status_name(9999), "unknown") == 0);
  warpipe_device *device = NULL;
  FAILS(warpipe_device_open("tpu", &device), WARPIPE_INVALID_INPUT, "tpu");
  FAILS(warpipe_device_open("GPU-xyz", &device), WARPIPE_INVALID_INPUT, "GPU-UUID");
  device = test_device();
  void *stream = test_stream(device);
  of_objects(device, stream);
  of_streams(device);
  of_options(device);
  of_texts();
  OK(warpipe_stream_destroy(device, stream));
  OK(warpipe_close(device));
  FAILS(warpipe_close(device), WARPIPE_INVALID_OBJECT, "closed");
  puts("ok: every wrong call was refused");
  return 0;
}
