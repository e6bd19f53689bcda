#include "pattern.hpp"

#include <stdexcept>

#include "pattern_kernels.hpp"

namespace pattern {

#ifndef HAVE_KERNELS
// Built without nvcc: for the host device alone.
[[noreturn]] static void no_kernels() {
  throw std::runtime_error("built without nvcc, hence without kernels; use --device host");
}
void select_device(std::uint32_t) { no_kernels(); }
void launch_write(void *, std::uint8_t *, std::size_t, std::uint64_t) { no_kernels(); }
void launch_look(void *, const std::uint8_t *, std::size_t, std::uint64_t, std::uint32_t *) {
  no_kernels();
}
#endif

// Whether kernels do the work.
static bool has_kernels(const warpipe::Device &device) {
  const warpipe_device_info info = device.info();
  if (info.is_cuda)
    select_device(info.ordinal);
  return info.is_cuda;
}

void write(const warpipe::Device &device, const warpipe::Stream &stream, std::uint8_t *data,
           std::size_t bytes, std::uint64_t frame) {
  if (has_kernels(device))
    return launch_write(stream.get(), data, bytes, frame);
  stream.call([=] {
    for (std::size_t at = 0; at < bytes; at++)
      data[at] = byte_at(at, frame);
  });
}

Checker::Checker(const warpipe::Device &device, const warpipe::Stream &stream)
    : device_(&device), stream_(&stream),
      count_(warpipe::Memory::allocate(device, sizeof(std::uint32_t))) {
  count_.used_on(stream); // its end comes behind the kernels
  const std::uint32_t none = 0;
  count_.write(stream, 0, &none, sizeof none);
}

void Checker::look(const std::uint8_t *data, std::size_t bytes, std::uint64_t frame) {
  auto *count = count_.data<std::uint32_t>();
  if (has_kernels(*device_))
    return launch_look(stream_->get(), data, bytes, frame, count);
  stream_->call([=] {
    for (std::size_t at = 0; at < bytes; at++)
      *count += data[at] != byte_at(at, frame);
  });
}

std::uint32_t Checker::faults(warpipe::Duration timeout) {
  stream_->synchronize(timeout);
  const std::uint32_t count = count_.to_vector<std::uint32_t>(timeout).at(0);
  const std::uint32_t none = 0;
  count_.write(*stream_, 0, &none, sizeof none);
  return count;
}

} // namespace pattern
