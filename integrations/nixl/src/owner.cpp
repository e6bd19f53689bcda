#include "owner.hpp"

#include <algorithm>
#include <chrono>
#include <iostream>

#include "names.hpp"

namespace warpipe_nixl {

namespace {

// How long the thread waits for a request before it looks whether it shall end.
constexpr std::chrono::milliseconds WAIT{20};
// How long a reply waits for room: a peer that takes no replies must not keep the others waiting.
constexpr std::chrono::milliseconds ROOM{100};
// How long the data of a request that has come may take: its sender wrote it before it sent it.
constexpr std::chrono::seconds COMPLETE{1};
constexpr std::size_t NOTIFICATIONS_MAX = 1 << 20;
// Of one registration of a GPU's memory.
constexpr std::size_t PEERS_MAX = 4096;
constexpr const char *NOT_REGISTERED = "not registered: load the agent's present metadata";

warpipe::ServerOptions server_options(const Host &host) {
  warpipe::ServerOptions options;
  options.device = host.device.get();
  options.answer_timeout_ns = std::chrono::nanoseconds(ROOM).count();
  return options;
}

warpipe::Timeline life(const std::string &service, const Host &host) {
  warpipe::CreateOptions options;
  options.device = host.device.get();
  return warpipe::Timeline::create(life_name(service), options);
}

} // namespace

Owner::Owner(const std::string &service)
    : server_(service, server_options(host_)), life_(life(service, host_)),
      thread_([this] { serve(); }) {}

Owner::~Owner() {
  ends_ = true;
  if (getpid() == process_)
    thread_.join();
  else
    thread_.detach();
}

std::uint64_t Owner::add(std::uint64_t address, std::uint64_t bytes) {
  const std::lock_guard lock(ranges_mutex_);
  ranges_[++last_registration_] = Range{address, bytes};
  return last_registration_;
}

std::uint64_t Owner::add(std::shared_ptr<Gpu> gpu, std::uint64_t address, std::uint64_t bytes) {
  gpu->withdraw(gpu->share(address, bytes)); // throws for memory that peers cannot map
  const std::lock_guard lock(ranges_mutex_);
  gpu_ranges_[++last_registration_] = GpuRange{std::move(gpu), Range{address, bytes}, {}};
  return last_registration_;
}

void Owner::remove(std::uint64_t registration) {
  const std::lock_guard lock(ranges_mutex_);
  ranges_.erase(registration);
  if (const auto found = gpu_ranges_.extract(registration))
    for (const auto &[peer, share] : found.mapped().shares)
      found.mapped().gpu->withdraw(share);
}

bool Owner::notify(Notification notification) {
  const std::lock_guard lock(notifications_mutex_);
  if (notifications_.size() == NOTIFICATIONS_MAX)
    return false;
  notifications_.push_back(std::move(notification));
  return true;
}

std::vector<Notification> Owner::take_notifications() {
  const std::lock_guard lock(notifications_mutex_);
  return std::exchange(notifications_, {});
}

void Owner::serve() {
  while (!ends_) {
    try {
      answer(server_.accept(host_.stream, WAIT));
    } catch (const warpipe::Timeout &) {
    } catch (const warpipe::DataLost &) {
      // The sender died before its request was complete.
    } catch (const warpipe::PeerGone &) {
    } catch (const std::exception &error) {
      std::cerr << "WARPIPE: a peer's request is not answered: " << error.what() << '\n';
      std::this_thread::sleep_for(WAIT);
    }
  }
}

void Owner::answer(warpipe::Lease lease) {
  lease.wait(COMPLETE);
  const warpipe_sample_info &info = lease.info();
  const auto request = Request::parse(info.metadata, info.metadata_bytes, lease.data<char>(),
                                      info.layout.bytes);
  if (!request) {
    lease.reject("no request of this version: use one version of the plugin");
    return;
  }
  warpipe::Loan output;
  {
    const std::lock_guard lock(ranges_mutex_);
    const auto is_held = [this](const Segment &segment) { return holds(segment); };
    if (request->op == Op::Share)
      output = share(lease, *request);
    else if (std::all_of(request->segments.begin(), request->segments.end(), is_held))
      output = copy(lease, *request);
    else
      return lease.reject(NOT_REGISTERED);
    if (request->op == Op::Share && !output)
      return lease.reject(NOT_REGISTERED);
  }
  if (request->notification &&
      !notify({std::string(request->sender), std::string(*request->notification)})) {
    output = {};
    lease.reject("too many notifications wait: the agent must take them with getNotifs");
    return;
  }
  if (output)
    lease.complete(std::move(output), host_.stream);
  else
    lease.complete(host_.stream);
}

warpipe::Loan Owner::copy(const warpipe::Lease &lease, const Request &request) {
  if (request.op == Op::Write) {
    const char *from = request.data;
    for (const Segment &segment : request.segments) {
      std::memcpy(reinterpret_cast<void *>(segment.address), from, segment.bytes);
      from += segment.bytes;
    }
  }
  const std::uint64_t bytes = total(request.segments);
  if (request.op != Op::Read || bytes == 0)
    return {};
  warpipe::Loan output = lease.output(warpipe::Layout::contiguous(WARPIPE_UINT8, {bytes}));
  char *to = output.data<char>();
  for (const Segment &segment : request.segments) {
    std::memcpy(to, reinterpret_cast<const void *>(segment.address), segment.bytes);
    to += segment.bytes;
  }
  return output;
}

warpipe::Loan Owner::share(const warpipe::Lease &lease, const Request &request) {
  if (request.segments.size() != 1)
    return {};
  const auto found = gpu_ranges_.find(request.segments[0].registration);
  if (found == gpu_ranges_.end())
    return {};
  auto &[gpu, range, shares] = found->second;
  const std::string peer(request.sender);
  if (shares.size() == PEERS_MAX && !shares.contains(peer))
    return {};
  warpipe::Loan output =
      lease.output(warpipe::Layout::contiguous(WARPIPE_UINT8, {sizeof(std::uint64_t)}));
  if (const auto last = shares.extract(peer))
    gpu->withdraw(last.mapped());
  const std::uint64_t share = shares[peer] = gpu->share(range.address, range.bytes);
  std::memcpy(output.data<char>(), &share, sizeof share);
  return output;
}

bool Owner::holds(const Segment &segment) const {
  const auto found = ranges_.find(segment.registration);
  if (found == ranges_.end() || segment.address < found->second.address)
    return false;
  const std::uint64_t offset = segment.address - found->second.address;
  return offset <= found->second.bytes && segment.bytes <= found->second.bytes - offset;
}

} // namespace warpipe_nixl
