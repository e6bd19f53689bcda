#include "gpu.hpp"

#include <chrono>
#include <thread>

#include "names.hpp"

namespace warpipe_nixl {

namespace {

// How long a release waits for copies. A copy that takes longer than this has no end.
constexpr std::chrono::seconds COPIES{30};

warpipe::Timeline done_timeline(const std::string &service, std::uint64_t ordinal,
                                const warpipe::Device &device) {
  warpipe::CreateOptions options;
  options.device = device.get();
  return warpipe::Timeline::create(gpu_name(service, ordinal), options);
}

} // namespace

Gpu::Gpu(const std::string &service, std::uint64_t ordinal)
    : device_("cuda:" + std::to_string(ordinal)), stream_(device_),
      done_(done_timeline(service, ordinal, device_)), memory_(memory_name(service, ordinal), device_) {}

std::uint64_t Gpu::share(std::uint64_t address, std::uint64_t bytes) const {
  return memory_.share(stream_, address, bytes);
}

void Gpu::withdraw(std::uint64_t share) const { memory_.withdraw(share); }

void Gpu::begin(const std::vector<DeviceCopy> &copies, std::uint64_t &number) {
  const std::lock_guard lock(mutex_);
  const auto finish = [&] {
    done_.signal(stream_, last_ + 1);
    number = ++last_;
  };
  try {
    for (const DeviceCopy &copy : copies)
      warpipe::check(
          warpipe_stream_copy(device_.get(), stream_, copy.to, copy.from, copy.bytes));
  } catch (const warpipe::Error &) {
    finish();
    throw;
  }
  finish();
}

bool Gpu::is_done(std::uint64_t number) const {
  if (done_.value() >= number)
    return true;
  const warpipe_status status = warpipe_stream_synchronize(device_.get(), stream_, 0);
  if (status != WARPIPE_TIMEOUT)
    warpipe::check(status);
  return done_.value() >= number;
}

std::shared_ptr<warpipe::Memory> GpuMemory::mapped_on(const Gpu &gpu) {
  const std::lock_guard lock(mutex_);
  auto &mapping = mappings_[&gpu];
  if (!mapping)
    mapping = std::make_shared<warpipe::Memory>(peer_->open_share(ordinal_, whole_, gpu.device()));
  return mapping;
}

GpuTransfer::GpuTransfer(std::shared_ptr<Gpu> gpu, std::shared_ptr<Peer> peer,
                         std::vector<DeviceCopy> copies,
                         std::vector<std::shared_ptr<warpipe::Memory>> mappings)
    : gpu_(std::move(gpu)), peer_(std::move(peer)), copies_(std::move(copies)),
      mappings_(std::move(mappings)) {
  for (const auto &mapping : mappings_)
    mapping->used_on(gpu_->stream());
}

GpuTransfer::~GpuTransfer() {
  try {
    const auto end = std::chrono::steady_clock::now() + COPIES;
    while (!gpu_->is_done(number_) && std::chrono::steady_clock::now() < end)
      std::this_thread::sleep_for(std::chrono::microseconds(20));
  } catch (const std::exception &) {
    // The device has failed, and copies no more.
  }
}

nixl_status_t GpuTransfer::post(std::optional<std::string> notification) {
  if (peer_->is_gone())
    return NIXL_ERR_REMOTE_DISCONNECT;
  notification_ = std::move(notification);
  sent_.reset();
  gpu_->begin(copies_, number_);
  return NIXL_IN_PROG;
}

// The copies end whatever the peer does: until then its memory is mapped and the local memory in
// use, so that its end is told after theirs.
nixl_status_t GpuTransfer::check() {
  if (!gpu_->is_done(number_))
    return NIXL_IN_PROG;
  if (peer_->is_gone())
    return NIXL_ERR_REMOTE_DISCONNECT;
  if (!notification_)
    return NIXL_SUCCESS;
  try {
    if (!sent_)
      sent_ = peer_->send(Op::Notify, {}, notification_, {});
  } catch (const warpipe::LimitReached &) {
    return NIXL_IN_PROG;
  }
  if (!sent_->is_done())
    return NIXL_IN_PROG;
  static_cast<void>(sent_->wait(peer_->stream(), std::chrono::nanoseconds(0)));
  return NIXL_SUCCESS;
}

} // namespace warpipe_nixl
