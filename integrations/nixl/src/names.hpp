// The names under which an engine is found in the domain.

#ifndef WARPIPE_NIXL_NAMES_HPP
#define WARPIPE_NIXL_NAMES_HPP

#include <cstdint>
#include <cstdio>
#include <random>
#include <string>

namespace warpipe_nixl {

// A name that no other engine has had: metadata of one that ended leads nowhere, whatever engine
// its agent's name belongs to now.
inline std::string new_service() {
  std::random_device random;
  std::string name = "nixl/";
  for (int part = 0; part < 4; ++part) {
    char digits[9];
    std::snprintf(digits, sizeof digits, "%08x", random());
    name += digits;
  }
  return name;
}

inline std::string life_name(const std::string &service) { return service + "/life"; }

// Of the timeline of an engine's GPU, and of the server that shares its memory.
inline std::string gpu_name(const std::string &service, std::uint64_t ordinal) {
  return service + "/gpu" + std::to_string(ordinal);
}
inline std::string memory_name(const std::string &service, std::uint64_t ordinal) {
  return gpu_name(service, ordinal) + "/memory";
}

} // namespace warpipe_nixl

#endif
