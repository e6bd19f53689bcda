// A request from one engine to another: a header in the request's metadata, then in its memory the
// segments, the sender's name, the notification and, for a write, the data of all segments. The
// reply to a read is the data of all segments, that to a `Share` of one GPU's registration the number
// of the share to open; other replies are empty.
//
// The peer writes these bytes. `Request::parse` copies the header, checks every length against the
// memory that has come, and says nothing about the segments: only their owner can check those.

#ifndef WARPIPE_NIXL_WIRE_HPP
#define WARPIPE_NIXL_WIRE_HPP

#include <cstdint>
#include <cstring>
#include <optional>
#include <string_view>
#include <vector>

namespace warpipe_nixl {

enum class Op : std::uint32_t { Notify = 0, Read = 1, Write = 2, Share = 3 };

// Bytes of a peer's registered memory.
struct Segment {
  std::uint64_t registration;
  std::uint64_t address;
  std::uint64_t bytes;
};

// What one request asks for at most, so that peers are served in turn.
inline constexpr std::uint64_t DATA_BYTES_MAX = 4 << 20;
inline constexpr std::size_t SEGMENTS_MAX = 8192;

inline std::uint64_t total(const std::vector<Segment> &segments) {
  std::uint64_t bytes = 0;
  for (const Segment &segment : segments)
    bytes += segment.bytes;
  return bytes;
}

struct Header {
  static constexpr std::uint32_t VERSION = 2;

  std::uint32_t version = VERSION;
  Op op = Op::Notify;
  std::uint32_t segments = 0;
  std::uint32_t notifies = 0;
  std::uint32_t sender_bytes = 0;
  std::uint32_t notification_bytes = 0;

  std::uint64_t data_offset() const {
    return std::uint64_t{segments} * sizeof(Segment) + sender_bytes + notification_bytes;
  }
};
static_assert(sizeof(Header) == 24);

// A request that has come, in the memory of its sender.
struct Request {
  Op op;
  std::vector<Segment> segments;
  std::string_view sender;
  std::optional<std::string_view> notification;
  const char *data;

  // Nothing, if the bytes are no request of this version.
  static std::optional<Request> parse(const void *metadata, std::size_t metadata_bytes,
                                      const char *memory, std::uint64_t bytes) {
    Header header;
    if (metadata_bytes != sizeof header)
      return {};
    std::memcpy(&header, metadata, sizeof header);
    if (header.version != Header::VERSION || header.op > Op::Share ||
        header.segments > SEGMENTS_MAX || header.data_offset() > bytes)
      return {};
    Request request{header.op, std::vector<Segment>(header.segments), {}, {}, nullptr};
    const std::size_t table = header.segments * sizeof(Segment);
    if (table > 0)
      std::memcpy(request.segments.data(), memory, table);
    request.sender = {memory + table, header.sender_bytes};
    if (header.notifies != 0)
      request.notification = {memory + table + header.sender_bytes, header.notification_bytes};
    request.data = memory + header.data_offset();
    if (!request.fits(bytes - header.data_offset()))
      return {};
    return request;
  }

private:
  // Whether it asks for no more than it may, and a write brings the data that its segments take.
  bool fits(std::uint64_t data_bytes) const {
    std::uint64_t bytes = 0;
    for (const Segment &segment : segments) {
      if (segment.bytes > DATA_BYTES_MAX - bytes)
        return false;
      bytes += segment.bytes;
    }
    return op != Op::Write || bytes == data_bytes;
  }
};

} // namespace warpipe_nixl

#endif
