// Nine tensors of LibTorch, of nine element types, cross to a child process twice, and come back
// changed:
//
//   1. Over POSIX pipes. A handle is no tensor: the parent copies all of them into memory that it
//      publishes, waits until they are complete, and writes lines of text: the memory's ticket,
//      then element type, offset and shape of each tensor.
//   2. Over a channel, by DLPack. Nothing has to be written down, and nothing waits for the device.
//
// The child computes an answer to each tensor of the channel, and the parent compares. Among the
// nine are a strided view, a tensor without dimensions and an empty one.
//
// The child is started with posix_spawn: CUDA does not survive fork().
//
//   libtorch_pipes [--device host|cuda]

#include "stage.hpp"

#include <sstream>

#include <ATen/ATen.h>
#include <ATen/DLConvertor.h>

using stage::ensure, stage::patience, stage::Process, stage::Stage;

// The default stream, which is PyTorch's current stream unless a program changes that: then this is
// c10::cuda::getCurrentCUDAStream().stream().
static constexpr void *STREAM = nullptr;

static at::Device torch_device(const warpipe::Device &device) {
  const warpipe_device_info info = device.info();
  return info.is_cuda ? at::Device(at::kCUDA, static_cast<at::DeviceIndex>(info.ordinal))
                      : at::Device(at::kCPU);
}

// The tensors, which both processes know.
static std::vector<at::Tensor> tensors(const at::Device &device) {
  const auto numbers = [&](at::ScalarType type) {
    return at::arange(12, at::TensorOptions().device(device)).reshape({3, 4}).to(type);
  };
  return {
      numbers(at::kFloat).t(), // strided: the columns as rows
      numbers(at::kDouble).select(1, 2), // one column
      numbers(at::kHalf),
      numbers(at::kBFloat16),
      numbers(at::kLong).sum(),         // without dimensions
      numbers(at::kInt).slice(0, 0, 0), // empty: 0 x 4
      numbers(at::kByte),
      numbers(at::kInt).remainder(2).to(at::kBool),
      at::complex(numbers(at::kFloat), -numbers(at::kFloat)),
  };
}

static at::Tensor answer_to(const at::Tensor &tensor) {
  return tensor.scalar_type() == at::kBool ? tensor.logical_not() : tensor + tensor;
}

static void compare(const at::Tensor &found, const at::Tensor &wanted, const std::string &way) {
  ensure(found.scalar_type() == wanted.scalar_type() && at::equal(found, wanted),
         std::string("a tensor of ") + at::toString(wanted.scalar_type()) + " came wrong by " +
             way);
}

// A part of the memory as a tensor, which keeps the memory open.
static at::Tensor view(const warpipe::Memory &memory, warpipe_layout layout, std::size_t offset) {
  layout.offset = offset;
  warpipe::check(warpipe_layout_check(&layout));
  return at::fromDLPack(memory.to_dlpack_legacy(warpipe::Layout(layout)));
}

// Element type and shape of a tensor, row-major.
static warpipe_layout layout_of(const at::Tensor &tensor) {
  DLManagedTensor *const exported = at::toDLPack(tensor);
  warpipe_layout layout;
  const warpipe_status status = warpipe_dlpack_get_layout_legacy(exported, &layout);
  exported->deleter(exported);
  warpipe::check(status);
  return layout;
}

// Copies the tensors into the memory, and describes each one.
static std::vector<std::string> place(const std::vector<at::Tensor> &tensors,
                                      const warpipe::Device &device,
                                      const warpipe::Memory &memory) {
  std::vector<std::string> lines;
  std::size_t offset = 0;
  for (const at::Tensor &tensor : tensors) {
    const warpipe_layout layout = layout_of(tensor);
    view(memory, layout, offset).copy_(tensor);
    std::ostringstream line;
    line << layout.dtype << ' ' << offset;
    for (const std::uint64_t length : warpipe::Layout(layout).shape())
      line << ' ' << length;
    lines.push_back(line.str());
    offset = (offset + layout.bytes + 255) / 256 * 256; // as cudaMalloc aligns
  }
  // Complete, before anybody hears of it: a handle orders no work.
  warpipe::check(warpipe_stream_synchronize(device.get(), STREAM, warpipe::nanoseconds(patience)));
  return lines;
}

static at::Tensor tensor_at(const warpipe::Memory &memory, const std::string &description) {
  std::istringstream words(description);
  std::uint32_t dtype = 0;
  std::size_t offset = 0;
  std::vector<std::uint64_t> shape;
  words >> dtype >> offset;
  for (std::uint64_t length = 0; words >> length;)
    shape.push_back(length);
  return view(memory, *warpipe::Layout::contiguous(dtype, shape).get(), offset);
}

// Receives a tensor as one of LibTorch, which releases the sample when it is freed.
static at::Tensor receive(warpipe::Subscriber &subscriber, const warpipe::Device &device) {
  warpipe::Sample sample = subscriber.receive(STREAM, patience);
  if (!device.is_cuda())
    sample.wait(patience); // LibTorch computes on the CPU at once, and not in a stream's order
  return at::fromDLPack(sample.to_dlpack_legacy());
}

static void send(const warpipe::Publisher &publisher, const at::Tensor &tensor) {
  DLManagedTensor *const exported = at::toDLPack(tensor);
  publisher.send_dlpack(STREAM, exported);
  exported->deleter(exported);
}

template <class Options> static Options options_for(const warpipe::Device &device) {
  Options options;
  options.device = device.get();
  return options;
}

static std::string answer(const Stage &stage) {
  const warpipe::Device device = stage.device();
  const std::vector<at::Tensor> wanted = tensors(torch_device(device));
  warpipe::Publisher answers("answers", options_for<warpipe::PublisherOptions>(device));

  stage::Lines pipe(dup(STDIN_FILENO));
  {
    const auto memory = warpipe::Memory::open(pipe.next(), device, patience);
    memory.used_on(STREAM); // it is unmapped behind LibTorch's work
    for (const at::Tensor &tensor : wanted)
      compare(tensor_at(memory, pipe.next()), tensor, "the pipe");
  }
  auto options = options_for<warpipe::SubscriberOptions>(device);
  options.wait_ns = warpipe::nanoseconds(patience);
  warpipe::Subscriber questions("tensors", options);
  answers.wait_for_subscribers(1, patience);
  for (const at::Tensor &tensor : wanted) {
    const at::Tensor found = receive(questions, device);
    compare(found, tensor, "the channel");
    send(answers, answer_to(found));
  }
  pipe.next(); // the parent has all answers
  return "compared " + std::to_string(wanted.size()) + " tensors twice";
}

static std::string ask(const Stage &stage) {
  const warpipe::Device device = stage.device();
  const std::vector<at::Tensor> sent = tensors(torch_device(device));
  Process child = stage.start("child");

  const auto memory = warpipe::Memory::allocate(device, 1 << 16);
  const std::vector<std::string> lines = place(sent, device, memory);
  const warpipe::Published published(memory, "nine-tensors");
  child.tell(published.ticket());
  for (const std::string &line : lines)
    child.tell(line);

  warpipe::Publisher questions("tensors", options_for<warpipe::PublisherOptions>(device));
  auto options = options_for<warpipe::SubscriberOptions>(device);
  options.wait_ns = warpipe::nanoseconds(patience);
  warpipe::Subscriber answers("answers", options);
  questions.wait_for_subscribers(1, patience);
  for (const at::Tensor &tensor : sent)
    send(questions, tensor);
  for (const at::Tensor &tensor : sent)
    compare(receive(answers, device), answer_to(tensor), "the channel back");
  child.tell("thank you");
  child.hear();
  child.finish();
  return std::to_string(sent.size()) + " tensors went over pipes and over a channel, and came back "
                                       "changed, each with its values";
}

static const stage::Usage USAGE{"libtorch_pipes [--device host|cuda]", {"child"}, {}};

int main(int count, char **arguments) {
  return stage::play(count, arguments, USAGE, [](const Stage &stage) {
    return stage.role() == "child" ? answer(stage) : ask(stage);
  });
}
