"""A device backend of LMCache over the fake driver: memory of a GPU that a CPU can touch.

``warpipe_lmcache`` and LMCache run as on a GPU, with the wrapper of ``cuMemCreate``'s memory, but for this: PyTorch has no
GPU, so that tensors are the CPU's, over the fake driver's memory, and LMCache copies them with its own code for CPUs.
"""

import contextlib
import ctypes
import functools
import os

import torch
import warpipe
from cuda.bindings import driver
from lmcache.v1.platform.devices.cpu.stub_cpu_device import StubCPUDevice

from warpipe_lmcache import device, events


class StandinDevice(StubCPUDevice):
    """In the place of ``torch.cuda``."""

    def is_available(self):
        return True


@contextlib.contextmanager
def context(index=None):
    """``torch.cuda.device``: the thread has the GPU's context."""
    _, primary = driver.cuDevicePrimaryCtxRetain(0)
    driver.cuCtxSetCurrent(primary)
    yield


torch.standin = StandinDevice("cpu")
torch.cuda.device = context


class StandinEvents(events.TimelineEvents):
    def check_event_support(self, place):
        if os.environ.get("STANDIN_EVENTS") == "none":
            raise RuntimeError("no events here")
        super().check_event_support(place)

    def _device(self, place):
        return warpipe.Device(0)

    def _stream(self, device, stream):
        return _stream()


@functools.cache
def _stream():
    return warpipe.Stream(0)


@functools.cache
def _events():
    return StandinEvents()


class StandinDeviceSpec(device.WarpipeDeviceSpec):
    @property
    def device_type(self):
        return "cpu"

    @property
    def backend_name(self):
        return "warpipe-standin"

    @property
    def torch_module_name(self):
        return "standin"

    @property
    def pin_memory_backend(self):
        return None

    def is_available(self):
        return True

    @property
    def ops_cls(self):
        from lmcache.v1.platform.devices.cpu.device_ops import CpuDeviceOps

        return CpuDeviceOps

    @property
    def event_ipc_backend(self):
        return _events()

    def create_cache_context(self, wrappers, *arguments, **named):
        from lmcache.v1.platform.devices.cpu.cache_context import CPUCacheContext

        device.check_daemon()

        def close(_context=None):
            with context():
                for wrapper in wrappers:
                    wrapper.close()

        # What LMCache's context for GPUs does with wrappers, in the end and when it cannot be made.
        made = type("StandinCacheContext", (CPUCacheContext,), {"close": close})
        try:
            return made(wrappers, *arguments, **named)
        except BaseException:
            close()
            raise


def prepare(build):
    """For the daemon: wrappers that come over the wire are of this device."""
    from lmcache.v1.platform.devices.cuda.ipc_wrapper import VmmCudaIPCWrapper

    VmmCudaIPCWrapper.device_type = "cpu"


def kv_caches(layers, blocks, *, block_size=16, heads=2, head_size=8):
    """KV tensors in memory of the fake GPU, and what keeps it."""
    shape = (2, blocks, block_size, heads, head_size)
    kept, tensors = [], {}
    for layer in range(layers):
        memory = warpipe.Memory.allocate(torch.Size(shape).numel() * 2, device=0)
        kept.append(memory)
        array = (ctypes.c_uint8 * memory.nbytes).from_address(memory.ptr)
        tensors[f"layer.{layer}"] = torch.frombuffer(array, dtype=torch.bfloat16).view(shape)
    return tensors, kept
