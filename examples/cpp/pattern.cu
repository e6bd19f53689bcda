// The kernels of pattern.hpp. They run on streams of warpipe, which are streams of CUDA.

#include <stdexcept>
#include <string>

#include "pattern_kernels.hpp"

namespace pattern {

static constexpr int BLOCKS = 512, THREADS = 256;

static __global__ void write_bytes(std::uint8_t *data, std::size_t bytes, std::uint64_t frame) {
  for (std::size_t at = blockIdx.x * std::size_t{THREADS} + threadIdx.x; at < bytes;
       at += std::size_t{BLOCKS} * THREADS)
    data[at] = byte_at(at, frame);
}

static __global__ void count_differences(const std::uint8_t *data, std::size_t bytes,
                                         std::uint64_t frame, std::uint32_t *count) {
  std::uint32_t found = 0;
  for (std::size_t at = blockIdx.x * std::size_t{THREADS} + threadIdx.x; at < bytes;
       at += std::size_t{BLOCKS} * THREADS)
    found += data[at] != byte_at(at, frame);
  if (found > 0)
    atomicAdd(count, found);
}

static void check(cudaError_t error) {
  if (error != cudaSuccess)
    throw std::runtime_error(std::string("CUDA: ") + cudaGetErrorString(error));
}

void select_device(std::uint32_t ordinal) { check(cudaSetDevice(static_cast<int>(ordinal))); }

void launch_write(void *stream, std::uint8_t *data, std::size_t bytes, std::uint64_t frame) {
  write_bytes<<<BLOCKS, THREADS, 0, static_cast<cudaStream_t>(stream)>>>(data, bytes, frame);
  check(cudaGetLastError());
}

void launch_look(void *stream, const std::uint8_t *data, std::size_t bytes, std::uint64_t frame,
                 std::uint32_t *count) {
  count_differences<<<BLOCKS, THREADS, 0, static_cast<cudaStream_t>(stream)>>>(data, bytes, frame,
                                                                               count);
  check(cudaGetLastError());
}

} // namespace pattern
