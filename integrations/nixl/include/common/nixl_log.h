// Takes the place of NIXL's header of this name, which brings Abseil: its other headers need these
// two names, and this plugin compiles none of the code behind them.

#ifndef WARPIPE_NIXL_LOG_H
#define WARPIPE_NIXL_LOG_H

#include <cassert>
#include <iostream>

#define NIXL_ERROR std::cerr
#define NIXL_ASSERT(condition) assert(condition)

#endif
