#include "engine.hpp"

#include <iostream>

#include "names.hpp"
#include "transfer.hpp"

namespace warpipe_nixl {

namespace {

// Registered memory, of this process or of a peer, by the number that its owner gave it.
struct Registration : nixlBackendMD {
  explicit Registration(std::uint64_t number) : nixlBackendMD(true), number(number) {}
  std::uint64_t number;
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

void copy(nixl_xfer_op_t op, const nixl_meta_dlist_t &local, const nixl_meta_dlist_t &remote) {
  for (int at = 0; at < local.descCount(); ++at) {
    auto *here = reinterpret_cast<void *>(local[at].addr);
    auto *there = reinterpret_cast<void *>(remote[at].addr);
    if (op == NIXL_READ)
      std::memmove(here, there, local[at].len);
    else
      std::memmove(there, here, local[at].len);
  }
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
  if (kind != DRAM_SEG)
    return NIXL_ERR_NOT_SUPPORTED;
  return guarded("registerMem", [&] {
    out = new Registration(owner_->add(memory.addr, memory.len));
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
                                   const std::string &, nixlBackendMD *&output) {
  if (kind != DRAM_SEG)
    return NIXL_ERR_NOT_SUPPORTED;
  return guarded("loadRemoteMD", [&] {
    output = new Registration(std::stoull(input.metaInfo));
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
    if (agent == localAgent)
      handle = new LocalTransfer;
    else
      handle = new Transfer(op == NIXL_READ ? Op::Read : Op::Write, peer(agent),
                            pieces(local, remote));
    return NIXL_SUCCESS;
  });
}

nixl_status_t Engine::postXfer(const nixl_xfer_op_t &op, const nixl_meta_dlist_t &local,
                               const nixl_meta_dlist_t &remote, const std::string &agent,
                               nixlBackendReqH *&handle, const nixl_opt_b_args_t *options) const {
  return guarded("postXfer", [&] {
    std::optional<std::string> notification;
    if (options != nullptr && options->hasNotif)
      notification = options->notifMsg;
    if (agent != localAgent)
      return static_cast<Transfer *>(handle)->post(std::move(notification));
    copy(op, local, remote);
    if (notification && !owner_->notify({localAgent, *std::move(notification)}))
      return NIXL_ERR_NOT_ALLOWED;
    return NIXL_SUCCESS;
  });
}

nixl_status_t Engine::checkXfer(nixlBackendReqH *handle) const {
  return guarded("checkXfer", [&] {
    auto *transfer = dynamic_cast<Transfer *>(handle);
    return transfer == nullptr ? NIXL_SUCCESS : transfer->check();
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

} // namespace warpipe_nixl
