#include "transfer.hpp"

#include <algorithm>
#include <chrono>
#include <stdexcept>
#include <thread>

namespace warpipe_nixl {

namespace {

constexpr std::size_t PENDING_MAX = 8;
// For the verdict on a reply that is complete: it is there.
constexpr std::chrono::seconds COMPLETE{1};

} // namespace

Transfer::Transfer(Op op, std::shared_ptr<Peer> peer, const std::vector<Piece> &pieces)
    : op_(op), peer_(std::move(peer)), parts_(1) {
  for (Piece rest : pieces) {
    while (rest.remote.bytes > 0) {
      if (parts_.back().bytes == DATA_BYTES_MAX || parts_.back().pieces.size() == SEGMENTS_MAX)
        parts_.emplace_back();
      Part &part = parts_.back();
      Piece piece = rest;
      piece.remote.bytes = std::min(rest.remote.bytes, DATA_BYTES_MAX - part.bytes);
      part.pieces.push_back(piece);
      part.bytes += piece.remote.bytes;
      rest.local += piece.remote.bytes;
      rest.remote.address += piece.remote.bytes;
      rest.remote.bytes -= piece.remote.bytes;
    }
  }
}

nixl_status_t Transfer::post(std::optional<std::string> notification) {
  notification_ = std::move(notification);
  withdraw();
  next_ = 0;
  return check();
}

nixl_status_t Transfer::check() {
  try {
    take_replies();
    send_parts();
  } catch (const warpipe::DataLost &) {
    return disconnected();
  } catch (const warpipe::Error &) {
    if (peer_->is_gone())
      return disconnected();
    withdraw();
    throw;
  }
  if (pending_.empty() && next_ == parts_.size())
    return NIXL_SUCCESS;
  if (peer_->is_gone())
    return disconnected();
  std::this_thread::yield(); // callers poll: the peer's thread may need this CPU
  return NIXL_IN_PROG;
}

nixl_status_t Transfer::disconnected() {
  withdraw();
  return NIXL_ERR_REMOTE_DISCONNECT;
}

void Transfer::withdraw() {
  reply_ = {};
  pending_.clear();
}

void Transfer::take_replies() {
  while (!pending_.empty()) {
    if (!reply_ && !pending_.front().is_done())
      return;
    if (!reply_)
      reply_ = pending_.front().wait(peer_->stream(), std::chrono::nanoseconds(0));
    if (!reply_.is_complete())
      return;
    if (op_ == Op::Read)
      scatter(parts_[next_ - pending_.size()]);
    reply_.finish(COMPLETE);
    pending_.pop_front();
  }
}

void Transfer::scatter(const Part &part) const {
  if (part.bytes == 0)
    return;
  if (reply_.layout().bytes() != part.bytes)
    throw std::runtime_error("a reply of another length: use one version of the plugin");
  const char *from = reply_.data<char>();
  for (const Piece &piece : part.pieces) {
    std::memcpy(piece.local, from, piece.remote.bytes);
    from += piece.remote.bytes;
  }
}

// The last part brings the notification, and goes out when all others are done: a peer that sees
// it has all data.
void Transfer::send_parts() {
  while (next_ < parts_.size() && pending_.size() < PENDING_MAX) {
    const bool notifies = notification_ && next_ + 1 == parts_.size();
    if (notifies && !pending_.empty())
      return;
    try {
      pending_.push_back(send(parts_[next_], notifies ? notification_ : std::nullopt));
    } catch (const warpipe::LimitReached &) {
      return;
    }
    ++next_;
  }
}

warpipe::Job Transfer::send(const Part &part,
                                const std::optional<std::string> &notification) const {
  std::vector<Segment> segments;
  segments.reserve(part.pieces.size());
  for (const Piece &piece : part.pieces)
    segments.push_back(piece.remote);
  return peer_->send(op_, segments, notification, [&part](char *to) {
    for (const Piece &piece : part.pieces) {
      std::memcpy(to, piece.local, piece.remote.bytes);
      to += piece.remote.bytes;
    }
  });
}

} // namespace warpipe_nixl
