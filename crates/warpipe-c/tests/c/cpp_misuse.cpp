// Wrong and unusual uses of warpipe.hpp: what the compiler can refuse it refuses, and the others
// neither lose an object nor read memory that has gone.
#include <atomic>
#include <cstdio>
#include <cstring>
#include <limits>
#include <memory>
#include <thread>

#include <warpipe.hpp>

#include "check.h"

using namespace std::chrono_literals;
using warpipe::Layout;

namespace {

const warpipe::Duration kLimit = 20s;

template <class Call> warpipe_status status_of(Call call) {
  try {
    call();
  } catch (const warpipe::Error &error) {
    return error.status();
  }
  return WARPIPE_OK;
}

// Both ends of a channel with two slots, which refuses a third sample.
struct Channel {
  Channel(const warpipe::Device &device, const char *name)
      : publisher(name, publishing(device)), subscriber(name, subscribing(device)) {}

  static warpipe::PublisherOptions publishing(const warpipe::Device &device) {
    warpipe::PublisherOptions options;
    options.device = device.get();
    options.depth = 2;
    options.policy = WARPIPE_POLICY_FAIL;
    return options;
  }
  static warpipe::SubscriberOptions subscribing(const warpipe::Device &device) {
    warpipe::SubscriberOptions options;
    options.device = device.get();
    return options;
  }
  void send(void *stream) const {
    publisher.send(stream, Layout::contiguous<std::uint8_t>({4}), std::vector<std::uint8_t>(4, 7));
  }

  warpipe::Publisher publisher;
  warpipe::Subscriber subscriber;
};

template <class T> auto loops(int) -> decltype(std::declval<T>().samples(nullptr, 1s), true) {
  return true;
}
template <class T> bool loops(...) { return false; }

void what_ends_too_early_is_refused_by_the_compiler() {
  static_assert(std::is_constructible_v<warpipe::Stream, const warpipe::Device &>);
  static_assert(!std::is_constructible_v<warpipe::Stream, warpipe::Device>);
  CHECK(loops<warpipe::Subscriber &>(0) && !loops<warpipe::Subscriber>(0));
  static_assert(std::is_nothrow_move_assignable_v<warpipe::Stream>);
  static_assert(std::is_nothrow_move_constructible_v<warpipe::Sample>);
  static_assert(!std::is_copy_constructible_v<warpipe::Sample>);
}

void a_time_that_is_too_long_is_the_longest() {
  const std::uint64_t longest = std::numeric_limits<std::int64_t>::max();
  CHECK(warpipe::nanoseconds(std::chrono::hours::max()) == longest);
  CHECK(warpipe::nanoseconds(std::chrono::seconds::max()) == longest);
  CHECK(warpipe::nanoseconds(std::chrono::nanoseconds::max()) == longest);
  CHECK(warpipe::nanoseconds(std::chrono::hours::min()) == 0);
  CHECK(warpipe::nanoseconds(-1ns) == 0 && warpipe::nanoseconds(0s) == 0);
  CHECK(warpipe::nanoseconds(std::chrono::duration<std::uint8_t>(200)) == 200 * SECOND);
  CHECK(warpipe::nanoseconds(2 * kLimit + 1ms) == 40 * SECOND + 1000000);
}

// A sample that another thread waits for stays the caller's when it cannot be released.
void a_sample_that_is_in_use_is_not_lost(const warpipe::Device &device, void *stream) {
  Channel channel(device, "cpp/in-use");
  const warpipe::Stream slow(device);
  std::atomic<bool> may_end{false};
  slow.call([&may_end] {
    while (!may_end)
      std::this_thread::yield();
  });
  channel.send(slow);
  warpipe::Sample sample = channel.subscriber.receive(stream, kLimit);
  std::thread waiter([&sample] {
    while (status_of([&] { sample.wait(kLimit); }) == WARPIPE_INVALID_STATE) {
    }
  });
  while (status_of([&] { sample.is_complete(); }) != WARPIPE_INVALID_STATE) {
  }
  CHECK(status_of([&] { sample.release(); }) == WARPIPE_INVALID_STATE && sample);
  CHECK(status_of([&] { sample.finish(kLimit); }) == WARPIPE_INVALID_STATE && sample);
  CHECK(status_of([&] { sample.close(); }) == WARPIPE_INVALID_STATE && sample);
  may_end = true;
  waiter.join();
  sample.finish(kLimit);
  CHECK(!sample);
  CHECK(status_of([&] { sample.finish(kLimit); }) == WARPIPE_INVALID_OBJECT);
  CHECK(status_of([&] { sample.close(); }) == WARPIPE_OK);
}

void an_empty_object_shows_no_memory(const warpipe::Device &device, void *stream) {
  Channel channel(device, "cpp/empty");
  warpipe::Loan loan = channel.publisher.loan(Layout::contiguous<std::uint8_t>({4}));
  loan.set_metadata("abc", 3);
  loan.write(stream, "1234", 4);
  CHECK(loan.data() != nullptr);
  loan.send(stream);
  CHECK(loan.data() == nullptr);
  warpipe::Sample sample = channel.subscriber.receive(stream, kLimit);
  warpipe::Sample moved = std::move(sample);
  CHECK(sample.data() == nullptr && sample.metadata().empty()); // NOLINT: after the move
  CHECK(moved.data() != nullptr && std::memcmp(moved.metadata().data(), "abc", 3) == 0);
  warpipe::Sample &same = moved;
  moved = std::move(same);
  CHECK(moved && moved.metadata().size() == 3);
  std::swap(sample, moved);
  CHECK(sample.metadata().size() == 3 && moved.metadata().empty());
  sample.finish(kLimit);
  CHECK(sample.data() == nullptr && sample.metadata().empty());
}

// What was split off is the sample's alone, and a loan that has gone is no answer without a result.
void elements_are_not_taken_for_other_numbers(const warpipe::Device &device, void *stream) {
  Channel channel(device, "cpp/elements");
  warpipe::Loan loan = channel.publisher.loan(Layout::contiguous<float>({2}));
  CHECK(status_of([&] { loan.write(stream, std::vector<double>{1}); }) == WARPIPE_INVALID_INPUT);
  loan.write(stream, std::vector<float>{1, 2});
  loan.send(stream);
  warpipe::Sample sample = channel.subscriber.receive(stream, kLimit);
  CHECK(status_of([&] { sample.to_vector<double>(kLimit); }) == WARPIPE_INVALID_INPUT);
  CHECK(sample.to_vector<float>(kLimit)[1] == 2);
  CHECK(sample.to_vector<std::uint32_t>(kLimit)[1] == 0x40000000);
  const auto bytes = Layout::contiguous<std::uint8_t>({4}); // and these for any
  channel.publisher.send(stream, bytes, std::vector<float>{3});
  CHECK(channel.subscriber.receive(stream, kLimit).to_vector<float>(kLimit)[0] == 3);
  sample.finish(kLimit);
}

void a_lease_shows_no_input_that_has_gone_and_takes_no_empty_loan(const warpipe::Device &device,
                                                                  void *stream) {
  warpipe::QueueOptions owning;
  owning.device = device.get();
  warpipe::WorkerOptions working;
  working.device = device.get();
  const warpipe::Queue queue("cpp/split", owning);
  warpipe::Worker worker("cpp/split", working);
  const Layout layout = Layout::contiguous<std::uint8_t>({4});
  warpipe::Loan input = queue.loan(layout);
  input.set_metadata("abc", 3);
  input.write(stream, "1234", 4);
  warpipe::Job job = queue.submit(input, stream);
  warpipe::Lease lease = worker.lease(stream, kLimit);
  CHECK(lease.data() != nullptr && lease.metadata().size() == 3);
  lease.split().finish(kLimit);
  CHECK(lease.data() == nullptr && lease.metadata().empty());
  warpipe::Loan output = lease.output(layout);
  output.write(stream, "5678", 4);
  warpipe::Loan moved = std::move(output);
  CHECK(status_of([&] { lease.complete(std::move(output), stream); }) == WARPIPE_INVALID_OBJECT);
  CHECK(lease && moved);
  lease.complete(std::move(moved), stream);
  CHECK(job.wait(stream, kLimit).to_vector<std::uint8_t>(kLimit)[0] == '5');
}

// A worker that goes on has no job's memory of before.
void a_lease_that_is_empty_has_no_input(const warpipe::Device &device, void *stream) {
  warpipe::QueueOptions owning;
  owning.device = device.get();
  warpipe::WorkerOptions working;
  working.device = device.get();
  const warpipe::Queue queue("cpp/input", owning);
  warpipe::Worker worker("cpp/input", working);
  for (int job = 0; job < 2; job++) {
    warpipe::Loan input = queue.loan(Layout::contiguous<std::uint8_t>({4}));
    input.write(stream, "1234", 4);
    queue.submit(input, stream);
  }
  warpipe::Lease lease = worker.lease(stream, kLimit), next = worker.lease(stream, kLimit);
  lease = std::move(next);
  CHECK(!next && next.data() == nullptr); // NOLINT: after the move
  CHECK(lease.to_vector<std::uint8_t>(kLimit)[0] == '1');
  lease.close();
  CHECK(!lease && lease.data() == nullptr);
  CHECK(status_of([&] { lease.close(); }) == WARPIPE_OK);
}

// Null stands for a default in warpipe.h; an object that has gone stands for nothing.
void an_empty_object_is_no_default(const warpipe::Device &device) {
  Channel channel(device, "cpp/gone");
  const Layout layout = Layout::contiguous<std::uint8_t>({4});
  warpipe::Device host("host");
  warpipe::Published published(warpipe::Memory::allocate(device, 64), "cpp/published");
  { // both are empty from here on
    const warpipe::Device other = std::move(host);
    const warpipe::Published own = std::move(published);
  }
  warpipe::Loan parts = channel.publisher.loan_parts({{"a", layout}});
  const auto kept = std::make_shared<int>(0);
  const auto refuses = [](auto call) { return status_of(call) == WARPIPE_INVALID_OBJECT; };
  CHECK(refuses([&] { channel.publisher.loan_in(published, 0, layout, kept); }));
  CHECK(refuses([&] { parts.add_part_in("b", published, 0, layout, kept); }));
  CHECK(kept.use_count() == 1);
  CHECK(refuses([&] { warpipe::Memory::allocate(host, 64); }));
  CHECK(refuses([&] { warpipe::Memory::open("", host, kLimit); }));
  CHECK(refuses([&] { warpipe::Memory::open_legacy("", host); }));
  CHECK(refuses([&] { warpipe::AllocationServer("cpp/server", host); }));
  CHECK(refuses([&] { warpipe::Event::open("", host); }));
}

// Every sample's slot returns, however a loop ends.
void a_loop_that_is_left_keeps_no_sample(const warpipe::Device &device, void *stream) {
  Channel channel(device, "cpp/loop");
  const auto leave = [&](bool throws) {
    for (warpipe::Sample &sample : channel.subscriber.samples(stream, kLimit)) {
      sample.wait(kLimit);
      if (throws)
        throw 1;
      return;
    }
  };
  for (int round = 0; round < 20; round++) {
    channel.send(stream);
    try {
      leave(round % 2 == 0);
    } catch (int) {
    }
    warpipe::check(warpipe_stream_synchronize(device.get(), stream, LIMIT));
  }
  CHECK(status_of([&] { channel.subscriber.receive(stream, 0ms); }) == WARPIPE_TIMEOUT);
}

// Without a next sample, too.
void a_sample_given_for_the_next_one_returns(const warpipe::Device &device, void *stream) {
  Channel channel(device, "cpp/next");
  for (int round = 0; round < 20; round++) {
    channel.send(stream);
    warpipe::Sample sample = channel.subscriber.receive(stream, kLimit);
    const auto next = [&] { channel.subscriber.receive_next(std::move(sample), 0ms); };
    CHECK(status_of(next) == WARPIPE_TIMEOUT);
    warpipe::check(warpipe_stream_synchronize(device.get(), stream, LIMIT));
    CHECK(status_of(next) == WARPIPE_INVALID_OBJECT); // NOLINT: after the move
  }
}

// The error of a call, although the destructor of what it was given has one, too.
void an_error_is_that_of_the_call() {
  struct Failing {
    ~Failing() { warpipe_close(reinterpret_cast<warpipe_device *>(std::uintptr_t{64})); }
  };
  warpipe::Device device("host");
  warpipe::Stream stream(device);
  warpipe::Device closed = std::move(device);
  closed.close();
  std::string message;
  try {
    stream.call([kept = std::shared_ptr<Failing>(new Failing)] { static_cast<void>(kept); });
  } catch (const warpipe::Error &error) {
    message = error.what();
  }
  CHECK(message.find("warpipe_device is closed") != std::string::npos);
}

void streams_are_assigned(const warpipe::Device &device) {
  warpipe::Stream first(device), second(device);
  void *const raw = second.get();
  first = std::move(second);
  CHECK(first.get() == raw && second.get() == nullptr); // NOLINT: after the move
  first = warpipe::Stream(device);
  std::swap(first, second);
  first.synchronize(kLimit);
}

} // namespace

int main() {
  const char *name = std::getenv("WARPIPE_TEST_DEVICE");
  const warpipe::Device device(name == nullptr ? "host" : name);
  const warpipe::Stream stream(device);
  what_ends_too_early_is_refused_by_the_compiler();
  a_time_that_is_too_long_is_the_longest();
  a_sample_that_is_in_use_is_not_lost(device, stream);
  an_empty_object_shows_no_memory(device, stream);
  elements_are_not_taken_for_other_numbers(device, stream);
  a_lease_shows_no_input_that_has_gone_and_takes_no_empty_loan(device, stream);
  a_lease_that_is_empty_has_no_input(device, stream);
  an_empty_object_is_no_default(device);
  a_sample_given_for_the_next_one_returns(device, stream);
  a_loop_that_is_left_keeps_no_sample(device, stream);
  an_error_is_that_of_the_call();
  streams_are_assigned(device);
  std::puts("ok: no object was lost");
  return 0;
}
