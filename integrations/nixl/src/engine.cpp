#include "engine.hpp"

#include <chrono>
#include <iostream>
#include <thread>

#include "names.hpp"
#include "transfer.hpp"

namespace warpipe_nixl {

namespace {

// Registered memory of this process, or of a peer.
struct Registration : nixlBackendMD {
  explicit Registration(std::uint64_t number, std::shared_ptr<GpuMemory> gpu = {})
      : nixlBackendMD(true), number(number), gpu(std::move(gpu)) {}

  // The number that its owner gave it, which is what peers are told.
  std::uint64_t number;
  // Of a GPU's memory in a peer.
  std::shared_ptr<GpuMemory> gpu;
};

// NIXL sees no exception.
template <class Call> nixl_status_t guarded(const char *call, Call run) noexcept {
  try {
    return run();
  } catch (const warpipe::PeerGone &) {
    return NIXL_ERR_REMOTE_DISCONNECT;
  } catch (const warpipe::NotFound &error) {
    std::cerr << "WARPIPE: " << call << ": " << error.what() << '\n';
    return NIXL_ERR_NOT_FOUND;
  } catch (const std::exception &error) {
    std::cerr << "WARPIPE: " << call << ": " << error.what() << '\n';
    return NIXL_ERR_BACKEND;
  }
}

std::vector<Piece> pieces(const nixl_meta_dlist_t &local, const nixl_meta_dlist_t &remote) {
  std::vector<Piece> pieces;
  for (int at = 0; at < local.descCount(); ++at) {
    const auto *registration = static_cast<const Registration *>(remote[at].metadataP);
    pieces.push_back({reinterpret_cast<char *>(local[at].addr),
                      {registration->number, remote[at].addr, remote[at].len}});
  }
  return pieces;
}

// A transfer within this process, done when it is posted.
struct LocalTransfer : nixlBackendReqH {};

DeviceCopy device_copy(nixl_xfer_op_t op, std::uint64_t local, std::uint64_t remote,
                       std::uint64_t bytes) {
  return op == NIXL_READ ? DeviceCopy{local, remote, bytes} : DeviceCopy{remote, local, bytes};
}

// Adds to the last copy what continues it: each copy is a call of the driver.
void add(std::vector<DeviceCopy> &copies, const DeviceCopy &next) {
  if (!copies.empty() && copies.back().to + copies.back().bytes == next.to &&
      copies.back().from + copies.back().bytes == next.from)
    copies.back().bytes += next.bytes;
  else
    copies.push_back(next);
}

} // namespace

Engine::Engine(const nixlBackendInitParams *init)
    : nixlBackendEngine(init), service_(new_service()) {
  const nixl_status_t status = guarded("start", [this] {
    host_ = std::make_shared<Host>();
    owner_ = std::make_unique<Owner>(service_);
    return NIXL_SUCCESS;
  });
  initErr = status != NIXL_SUCCESS;
}

nixl_status_t Engine::registerMem(const nixlBlobDesc &memory, const nixl_mem_t &kind,
                                  nixlBackendMD *&out) {
  return guarded("registerMem", [&] {
    if (kind == DRAM_SEG)
      out = new Registration(owner_->add(memory.addr, memory.len));
    else if (kind == VRAM_SEG)
      out = new Registration(owner_->add(gpu(memory.devId), memory.addr, memory.len));
    else
      return NIXL_ERR_NOT_SUPPORTED;
    return NIXL_SUCCESS;
  });
}

nixl_status_t Engine::deregisterMem(nixlBackendMD *metadata) {
  return guarded("deregisterMem", [&] {
    const std::unique_ptr<Registration> registration(static_cast<Registration *>(metadata));
    owner_->remove(registration->number);
    return NIXL_SUCCESS;
  });
}

nixl_status_t Engine::loadLocalMD(nixlBackendMD *input, nixlBackendMD *&output) {
  return guarded("loadLocalMD", [&] {
    output = new Registration(*static_cast<Registration *>(input)); // unloadMD ends it
    return NIXL_SUCCESS;
  });
}

nixl_status_t Engine::getPublicData(const nixlBackendMD *metadata, std::string &data) const {
  return guarded("getPublicData", [&] {
    data = std::to_string(static_cast<const Registration *>(metadata)->number);
    return NIXL_SUCCESS;
  });
}

nixl_status_t Engine::getConnInfo(std::string &info) const {
  return guarded("getConnInfo", [&] {
    info = service_;
    return NIXL_SUCCESS;
  });
}

nixl_status_t Engine::loadRemoteConnInfo(const std::string &agent, const std::string &info) {
  return guarded("loadRemoteConnInfo", [&] {
    auto peer = std::make_shared<Peer>(host_, info, localAgent);
    const std::lock_guard lock(peers_mutex_);
    peers_.insert_or_assign(agent, std::move(peer));
    return NIXL_SUCCESS;
  });
}

nixl_status_t Engine::loadRemoteMD(const nixlBlobDesc &input, const nixl_mem_t &kind,
                                   const std::string &agent, nixlBackendMD *&output) {
  return guarded("loadRemoteMD", [&] {
    const Segment whole{std::stoull(input.metaInfo), input.addr, input.len};
    auto memory = kind == DRAM_SEG ? std::shared_ptr<GpuMemory>()
                                   : std::make_shared<GpuMemory>(peer(agent), input.devId, whole);
    output = new Registration(whole.registration, std::move(memory));
    return NIXL_SUCCESS;
  });
}

nixl_status_t Engine::unloadMD(nixlBackendMD *metadata) {
  delete metadata;
  return NIXL_SUCCESS;
}

nixl_status_t Engine::connect(const std::string &agent) {
  return guarded("connect", [&] {
    if (agent != localAgent && peer(agent)->is_gone())
      return NIXL_ERR_REMOTE_DISCONNECT;
    return NIXL_SUCCESS;
  });
}

nixl_status_t Engine::disconnect(const std::string &agent) {
  return guarded("disconnect", [&] {
    std::shared_ptr<Peer> ended; // outlives the lock: its end may wait
    const std::lock_guard lock(peers_mutex_);
    if (const auto found = peers_.extract(agent))
      ended = found.mapped();
    return NIXL_SUCCESS;
  });
}

nixl_status_t Engine::prepXfer(const nixl_xfer_op_t &op, const nixl_meta_dlist_t &local,
                               const nixl_meta_dlist_t &remote, const std::string &agent,
                               nixlBackendReqH *&handle, const nixl_opt_b_args_t *) const {
  return guarded("prepXfer", [&] {
    if (local.getType() != remote.getType())
      return NIXL_ERR_NOT_SUPPORTED;
    if (agent == localAgent)
      handle = new LocalTransfer;
    else if (remote.getType() == VRAM_SEG)
      handle = gpu_transfer(op, local, remote, peer(agent)).release();
    else
      handle = new Transfer(op == NIXL_READ ? Op::Read : Op::Write, peer(agent),
                            pieces(local, remote));
    return NIXL_SUCCESS;
  });
}

nixl_status_t Engine::postXfer(const nixl_xfer_op_t &op, const nixl_meta_dlist_t &local,
                               const nixl_meta_dlist_t &remote, const std::string &,
                               nixlBackendReqH *&handle, const nixl_opt_b_args_t *options) const {
  return guarded("postXfer", [&]() -> nixl_status_t {
    std::optional<std::string> notification;
    if (options != nullptr && options->hasNotif)
      notification = options->notifMsg;
    if (auto *transfer = dynamic_cast<Transfer *>(handle))
      return transfer->post(std::move(notification));
    if (auto *transfer = dynamic_cast<GpuTransfer *>(handle))
      return transfer->post(std::move(notification));
    copy_here(op, local, remote);
    if (notification && !owner_->notify({localAgent, *std::move(notification)}))
      return NIXL_ERR_NOT_ALLOWED;
    return NIXL_SUCCESS;
  });
}

nixl_status_t Engine::checkXfer(nixlBackendReqH *handle) const {
  return guarded("checkXfer", [&] {
    if (auto *transfer = dynamic_cast<Transfer *>(handle))
      return transfer->check();
    if (auto *transfer = dynamic_cast<GpuTransfer *>(handle))
      return transfer->check();
    return NIXL_SUCCESS;
  });
}

nixl_status_t Engine::releaseReqH(nixlBackendReqH *handle) const {
  delete handle;
  return NIXL_SUCCESS;
}

nixl_status_t Engine::getNotifs(notif_list_t &notifications) {
  return guarded("getNotifs", [&] {
    for (Notification &notification : owner_->take_notifications())
      notifications.push_back(std::move(notification));
    return NIXL_SUCCESS;
  });
}

nixl_status_t Engine::genNotif(const std::string &agent, const std::string &message) const {
  return guarded("genNotif", [&] {
    if (agent == localAgent)
      return owner_->notify({agent, message}) ? NIXL_SUCCESS : NIXL_ERR_NOT_ALLOWED;
    const auto to = peer(agent);
    if (to->is_gone())
      return NIXL_ERR_REMOTE_DISCONNECT;
    to->notify(message);
    return NIXL_SUCCESS;
  });
}

std::shared_ptr<Peer> Engine::peer(const std::string &agent) const {
  const std::lock_guard lock(peers_mutex_);
  const auto found = peers_.find(agent);
  if (found == peers_.end())
    throw std::runtime_error("no metadata of the agent " + agent + ": load it first");
  return found->second;
}

std::shared_ptr<Gpu> Engine::gpu(std::uint64_t ordinal) const {
  const std::lock_guard lock(gpus_mutex_);
  auto &gpu = gpus_[ordinal];
  if (!gpu)
    gpu = std::make_shared<Gpu>(service_, ordinal);
  return gpu;
}

// The GPU of the local memory copies.
std::unique_ptr<GpuTransfer> Engine::gpu_transfer(nixl_xfer_op_t op, const nixl_meta_dlist_t &local,
                                                  const nixl_meta_dlist_t &remote,
                                                  std::shared_ptr<Peer> peer) const {
  const auto copier = gpu(local[0].devId);
  std::vector<DeviceCopy> copies;
  std::map<GpuMemory *, std::shared_ptr<warpipe::Memory>> mappings;
  for (int at = 0; at < local.descCount(); ++at) {
    auto &memory = *static_cast<Registration *>(remote[at].metadataP)->gpu;
    auto &mapping = mappings[&memory];
    if (!mapping)
      mapping = memory.mapped_on(*copier);
    const std::uint64_t there = mapping->info().data + (remote[at].addr - memory.address());
    add(copies, device_copy(op, local[at].addr, there, local[at].len));
  }
  std::vector<std::shared_ptr<warpipe::Memory>> kept;
  for (auto &[memory, mapping] : mappings)
    kept.push_back(std::move(mapping));
  return std::make_unique<GpuTransfer>(copier, std::move(peer), std::move(copies), std::move(kept));
}

void Engine::copy_here(nixl_xfer_op_t op, const nixl_meta_dlist_t &local,
                       const nixl_meta_dlist_t &remote) const {
  std::vector<DeviceCopy> copies;
  for (int at = 0; at < local.descCount(); ++at)
    add(copies, device_copy(op, local[at].addr, remote[at].addr, local[at].len));
  if (local.getType() == DRAM_SEG) {
    for (const DeviceCopy &copy : copies)
      std::memmove(reinterpret_cast<void *>(copy.to), reinterpret_cast<const void *>(copy.from),
                   copy.bytes);
    return;
  }
  const auto copier = gpu(local[0].devId);
  std::uint64_t number = 0;
  copier->begin(copies, number);
  while (!copier->is_done(number))
    std::this_thread::sleep_for(std::chrono::microseconds(20));
}

} // namespace warpipe_nixl
