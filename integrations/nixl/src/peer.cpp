#include "peer.hpp"

#include <chrono>
#include <stdexcept>
#include <thread>

#include "names.hpp"

namespace warpipe_nixl {

namespace {

// NIXL has no deadline for a transfer: its user aborts it by a release.
constexpr std::chrono::hours DEADLINE{24 * 365};
// How long the end of a peer waits for its notifications.
constexpr std::chrono::seconds LAST_WORDS{1};
// For the answer to a `Share`, behind other requests, and for the memory's contents.
constexpr std::chrono::seconds SHARE{30};
constexpr std::size_t NOTIFICATIONS_MAX = 65536;
constexpr std::size_t NOTIFICATION_BYTES_MAX = 1 << 30;

warpipe::Timeline open_life(const std::string &service, const Host &host) {
  warpipe::OpenOptions options;
  options.device = host.device.get();
  return warpipe::Timeline::open(life_name(service), options);
}

warpipe::ClientOptions client_options(const Host &host) {
  warpipe::ClientOptions options;
  options.device = host.device.get();
  // The server takes requests one after another; enough of them wait at its side.
  options.prefetch = 32;
  // Without room a transfer goes on later.
  options.loan_timeout_ns = 1;
  return options;
}

} // namespace

Peer::Peer(std::shared_ptr<Host> host, const std::string &service, std::string local_agent)
    : host_(std::move(host)), service_(service), local_agent_(std::move(local_agent)),
      life_(open_life(service, *host_)), client_(service, client_options(*host_)) {}

Peer::~Peer() {
  try {
    const auto end = std::chrono::steady_clock::now() + LAST_WORDS;
    while (!notifications_.empty() && !is_gone() && std::chrono::steady_clock::now() < end) {
      if (notifications_.front().is_done())
        notifications_.pop_front();
      else
        std::this_thread::sleep_for(std::chrono::microseconds(100));
    }
  } catch (const std::exception &) {
    // The notifications stay undelivered.
  }
}

bool Peer::is_gone() const {
  bool reached = false;
  return warpipe_timeline_is_reached(life_.get(), 1, &reached) == WARPIPE_PEER_GONE;
}

warpipe::Job Peer::send(Op op, const std::vector<Segment> &segments,
                            const std::optional<std::string> &notification,
                            const std::function<void(char *)> &fill) const {
  if (notification && notification->size() > NOTIFICATION_BYTES_MAX)
    throw std::length_error("a notification has at most 1 GiB");
  Header header;
  header.op = op;
  header.segments = static_cast<std::uint32_t>(segments.size());
  header.notifies = notification.has_value();
  header.sender_bytes = static_cast<std::uint32_t>(local_agent_.size());
  header.notification_bytes =
      notification ? static_cast<std::uint32_t>(notification->size()) : 0;
  const std::uint64_t data = op == Op::Write ? total(segments) : 0;
  warpipe::Loan loan = client_.loan(
      warpipe::Layout::contiguous(WARPIPE_UINT8, {header.data_offset() + data}));
  loan.set_metadata(&header, sizeof header);
  char *to = loan.data<char>();
  const auto append = [&to](const void *from, std::size_t bytes) {
    if (bytes > 0)
      std::memcpy(to, from, bytes);
    to += bytes;
  };
  append(segments.data(), segments.size() * sizeof(Segment));
  append(local_agent_.data(), local_agent_.size());
  if (notification)
    append(notification->data(), notification->size());
  if (data > 0)
    fill(to);
  return client_.request(std::move(loan), host_->stream, DEADLINE);
}

warpipe::Memory Peer::open_share(std::uint64_t ordinal, const Segment &whole,
                                 const warpipe::Device &device) const {
  const warpipe::Job asked = send(Op::Share, {{whole.registration, whole.address, 0}}, {}, {});
  warpipe::Sample reply = asked.wait(host_->stream, SHARE);
  const auto shares = reply.to_vector<std::uint64_t>(SHARE);
  if (shares.size() != 1)
    throw std::runtime_error("a reply of another length: use one version of the plugin");
  const std::lock_guard lock(clients_mutex_);
  auto &client = clients_[{ordinal, device.get()}];
  if (!client) {
    warpipe::OpenOptions options;
    options.device = device.get();
    client = warpipe::AllocationClient(memory_name(service_, ordinal), options);
  }
  return client.open(shares[0], SHARE);
}

void Peer::notify(const std::string &message) {
  const std::lock_guard lock(notifications_mutex_);
  while (!notifications_.empty() && notifications_.front().is_done())
    notifications_.pop_front();
  if (notifications_.size() == NOTIFICATIONS_MAX)
    throw std::runtime_error("the peer takes no notifications: 65,536 wait for it");
  notifications_.push_back(send(Op::Notify, {}, message, {}));
}

} // namespace warpipe_nixl
