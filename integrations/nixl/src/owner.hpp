// The memory that this engine has registered, and the thread that reads and writes it for peers.

#ifndef WARPIPE_NIXL_OWNER_HPP
#define WARPIPE_NIXL_OWNER_HPP

#include <atomic>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <unordered_map>
#include <utility>
#include <vector>

#include <unistd.h>

#include "gpu.hpp"
#include "host.hpp"
#include "warpipe.hpp"
#include "wire.hpp"

namespace warpipe_nixl {

using Notification = std::pair<std::string, std::string>; // sender, message

class Owner {
public:
  // Serves this process's registered memory under the name, until it is destroyed.
  explicit Owner(const std::string &service);
  ~Owner();
  Owner(const Owner &) = delete;
  Owner &operator=(const Owner &) = delete;

  // Peers may read and write the memory from now on, by the number that this returns: memory of the
  // host by requests, that of a GPU by mapping it.
  std::uint64_t add(std::uint64_t address, std::uint64_t bytes);
  std::uint64_t add(std::shared_ptr<Gpu> gpu, std::uint64_t address, std::uint64_t bytes);
  // No peer's request touches the memory once this has returned.
  void remove(std::uint64_t registration);

  // False if too many wait to be taken.
  [[nodiscard]] bool notify(Notification notification);
  std::vector<Notification> take_notifications();

private:
  struct Range {
    std::uint64_t address;
    std::uint64_t bytes;
  };

  struct GpuRange {
    std::shared_ptr<Gpu> gpu;
    Range range;
    // Of each peer, by its agent's name, the last one: another one is asked for when that is open, or
    // has been given up.
    std::unordered_map<std::string, std::uint64_t> shares;
  };

  void serve();
  void answer(warpipe::Lease lease);
  // The output of a read; empty for every other request.
  warpipe::Loan copy(const warpipe::Lease &lease, const Request &request);
  // The share's number, as the output of a `Share`; empty if the memory is not registered.
  warpipe::Loan share(const warpipe::Lease &lease, const Request &request);
  bool holds(const Segment &segment) const;

  Host host_;
  warpipe::Server server_;
  // Held while a request is copied, so that a removal waits for it.
  std::mutex ranges_mutex_;
  std::unordered_map<std::uint64_t, Range> ranges_;
  std::unordered_map<std::uint64_t, GpuRange> gpu_ranges_;
  std::uint64_t last_registration_ = 0;
  std::mutex notifications_mutex_;
  std::vector<Notification> notifications_;
  // Peers open it, and see this process's end by its end. It is never signalled.
  warpipe::Timeline life_;
  // Of the process with the thread: a forked child has none.
  pid_t process_ = getpid();
  std::atomic<bool> ends_{false};
  std::thread thread_;
};

} // namespace warpipe_nixl

#endif
