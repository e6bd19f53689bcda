// The way to another engine.

#ifndef WARPIPE_NIXL_PEER_HPP
#define WARPIPE_NIXL_PEER_HPP

#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "host.hpp"
#include "warpipe.hpp"
#include "wire.hpp"

namespace warpipe_nixl {

// Any number of threads may use it.
class Peer {
public:
  // Throws warpipe::NotFound if no living engine of this machine has the name.
  Peer(std::shared_ptr<Host> host, const std::string &service, std::string local_agent);
  // Waits a little for notifications on their way.
  ~Peer();
  Peer(const Peer &) = delete;
  Peer &operator=(const Peer &) = delete;

  // Whether it has closed or died.
  bool is_gone() const;

  // Sends a request; `fill` writes a write's data. It is withdrawn if what this returns is
  // destroyed before its reply is there. Throws warpipe::LimitReached if there is no memory now.
  warpipe::Job send(Op op, const std::vector<Segment> &segments,
                        const std::optional<std::string> &notification,
                        const std::function<void(char *)> &fill) const;
  // Maps registered memory of its GPU.
  warpipe::Memory open_share(std::uint64_t ordinal, const Segment &whole,
                             const warpipe::Device &device) const;
  // Sends a notification alone. Throws if too many wait for the peer.
  void notify(const std::string &message);

  void *stream() const { return host_->stream; }

private:
  std::shared_ptr<Host> host_;
  std::string service_;
  std::string local_agent_;
  warpipe::Timeline life_;
  warpipe::Client client_;
  mutable std::mutex clients_mutex_;
  // By the GPU in the peer, and the one here.
  mutable std::map<std::pair<std::uint64_t, const warpipe_device *>, warpipe::AllocationClient>
      clients_;
  std::mutex notifications_mutex_;
  // Kept until they are delivered.
  std::deque<warpipe::Job> notifications_;
};

} // namespace warpipe_nixl

#endif
