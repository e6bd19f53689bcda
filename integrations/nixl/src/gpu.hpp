// Memory of GPUs: a peer's is mapped, and a device copies.

#ifndef WARPIPE_NIXL_GPU_HPP
#define WARPIPE_NIXL_GPU_HPP

#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "backend/backend_engine.h"
#include "peer.hpp"

namespace warpipe_nixl {

struct DeviceCopy {
  std::uint64_t to;
  std::uint64_t from;
  std::uint64_t bytes;
};

// A GPU of this process, with a stream for copies. Any number of threads may use it.
class Gpu {
public:
  Gpu(const std::string &service, std::uint64_t ordinal);

  const warpipe::Device &device() const { return device_; }
  void *stream() const { return stream_.get(); }
  // The number of a share of this GPU's memory, for one peer; `withdraw` takes back one that the peer
  // has not opened.
  std::uint64_t share(std::uint64_t address, std::uint64_t bytes) const;
  void withdraw(std::uint64_t share) const;
  // Enqueues the copies. `number`, to ask with, is also set if one of them fails: the earlier ones
  // are under way.
  void begin(const std::vector<DeviceCopy> &copies, std::uint64_t &number);
  // Throws if the device has failed.
  bool is_done(std::uint64_t number) const;

private:
  warpipe::Device device_;
  warpipe::Stream stream_;
  warpipe::Timeline done_;
  warpipe::AllocationServer memory_;
  std::mutex mutex_;
  std::uint64_t last_ = 0;
};

// Registered memory of a GPU in a peer. Any number of threads may use it.
class GpuMemory {
public:
  GpuMemory(std::shared_ptr<Peer> peer, std::uint64_t ordinal, Segment whole)
      : peer_(std::move(peer)), ordinal_(ordinal), whole_(whole) {}

  // Mapped for the GPU, once. Throws if the peer has deregistered it.
  std::shared_ptr<warpipe::Memory> mapped_on(const Gpu &gpu);
  // The first byte's address in its owner.
  std::uint64_t address() const { return whole_.address; }

private:
  std::shared_ptr<Peer> peer_;
  // The GPU's in its owner.
  std::uint64_t ordinal_;
  Segment whole_;
  std::mutex mutex_;
  std::map<const Gpu *, std::shared_ptr<warpipe::Memory>> mappings_;
};

// A transfer from or to a peer's memory that is mapped.
class GpuTransfer : public nixlBackendReqH {
public:
  // The mappings are kept until the copies are done.
  GpuTransfer(std::shared_ptr<Gpu> gpu, std::shared_ptr<Peer> peer, std::vector<DeviceCopy> copies,
              std::vector<std::shared_ptr<warpipe::Memory>> mappings);
  // Waits for the copies: their memory is the caller's again.
  ~GpuTransfer() override;

  nixl_status_t post(std::optional<std::string> notification);
  nixl_status_t check();

private:
  std::shared_ptr<Gpu> gpu_;
  std::shared_ptr<Peer> peer_;
  std::vector<DeviceCopy> copies_;
  std::vector<std::shared_ptr<warpipe::Memory>> mappings_;
  // The copies under way, or the last ones.
  std::uint64_t number_ = 0;
  std::optional<std::string> notification_;
  std::optional<warpipe::Job> sent_;
};

} // namespace warpipe_nixl

#endif
