"""Actors of the tests, which their processes import by name."""

import gc
import importlib.util
import os
import select
import signal

import numpy
import ray
import warpipe
from ray.experimental import register_tensor_transport
from ray.experimental.rdt.util import transport_manager_info

import warpipe_ray
from warpipe_ray import _source
from warpipe_ray._source import timeline_of

LIMIT_SECONDS = 30.0


class Unfinished(warpipe_ray.Transport):
    """Offers what its source never completes, as a stream does that waits for ever."""

    def extract_tensor_transport_metadata(self, obj_id, rdt_object):
        metadata = super().extract_tensor_transport_metadata(obj_id, rdt_object)
        self.timeline = getattr(self, "timeline", None) or warpipe.Timeline.create(timeline_of(metadata.pool), device="host")
        metadata.complete = 1
        return metadata


warpipe_ray.register(numpy.ndarray, name="WARPIPE_NUMPY")
if "UNFINISHED" not in transport_manager_info:
    register_tensor_transport("UNFINISHED", ["cpu"], Unfinished, numpy.ndarray)
HAS_TORCH = importlib.util.find_spec("torch") is not None
if HAS_TORCH:
    warpipe_ray.register()
    warpipe_ray.register(name="WRITABLE", writable=True)


def pools():
    """The bytes that this process offers, and those that others have."""
    gc.collect()
    stats = [one._pool.stats for one in _source._sources.values()]
    return sum(one.in_use_nbytes for one in stats), sum(one.lent_nbytes for one in stats)


def with_torch(name):
    return ray.method(tensor_transport=name) if HAS_TORCH else lambda method: method


@ray.remote(num_cpus=0, enable_tensor_transport=True)
class Actor:
    def __init__(self):
        self.kept = None

    def pid(self):
        return os.getpid()

    def pools(self):
        return pools()

    def stored(self):
        """The objects that Ray keeps here."""
        gc.collect()
        return ray._private.worker.global_worker.rdt_manager.rdt_store.get_num_objects()

    def bytes_held(self):
        gc.collect()
        return warpipe.Device("host").bytes_held

    def descriptors(self):
        gc.collect()
        return len(os.listdir("/proc/self/fd"))

    @ray.method(tensor_transport="WARPIPE_NUMPY")
    def array(self, value, count=1000):
        return numpy.full(count, value, "float32")

    @ray.method(tensor_transport="WARPIPE_NUMPY")
    def several(self):
        return {
            "rows": numpy.arange(12, dtype="int16").reshape(3, 4),
            "columns": numpy.asfortranarray(numpy.arange(6.0).reshape(2, 3)),
            "every second": numpy.arange(10)[::2],
            "backwards": numpy.arange(5, dtype="uint8")[::-1],
            "scalar": numpy.array(7.0),
            "nothing": numpy.empty((0, 3)),
            "days": numpy.array(["2026-11-28"], "M8[D]"),
            "structured": numpy.array([(1, 2.5), (3, 4.5)], dtype=[("a", "i4"), ("b", "f8")]),
            "text": "as it is",
        }

    @ray.method(tensor_transport="WARPIPE_NUMPY")
    def objects(self):
        return numpy.array([object()])

    @ray.method(tensor_transport="WARPIPE_NUMPY")
    def kept_array(self, value):
        """The array stays here, and may be written later."""
        self.kept = numpy.full(1000, value, "float32")
        return self.kept

    @ray.method(tensor_transport="WARPIPE_NUMPY")
    def in_place(self, value):
        self.kept = warpipe_ray.empty(1000, "float32")
        self.kept[:] = value
        return {"all": self.kept, "a part": self.kept[500:]}

    def write(self, value):
        self.kept[:] = value

    def forget(self):
        self.kept = None

    @ray.method(tensor_transport="UNFINISHED")
    def unfinished(self):
        return numpy.ones(1000)

    @with_torch("WARPIPE")
    def tensor(self, value, dtype="float32", shape=(10, 100)):
        import torch

        return torch.full(shape, value).to(getattr(torch, dtype))

    @with_torch("WARPIPE")
    def tensor_in_place(self, value):
        import torch

        self.kept = warpipe_ray.empty((10, 100), torch.bfloat16)
        self.kept[:] = value
        return self.kept

    @with_torch("WARPIPE")
    def on_gpu(self, value, in_place=False, cycles=0):
        """A tensor that the stream fills after so many cycles of waiting."""
        import torch

        made = warpipe_ray.empty(1 << 20, torch.float32, "cuda:0") if in_place else torch.empty(1 << 20, device="cuda")
        torch.cuda._sleep(cycles)
        self.kept = made.fill_(value)
        return made

    @with_torch("WRITABLE")
    def writable(self, value):
        import torch

        return torch.full((1000,), value)

    def add(self, tensor):
        tensor += 1
        return float(tensor.sum())

    def take(self, given):
        """What came, as it is and how it came."""
        said = {}
        for name, array in (given if isinstance(given, dict) else {"": given}).items():
            if isinstance(array, numpy.ndarray):
                said[name] = array.copy(), array.flags.writeable
            elif isinstance(array, str):
                said[name] = array
            else:
                # Of some types PyTorch's own pickle cannot be read.
                said[name] = str(array.dtype), array.cfloat().numpy().copy()
        return said

    def sum(self, given):
        return float(given.sum())

    def keep(self, given):
        self.kept = given
        return float(given.sum())

    def kept_sum(self):
        return float(self.kept.sum())

    def get_and_sum(self, refs):
        return [float(ray.get(ref).sum()) for ref in refs]


def end(actor, how):
    """Ends an actor's process, and waits until the kernel has it no more."""
    pid = ray.get(actor.pid.remote())
    handle = os.pidfd_open(pid)
    try:
        if how == "ray.kill":
            ray.kill(actor)
        else:
            os.kill(pid, signal.SIGKILL)
        poll = select.poll()
        poll.register(handle, select.POLLIN)
        assert poll.poll(LIMIT_SECONDS * 1000), "the process did not end"
    finally:
        os.close(handle)
