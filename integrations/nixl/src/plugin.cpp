// What NIXL loads: libplugin_WARPIPE.so in $NIXL_PLUGIN_DIR.

#include "backend/backend_plugin.h"
#include "engine.hpp"

namespace {

nixlBackendEngine *create(const nixlBackendInitParams *init) {
  try {
    return new warpipe_nixl::Engine(init);
  } catch (const std::exception &error) {
    std::cerr << "WARPIPE: " << error.what() << '\n';
    return nullptr;
  }
}

nixlBackendPlugin plugin{
    NIXL_PLUGIN_API_VERSION,
    create,
    [](nixlBackendEngine *engine) { delete engine; },
    [] { return "WARPIPE"; },
    [] { return warpipe_version(); },
    [] { return nixl_b_params_t{}; },
    [] { return nixl_mem_list_t{DRAM_SEG, VRAM_SEG}; },
};

} // namespace

extern "C" NIXL_PLUGIN_EXPORT nixlBackendPlugin *nixl_plugin_init() { return &plugin; }

extern "C" NIXL_PLUGIN_EXPORT void nixl_plugin_fini() {}
