// The C++ interface: every kind of object in one process, its errors as exceptions, and its moves.
#include <cstdio>
#include <cstring>
#include <map>
#include <memory>
#include <thread>

#include <poll.h>

#include <warpipe.hpp>

#include "check.h"

using namespace std::chrono_literals;
using warpipe::Layout;

// The head of dlpack.h's.
struct DLManagedTensorVersioned {
  std::uint32_t version[2];
  void *manager_ctx;
  void (*deleter)(DLManagedTensorVersioned *);
};

namespace {

const warpipe::Duration kLimit = 20s;

template <class Failure, class Call> void throws(Call call, warpipe_status status, const char *text) {
  try {
    call();
  } catch (const Failure &failure) {
    if (failure.status() == status && std::strstr(failure.what(), text) != nullptr)
      return;
    std::fprintf(stderr, "another error: %s\n", failure.what());
  }
  std::exit(1);
}

void channel(const warpipe::Device &device, void *stream) {
  warpipe::PublisherOptions options;
  options.device = device.get();
  options.depth = 4;
  options.policy = WARPIPE_POLICY_FAIL;
  warpipe::SubscriberOptions attach;
  attach.device = device.get();
  throws<warpipe::NotFound>([&] { warpipe::Subscriber("cpp/channel", attach); }, WARPIPE_NOT_FOUND,
                            "cpp/channel");
  std::optional<warpipe::Publisher> publisher(std::in_place, "cpp/channel", options);
  warpipe::Subscriber subscriber("cpp/channel", attach);
  CHECK(publisher->subscribers().size() == 1);
  throws<warpipe::Timeout>([&] { subscriber.receive(stream, 0ms); }, WARPIPE_TIMEOUT, "");
  throws<warpipe::Timeout>([&] { subscriber.receive(stream, 1ms); }, WARPIPE_TIMEOUT, "1ms");

  const Layout layout = Layout::contiguous<float>({2, 3});
  CHECK(layout.dtype() == WARPIPE_FLOAT32 && layout.elements() == 6 && layout.bytes() == 24);
  for (int number = 0; number < 4; number++) {
    warpipe::Loan loan = publisher->loan(layout);
    loan.write(stream, std::vector<float>(6, static_cast<float>(number)));
    loan.set_metadata(&number, sizeof number);
    warpipe::Loan moved = std::move(loan);
    CHECK(!loan && moved);
    CHECK(moved.send(stream) == static_cast<std::uint64_t>(number + 1));
    CHECK(!moved);
  }
  // The fifth finds no room, and is sent once there is some.
  warpipe::Loan late = publisher->loan(layout);
  late.write(stream, std::vector<float>(6, 4.0f));
  throws<warpipe::LimitReached>([&] { late.send(stream); }, WARPIPE_LIMIT_REACHED, "cpp/channel");
  CHECK(late);
  warpipe::Sample first = subscriber.receive(stream, kLimit);
  CHECK(first.layout().shape()[1] == 3 && first.metadata().size() == sizeof(int));
  // The lengths of a layout that ends before the loop does.
  std::uint64_t elements = 1;
  for (const std::uint64_t length : first.layout().shape())
    elements *= length;
  CHECK(elements == first.layout().elements());
  first.wait(kLimit);
  CHECK(first.is_complete());
  first.release().wait(kLimit);
  // The slot returns behind the stream's work, and this policy waits for none.
  warpipe::check(warpipe_stream_synchronize(device.get(), stream, warpipe::nanoseconds(kLimit)));
  late.send(stream, kLimit);
  { warpipe::Loan unused = publisher->loan(layout); }

  publisher.reset();
  int seen = 1;
  for (warpipe::Sample &sample : subscriber.samples(stream, kLimit)) {
    for (const float value : sample.to_vector<float>(kLimit))
      CHECK(value == static_cast<float>(seen));
    seen++;
  }
  CHECK(seen == 5 && subscriber.dropped() == 0);
  throws<warpipe::PeerGone>([&] { subscriber.receive(stream, kLimit); }, WARPIPE_PEER_GONE, "closed");
}

void queue(const warpipe::Device &device, void *stream) {
  warpipe::QueueOptions options;
  options.device = device.get();
  options.max_attempts = 2;
  warpipe::Queue queue("cpp/queue", options);
  warpipe::WorkerOptions attach;
  attach.device = device.get();
  warpipe::Worker worker("cpp/queue", attach);
  queue.wait_for_workers(1, kLimit);

  warpipe::Watch watch = queue.watch();
  const Layout layout = Layout::contiguous<std::int32_t>({4});
  std::map<std::uint64_t, std::int32_t> wanted;
  std::vector<warpipe::Job> jobs;
  for (std::int32_t number = 0; number < 8; number++) {
    warpipe::Loan loan = queue.loan(layout);
    loan.write(stream, std::vector<std::int32_t>(4, number));
    jobs.push_back(queue.submit(loan, stream));
    wanted[jobs.back().id()] = 2 * number;
  }
  for (int done = 0; done < 8;) {
    warpipe::Lease lease = worker.lease(stream, kLimit);
    if (lease.job() == 1 && lease.attempt() == 1) {
      lease.fail("once");
      continue;
    }
    std::vector<std::int32_t> input = lease.to_vector<std::int32_t>(kLimit);
    for (std::int32_t &value : input)
      value *= 2;
    warpipe::Loan output = lease.output(lease.layout());
    output.write(stream, input);
    if (lease.job() % 2 == 0) {
      lease.complete(std::move(output), stream);
    } else {
      warpipe::Sample sample = lease.split();
      lease.complete(std::move(output), stream);
      sample.finish(kLimit);
    }
    done++;
  }
  pollfd readable = {watch.fd(), POLLIN, 0};
  CHECK(poll(&readable, 1, 20000) == 1);
  watch.quiet();
  for (warpipe::Job &job : jobs) {
    warpipe::Sample result = job.wait(stream, kLimit);
    CHECK(result.info().job == job.id());
    CHECK(result.to_vector<std::int32_t>(kLimit)[3] == wanted[job.id()]);
    result.finish(kLimit);
  }
  queue.drain(kLimit);
  CHECK(queue.state().waiting == 0);
}

void service(const warpipe::Device &device, void *stream) {
  warpipe::ServerOptions serving;
  serving.device = device.get();
  warpipe::Server server("cpp/service", serving);
  warpipe::ClientOptions asking;
  asking.device = device.get();
  warpipe::Client client("cpp/service", asking);
  warpipe::Loan loan = client.loan(Layout::contiguous<std::uint8_t>({3}));
  loan.write(stream, "abc", 3);
  warpipe::Job pending = client.request(std::move(loan), stream, kLimit);
  warpipe::Lease request = server.accept(stream, kLimit);
  const std::vector<std::uint8_t> asked = request.to_vector<std::uint8_t>(kLimit);
  warpipe::Loan reply = request.output(request.layout());
  reply.write(stream, std::vector<std::uint8_t>(asked.rbegin(), asked.rend()));
  request.complete(std::move(reply), stream);
  warpipe::Sample answer = pending.wait(stream, kLimit);
  CHECK(answer.to_vector<std::uint8_t>(kLimit) == (std::vector<std::uint8_t>{'c', 'b', 'a'}));
}

// A range of the pattern, received where it lies. Its owner goes with the sample.
void in_place(const warpipe::Device &device, void *stream,
              const warpipe::Published &published) {
  warpipe::PublisherOptions options;
  options.device = device.get();
  warpipe::Publisher publisher("cpp/in_place", options);
  warpipe::SubscriberOptions attach;
  attach.device = device.get();
  warpipe::Subscriber subscriber("cpp/in_place", attach);
  const Layout layout = Layout::contiguous<std::uint32_t>({2, 4});
  auto owner = std::make_shared<int>(0);
  throws<warpipe::Error>([&] { publisher.loan_in(published, 4096, layout, owner); },
                         WARPIPE_INVALID_INPUT, "4096");
  CHECK(owner.use_count() == 1);
  publisher.loan_in(published, 512, layout, owner).send(stream);
  CHECK(owner.use_count() == 2);
  warpipe::Sample sample = subscriber.receive(stream, kLimit);
  CHECK(sample.info().is_in_place);
  CHECK(sample.to_vector<std::uint32_t>(kLimit) == std::vector<std::uint32_t>(8, 0x1234567u));
  sample.finish(kLimit);
  while (owner.use_count() > 1)
    std::this_thread::yield();
}

// Several tensors in one sample, copied and where they lie, by their names.
void parts(const warpipe::Device &device, void *stream, const warpipe::Published &published) {
  warpipe::PublisherOptions options;
  options.device = device.get();
  warpipe::Publisher publisher("cpp/parts", options);
  warpipe::SubscriberOptions attach;
  attach.device = device.get();
  warpipe::Subscriber subscriber("cpp/parts", attach);
  const Layout image = Layout::contiguous<std::uint8_t>({2, 3});
  const Layout depth = Layout::contiguous<float>({2});
  const Layout mask = Layout::contiguous<std::uint32_t>({4});
  const std::vector<std::uint8_t> pixels = {1, 2, 3, 4, 5, 6};

  warpipe::Loan loan = publisher.loan_parts({{"image", image}, {"depth", depth}});
  loan["image"].write(stream, pixels);
  loan["depth"].write(stream, std::vector<float>{0.5f, 2.0f});
  auto owner = std::make_shared<int>(0);
  loan.add_part_in("mask", published, 512, mask, owner);
  throws<warpipe::Error>([&] { loan["image"].write(stream, "", 1); }, WARPIPE_INVALID_INPUT, "6");
  throws<warpipe::Error>([&] { loan["other"]; }, WARPIPE_INVALID_INPUT, "image");
  throws<warpipe::Error>([&] { loan.add_part_in("image", published, 0, mask, owner); },
                         WARPIPE_INVALID_INPUT, "image");
  throws<warpipe::Error>([&] { loan.add_part_in("far", published, 4096, mask, owner); },
                         WARPIPE_INVALID_INPUT, "4096");
  throws<warpipe::Error>([&] { publisher.loan_parts({{std::string(129, 'n'), image}}); },
                         WARPIPE_INVALID_INPUT, "name");
  CHECK(owner.use_count() == 2 && loan.parts().size() == 3 && loan["mask"].is_in_place());
  loan.send(stream);

  warpipe::Sample sample = subscriber.receive(stream, kLimit);
  CHECK(sample.parts().size() == 3 && sample.parts()[1].name() == "depth");
  CHECK(sample["image"].to_vector<std::uint8_t>(kLimit) == pixels);
  CHECK(sample["image"].layout().shape()[1] == 3 && !sample["image"].is_in_place());
  CHECK(sample["depth"].to_vector<float>(kLimit)[1] == 2.0f);
  CHECK(sample["mask"].to_vector<std::uint32_t>(kLimit)[3] == 0x1234567u);
  CHECK(sample["depth"].data() != sample["image"].data());
  throws<warpipe::Error>([&] { sample["other"]; }, WARPIPE_INVALID_INPUT, "mask");
  const warpipe::SamplePart part = sample["image"];
  sample.finish(kLimit);
  throws<warpipe::Error>([&] { part.to_vector<std::uint8_t>(kLimit); }, WARPIPE_INVALID_OBJECT, "");
  while (owner.use_count() > 1)
    std::this_thread::yield();
  publisher.send(stream, depth, std::vector<float>{0.5f, 2.0f});
  CHECK(subscriber.receive(stream, kLimit).info().sequence == 2);
}

// A loan that is destroyed after a copy into it is not lent again before the copy is done.
void copied_and_given_up(const warpipe::Device &device, const warpipe::Stream &stream) {
  warpipe::PublisherOptions options;
  options.device = device.get();
  options.memory_limit = 4 << 20;
  options.loan_timeout_ns = 1;
  warpipe::Publisher publisher("cpp/given_up", options);
  warpipe::SubscriberOptions attach;
  attach.device = device.get();
  warpipe::Subscriber subscriber("cpp/given_up", attach);
  const Layout layout = Layout::contiguous<std::uint8_t>({2 << 20});
  publisher.loan(layout).send(stream);
  DLManagedTensorVersioned *tensor = subscriber.receive(stream, kLimit).to_dlpack();

  warpipe::CreateOptions made;
  made.device = device.get();
  warpipe::OpenOptions opened;
  opened.device = device.get();
  warpipe::Timeline gate = warpipe::Timeline::create("cpp/gate", made);
  const warpipe::Stream other(device);
  warpipe::Timeline::open("cpp/gate", opened).wait(other, 1);
  {
    warpipe::Loan loan = publisher.loan(layout);
    loan.write_dlpack(other, tensor);
  }
  throws<warpipe::LimitReached>([&] { publisher.loan(layout); }, WARPIPE_LIMIT_REACHED, "");
  gate.signal_now(1);
  other.synchronize(kLimit);
  tensor->deleter(tensor);
}

void memory(const warpipe::Device &device, void *stream) {
  warpipe::Memory memory = warpipe::Memory::allocate(device, 4096);
  const std::vector<std::uint32_t> pattern(1024, 0x1234567u);
  memory.write(stream, 0, pattern.data(), 4096);
  warpipe::check(warpipe_stream_synchronize(device.get(), stream, warpipe::nanoseconds(kLimit)));
  warpipe::Published published(memory, "cpp/memory");
  warpipe::Memory opened = warpipe::Memory::open(published.ticket(), device, kLimit);
  CHECK(opened.bytes() == 4096 && opened.to_vector<std::uint32_t>(kLimit) == pattern);
  opened.used_on(stream);
  in_place(device, stream, published);
  parts(device, stream, published);
  throws<warpipe::Error>([&] { warpipe::Memory::open("nonsense", device, 0s); },
                         WARPIPE_INVALID_INPUT, "ticket");

  warpipe::PoolOptions options;
  options.device = device.get();
  warpipe::Pool pool("cpp/pool", options);
  warpipe::OpenOptions attach;
  attach.device = device.get();
  warpipe::PoolClient client("cpp/pool", attach);
  warpipe::Memory block = client.allocate(1 << 20, kLimit);
  CHECK(block.bytes() >= 1u << 20 && pool.stats().peers == 1);
}

void order(const warpipe::Device &device, const warpipe::Stream &stream) {
  warpipe::CreateOptions options;
  options.device = device.get();
  warpipe::OpenOptions attach;
  attach.device = device.get();
  warpipe::Timeline timeline = warpipe::Timeline::create("cpp/timeline", options);
  warpipe::Timeline opened = warpipe::Timeline::open("cpp/timeline", attach);
  const warpipe::Stream other(device);
  opened.wait(other, 3);
  timeline.signal(stream, 3);
  other.synchronize(kLimit);
  opened.wait_host(3, kLimit);
  CHECK(opened.value() == 3);

  warpipe::Event event(options);
  event.record(stream);
  warpipe::Event imported = warpipe::Event::open(event.handle(), device);
  imported.wait(other);
  imported.synchronize(kLimit);
  CHECK(imported.query());

  warpipe::Semaphore semaphore = warpipe::Semaphore::create("cpp/semaphore", 2, options);
  warpipe::Permit first = semaphore.acquire(stream, kLimit);
  {
    warpipe::Permit second = semaphore.acquire_host(kLimit);
    throws<warpipe::Timeout>([&] { semaphore.acquire_host(1ms); }, WARPIPE_TIMEOUT, "");
  }
  first.release(stream);
  stream.synchronize(kLimit);
}

void members() {
  warpipe::Members list;
  warpipe::Member member("cpp/member");
  std::optional<warpipe_change> change = list.next_change(kLimit);
  CHECK(change && change->kind == WARPIPE_CHANGE_JOINED);
  CHECK(std::strcmp(change->member.name, "cpp/member") == 0);
  CHECK(list.list().size() == 1);
}

} // namespace

int main() {
  const char *name = std::getenv("WARPIPE_TEST_DEVICE");
  const warpipe::Device device(name == nullptr ? "host" : name);
  const warpipe::Stream stream(device);
  channel(device, stream);
  queue(device, stream);
  service(device, stream);
  memory(device, stream);
  order(device, stream);
  copied_and_given_up(device, stream);
  members();
  int called = 0;
  stream.call([&called] { called = 1; });
  stream.synchronize(kLimit);
  CHECK(called == 1);
  std::puts("ok: every object of warpipe.hpp");
  return 0;
}
