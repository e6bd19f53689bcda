// A camera without OpenCV: frames of 720 x 1280 x 3 bytes, made on the device 60 times a second,
// for two viewers. A viewer that is late loses the oldest frames, as with any camera, and counts
// them.
//
// The latency is from the camera's send(), which does not wait for the kernel that makes the frame,
// until the viewer's CPU knows that the frame is complete.
//
//   opencv_free_camera [--device host|cuda] [--frames N]

#include "pattern.hpp"
#include "stage.hpp"

#include <algorithm>
#include <ctime>
#include <thread>

using stage::ensure, stage::patience, stage::Process, stage::Stage;

static constexpr std::chrono::nanoseconds PERIOD{1'000'000'000 / 60};

static std::uint64_t now_ns() {
  timespec now{};
  clock_gettime(CLOCK_MONOTONIC, &now);
  return static_cast<std::uint64_t>(now.tv_sec) * 1'000'000'000 +
         static_cast<std::uint64_t>(now.tv_nsec);
}

static std::string view(const Stage &stage) {
  const warpipe::Device device = stage.device();
  const warpipe::Stream stream(device);
  pattern::Checker checker(device, stream);
  warpipe::SubscriberOptions options;
  options.device = device.get();
  options.wait_ns = warpipe::nanoseconds(patience);
  warpipe::Subscriber camera("camera", options);

  std::vector<std::uint64_t> latencies_ns;
  for (warpipe::Sample &frame : camera.samples(stream, patience)) {
    frame.wait(patience); // for the measurement alone: the stream waits by itself
    latencies_ns.push_back(now_ns() - frame.info().sent_at_ns);
    checker.look(frame.data<std::uint8_t>(), frame.layout().bytes(), frame.sequence());
  }
  ensure(checker.faults(patience) == 0, "a frame is torn");
  const std::uint64_t all = latencies_ns.size() + camera.dropped();
  ensure(all == stage.number("--frames", 0) && !latencies_ns.empty(), "frames are missing");

  std::sort(latencies_ns.begin(), latencies_ns.end());
  const auto microseconds = [&](std::size_t percent) {
    return std::to_string(latencies_ns[(latencies_ns.size() - 1) * percent / 100] / 1000) + " us";
  };
  return std::to_string(latencies_ns.size()) + " frames, " + std::to_string(camera.dropped()) +
         " dropped; latency median " + microseconds(50) + ", p99 " + microseconds(99);
}

static std::string film(const Stage &stage, std::uint64_t frames) {
  std::vector<Process> viewers;
  for (int number = 0; number < 2; number++)
    viewers.push_back(stage.start("viewer", {"--frames", std::to_string(frames)}));

  const warpipe::Device device = stage.device();
  const warpipe::Stream stream(device);
  warpipe::PublisherOptions options;
  options.device = device.get();
  options.policy = WARPIPE_POLICY_DROP_OLDEST;
  options.timestamps = 1; // for the latency that the viewers print
  {
    warpipe::Publisher camera("camera", options);
    camera.wait_for_subscribers(viewers.size(), patience);
    const auto layout = warpipe::Layout::contiguous<std::uint8_t>({720, 1280, 3});
    auto next = std::chrono::steady_clock::now();
    for (std::uint64_t number = 1; number <= frames; number++) {
      std::this_thread::sleep_until(next += PERIOD); // the rate of a camera
      warpipe::Loan frame = camera.loan(layout);
      pattern::write(device, stream, frame.data<std::uint8_t>(), layout.bytes(), number);
      frame.send(stream);
    }
    stream.synchronize(patience);
  } // closed: the viewers still get all that was sent
  for (Process &viewer : viewers) {
    viewer.hear();
    viewer.finish();
  }
  return std::to_string(frames) + " frames for two viewers, each frame as it was made";
}

static const stage::Usage USAGE{
    "opencv_free_camera [--device host|cuda] [--frames N]", {"viewer"}, {"--frames"}};

int main(int count, char **arguments) {
  return stage::play(count, arguments, USAGE, [](const Stage &stage) {
    const std::uint64_t frames = stage.number("--frames", 180);
    if (frames == 0)
      throw stage::Misuse("--frames is at least 1");
    return stage.role() == "viewer" ? view(stage) : film(stage, frames);
  });
}
