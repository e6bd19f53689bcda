// One transfer, from its preparation to its release: NIXL's request handle.

#ifndef WARPIPE_NIXL_TRANSFER_HPP
#define WARPIPE_NIXL_TRANSFER_HPP

#include <deque>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "backend/backend_engine.h"
#include "peer.hpp"

namespace warpipe_nixl {

// Bytes of this process and of the peer's, between which a transfer copies.
struct Piece {
  char *local;
  Segment remote;
};

// Goes out in parts of a limited size, a limited number of them at once, and goes on in `check`.
// One thread at a time may use it.
class Transfer : public nixlBackendReqH {
public:
  Transfer(Op op, std::shared_ptr<Peer> peer, const std::vector<Piece> &pieces);

  // Begins it, anew if it was complete.
  nixl_status_t post(std::optional<std::string> notification);
  nixl_status_t check();

private:
  struct Part {
    std::vector<Piece> pieces;
    std::uint64_t bytes = 0;
  };

  void take_replies();
  void scatter(const Part &part) const;
  void withdraw();
  nixl_status_t disconnected();
  void send_parts();
  warpipe::Job send(const Part &part, const std::optional<std::string> &notification) const;

  Op op_;
  std::shared_ptr<Peer> peer_;
  std::vector<Part> parts_;
  std::optional<std::string> notification_;
  // The next part to be sent; those in front of it are done, or pending.
  std::size_t next_ = 0;
  std::deque<warpipe::Job> pending_;
  // The first pending part's reply, until it is complete.
  warpipe::Sample reply_;
};

} // namespace warpipe_nixl

#endif
