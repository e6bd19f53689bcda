// Bytes that a kernel writes, and that a kernel of another process finds again: on a GPU the
// kernels of pattern.cu, on the host device functions that the CPU runs in the stream's order.

#ifndef PATTERN_HPP
#define PATTERN_HPP

#include <cstddef>
#include <cstdint>

#include <warpipe.hpp>

namespace pattern {

// Enqueues writing the pattern of this frame.
void write(const warpipe::Device &device, const warpipe::Stream &stream, std::uint8_t *data,
           std::size_t bytes, std::uint64_t frame);

// Counts the bytes that differ from the pattern, in the order of one stream.
class Checker {
public:
  Checker(const warpipe::Device &device, const warpipe::Stream &stream);

  // Enqueues looking at a frame's bytes.
  void look(const std::uint8_t *data, std::size_t bytes, std::uint64_t frame);
  // Waits for the stream; how many bytes differed since the last call.
  std::uint32_t faults(warpipe::Duration timeout);

private:
  const warpipe::Device *device_;
  const warpipe::Stream *stream_;
  warpipe::Memory count_;
};

} // namespace pattern

#endif
