// The host as a device.

#ifndef WARPIPE_NIXL_HOST_HPP
#define WARPIPE_NIXL_HOST_HPP

#include "warpipe.hpp"

namespace warpipe_nixl {

struct Host {
  warpipe::Device device{"host"};
  warpipe::Stream stream{device};
};

} // namespace warpipe_nixl

#endif
