// The part of pattern.cpp that nvcc compiles.

#ifndef PATTERN_KERNELS_HPP
#define PATTERN_KERNELS_HPP

#include <cstddef>
#include <cstdint>

#ifdef __CUDACC__
#define ON_BOTH __host__ __device__
#else
#define ON_BOTH
#endif

namespace pattern {

ON_BOTH inline std::uint8_t byte_at(std::size_t at, std::uint64_t frame) {
  return static_cast<std::uint8_t>(31 * at + 7 * frame);
}

// Kernels are launched on this GPU from now on, by this thread.
void select_device(std::uint32_t ordinal);
void launch_write(void *stream, std::uint8_t *data, std::size_t bytes, std::uint64_t frame);
void launch_look(void *stream, const std::uint8_t *data, std::size_t bytes, std::uint64_t frame,
                 std::uint32_t *count);

} // namespace pattern

#endif
