"""The device backend ``warpipe`` of LMCache: its own one of CUDA, with descriptors for KV memory and timelines for events.

LMCache finds it by the entry point, and takes it where ``LMCACHE_DEVICE_BACKEND=warpipe`` is set. This module is imported in
the middle of LMCache's own import, so it imports little of LMCache itself. It imports warpipe, which is to be there before
CUDA starts: then a death is proven as soon as the GPU is quiet.
"""

from __future__ import annotations

import functools
import os
import sys
from typing import TYPE_CHECKING, Any

import warpipe  # noqa: F401
from lmcache.v1.platform.devices.cuda import CudaDeviceSpec

if TYPE_CHECKING:
    from .descriptors import DescriptorServer
    from .events import TimelineEvents

NAME = "warpipe"


class WarpipeDeviceSpec(CudaDeviceSpec):  # type: ignore[misc]
    """LMCache makes one in each process of a worker and of the daemon."""

    @property
    def backend_name(self) -> str:
        return NAME

    def is_available(self) -> bool:
        # Two backends for CUDA would have LMCache ask for a choice where the package is merely installed.
        return os.environ.get("LMCACHE_DEVICE_BACKEND", "").strip().lower() == NAME and super().is_available()

    @property
    def ipc_wrapper_cls(self) -> Any:
        return wrapper()

    @property
    def event_ipc_backend(self) -> TimelineEvents:
        return events()

    def create_cache_context(self, *arguments: Any, **named: Any) -> Any:
        check_daemon()
        return super().create_cache_context(*arguments, **named)


def check_daemon() -> None:
    """Raises ``RuntimeError`` in a daemon that was started without the module that fetches descriptors."""
    if "warpipe_lmcache.daemon" not in sys.modules:
        module = """--server-module '{"module_path": "warpipe_lmcache.daemon"}'"""
        raise RuntimeError(f"this daemon does not fetch descriptors; start it with {module}")


@functools.cache
def events() -> TimelineEvents:
    from .events import TimelineEvents

    return TimelineEvents()


@functools.cache
def server() -> DescriptorServer:
    """Of this process, begun with its first registration."""
    from .descriptors import DescriptorServer

    return DescriptorServer()


@functools.cache
def wrapper() -> Any:
    """The class that LMCache wraps KV tensors with: its own one for ``cuMemCreate``'s memory."""
    from lmcache.v1.platform.devices.cuda.ipc_wrapper import VmmCudaIPCWrapper

    class DescriptorWrapper(VmmCudaIPCWrapper):  # type: ignore[misc]
        @classmethod
        def wrap(cls, tensor: Any) -> Any:
            """LMCache's wrapper of the tensor, with its descriptor served by this process.

            Raises ``RuntimeError`` for memory that has no descriptor, or more than one.
            """
            try:
                # Of LMCache's own class: a wrapper of another name does not go over its wire.
                wrapped = VmmCudaIPCWrapper(tensor)
            except RuntimeError as error:
                raise RuntimeError(f"{error} Allocate KV tensors in warpipe.torch.pool().") from error
            payload = wrapped.fd_payload()
            if payload is not None:
                export_id, fd = payload
                try:
                    server().add(export_id, fd, tensor)
                finally:
                    # Closes this side's descriptor alone: LMCache itself never does.
                    wrapped.close()
            return wrapped

    return DescriptorWrapper
