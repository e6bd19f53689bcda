"""NIXL's package, of the CUDA version that is installed."""

import importlib


def _part(name):
    try:
        return importlib.import_module("nixl_cu12." + name)
    except ModuleNotFoundError:
        return importlib.import_module("nixl_cu13." + name)


_api, _bindings = _part("_api"), _part("_bindings")
nixl_agent, nixl_agent_config = _api.nixl_agent, _api.nixl_agent_config
nixlBackendError, nixlRemoteDisconnectError = _bindings.nixlBackendError, _bindings.nixlRemoteDisconnectError
