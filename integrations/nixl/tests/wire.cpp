// Requests that no engine sends: each is refused, and nothing beyond their bytes is read (the test
// is built with the address sanitizer).

#include <cstdio>
#include <cstdlib>
#include <memory>
#include <vector>

#include "../src/wire.hpp"

using namespace warpipe_nixl;

namespace {

int failures = 0;

void expect(bool holds, const char *what) {
  if (!holds) {
    std::printf("failed: %s\n", what);
    ++failures;
  }
}

// Parses memory of exactly these bytes.
std::optional<Request> parse(const Header &header, const std::vector<Segment> &segments,
                             std::size_t bytes_behind, std::size_t metadata_bytes = sizeof(Header)) {
  const std::size_t table = segments.size() * sizeof(Segment);
  const auto memory = std::make_unique<char[]>(table + bytes_behind);
  if (table > 0)
    std::memcpy(memory.get(), segments.data(), table);
  auto request = Request::parse(&header, metadata_bytes, memory.get(), table + bytes_behind);
  if (request)
    request->data = nullptr; // ends with this function
  return request;
}

Header write_of(std::uint32_t segments) {
  Header header;
  header.op = Op::Write;
  header.segments = segments;
  return header;
}

void what_an_engine_sends_is_taken() {
  const Segment segment{1, 0x1000, 8};
  expect(parse(write_of(1), {segment}, 8).has_value(), "a write with its data");
  Header read = write_of(1);
  read.op = Op::Read;
  expect(parse(read, {segment}, 0).has_value(), "a read");
  Header note;
  note.notifies = 1;
  note.sender_bytes = 3;
  note.notification_bytes = 4;
  const auto taken = parse(note, {}, 7);
  expect(taken && taken->sender.size() == 3 && taken->notification->size() == 4, "a notification");
}

void what_no_engine_sends_is_refused() {
  const Segment segment{1, 0x1000, 8};
  expect(!parse(write_of(1), {segment}, 8, sizeof(Header) - 1), "a shorter header");
  Header header = write_of(1);
  header.version = Header::VERSION + 1;
  expect(!parse(header, {segment}, 8), "another version");
  header = write_of(1);
  header.op = static_cast<Op>(4);
  expect(!parse(header, {segment}, 8), "another operation");
  expect(!parse(write_of(2), {segment}, 8), "more segments than there are");
  expect(!parse(write_of(UINT32_MAX), {segment}, 8), "a number of segments that overflows");
  expect(!parse(write_of(1), {segment}, 7), "a write without its last byte");
  expect(!parse(write_of(1), {segment}, 9), "a write with a byte more");
  const Segment half{1, 0, 1ull << 63};
  expect(!parse(write_of(2), {half, half}, 0), "lengths whose sum overflows to that of the data");
  header = write_of(1);
  header.op = Op::Read;
  expect(!parse(header, {Segment{1, 0, DATA_BYTES_MAX + 1}}, 0), "a read of more than one part");
  Header note;
  note.sender_bytes = UINT32_MAX;
  note.notification_bytes = UINT32_MAX;
  expect(!parse(note, {}, 8), "names longer than the memory");
}

} // namespace

int main() {
  what_an_engine_sends_is_taken();
  what_no_engine_sends_is_refused();
  return failures == 0 ? EXIT_SUCCESS : EXIT_FAILURE;
}
