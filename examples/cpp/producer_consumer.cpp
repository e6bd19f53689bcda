// A producer's kernel writes frames, a consumer's kernel reads them where they lie: no copy, and no
// CPU waits for a GPU between the two. Three acts, each with processes of its own:
//
//   1. The consumer is started first, and waits for the producer's name. Every frame arrives.
//   2. The producer is killed in the middle. The consumer is told, and no frame that it was given
//      as complete is torn.
//   3. The consumer is killed. The producer goes on, and another consumer gets frames.
//
//   producer_consumer [--device host|cuda] [--frames N]

#include "pattern.hpp"
#include "stage.hpp"

using stage::ensure, stage::patience, stage::Process, stage::say, stage::Stage;

static constexpr std::size_t FRAME_BYTES = 1 << 20;
// A consumer says so when it has this many.
static constexpr std::uint64_t SOME = 20;

// Sends --frames frames, or for ever until its standard input ends.
static std::string produce(const Stage &stage) {
  const warpipe::Device device = stage.device();
  const warpipe::Stream stream(device);
  warpipe::PublisherOptions options;
  options.device = device.get();
  options.depth = 4;
  // Frames that no consumer holds come back behind the stream's work. Until then they count.
  options.memory_limit = 16 * FRAME_BYTES;
  warpipe::Publisher publisher("frames", options);
  publisher.wait_for_subscribers(1, patience);

  const auto layout = warpipe::Layout::contiguous<std::uint8_t>({FRAME_BYTES});
  const stage::Descriptor input(dup(STDIN_FILENO));
  const std::uint64_t frames = stage.number("--frames", 0);
  std::uint64_t sent = 0;
  while (frames > 0 ? sent < frames : !input.is_readable(std::chrono::milliseconds(0))) {
    warpipe::Loan frame = publisher.loan(layout);
    pattern::write(device, stream, frame.data<std::uint8_t>(), FRAME_BYTES, sent + 1);
    sent = frame.send(stream, patience); // behind the kernel, on the device: no CPU waits
  }
  stream.synchronize(patience);
  return "sent " + std::to_string(sent) + " frames";
}

// Looks at every frame until its producer has gone.
static std::string consume(const Stage &stage) {
  const warpipe::Device device = stage.device();
  const warpipe::Stream stream(device);
  pattern::Checker checker(device, stream);
  warpipe::SubscriberOptions options;
  options.device = device.get();
  options.wait_ns = warpipe::nanoseconds(patience); // for a producer that is not there yet
  say("waiting");
  warpipe::Subscriber subscriber("frames", options);

  std::uint64_t complete = 0;
  for (;;) {
    try {
      warpipe::Sample frame = subscriber.receive(stream, patience);
      checker.look(frame.data<std::uint8_t>(), frame.layout().bytes(), frame.sequence());
      const std::uint32_t faults = checker.faults(patience);
      frame.finish(patience); // says DataLost if its producer died before it was written
      ensure(faults == 0, "a frame is torn");
      if (++complete == SOME)
        say("has some");
    } catch (const warpipe::DataLost &) {
      // Its bytes were looked at, and count for nothing.
    } catch (const warpipe::PeerGone &gone) {
      return std::string(gone.peer_closed() ? "closed" : "died") + " after " +
             std::to_string(complete) + " whole frames";
    }
  }
}

static void every_frame_arrives(const Stage &stage, std::uint64_t frames) {
  Process consumer = stage.start("consumer");
  consumer.hear(); // it waits
  Process producer = stage.start("producer", {"--frames", std::to_string(frames)});
  consumer.hear(); // it has some
  ensure(consumer.hear() == "closed after " + std::to_string(frames) + " whole frames",
         "the consumer did not get all frames");
  consumer.finish();
  producer.finish();
}

static void the_producer_is_killed(const Stage &stage) {
  Process consumer = stage.start("consumer");
  consumer.hear();
  Process producer = stage.start("producer", {"--frames", "0"});
  consumer.hear();
  producer.kill();
  ensure(consumer.hear().rfind("died after ", 0) == 0, "the consumer was not told of the death");
  consumer.finish();
}

static void the_consumer_is_killed(const Stage &stage) {
  Process first = stage.start("consumer");
  first.hear();
  Process producer = stage.start("producer", {"--frames", "0"});
  first.hear();
  first.kill();
  Process second = stage.start("consumer");
  second.hear();
  second.hear(); // it has some, of the same producer
  producer.stop();
  ensure(second.hear().rfind("closed after ", 0) == 0, "the producer did not close");
  second.finish();
  producer.finish();
}

static const stage::Usage USAGE{
    "producer_consumer [--device host|cuda] [--frames N]", {"producer", "consumer"}, {"--frames"}};

int main(int count, char **arguments) {
  return stage::play(count, arguments, USAGE, [](const Stage &stage) -> std::string {
    if (stage.role() == "producer")
      return produce(stage);
    if (stage.role() == "consumer")
      return consume(stage);
    const std::uint64_t frames = stage.number("--frames", 100);
    if (frames < SOME)
      throw stage::Misuse("--frames is at least " + std::to_string(SOME));
    every_frame_arrives(stage, frames);
    the_producer_is_killed(stage);
    the_consumer_is_killed(stage);
    return std::to_string(frames) +
           " frames arrived; a producer's death was told, and a consumer's harmed nobody";
  });
}
