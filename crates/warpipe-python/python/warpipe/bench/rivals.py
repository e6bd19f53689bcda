"""What else Python has for it.

None of them orders the two GPUs' streams for a tensor that is sent again and again, so each waits on the CPU for its own
kernel before it hands over.
"""

from __future__ import annotations

import os
from multiprocessing import reduction, shared_memory
from typing import Any

from .arrays import ELEMENT_BYTES, PYTORCH, Missing, Torch, needed
from .contest import Contestant, Role


class _OwnTensor(Contestant):
    """A tensor of this process's that is written again in each round trip."""

    fetches = True

    def open(self, count: int) -> None:
        self.take(self.arrays.zeros(count), count)

    def take(self, tensor: Any, count: int) -> None:
        """Writes to the head of ``tensor``, of ``count`` elements as the other's is, from now on."""
        self.own = tensor
        self.add_one = self.arrays.adder(count, self.kernel, self.side.crosses)

    def fill(self, theirs: Any) -> None:
        """The kernel, to its end."""
        self.add_one(theirs, self.own)
        self.arrays.synchronize()


class QueueKept(_OwnTensor):
    """``put`` and ``get``. The receiver keeps its tensor until the next has come, so the memory stays open there."""

    name = "torch.multiprocessing"
    role: Role = "usual"

    def hand_over(self, theirs: Any) -> None:
        self.fill(theirs)
        self.side.outbox.put(self.own)

    def receive(self) -> Any:
        self.received = self.side.inbox.get()
        return self.received

    def close(self) -> None:
        del self.received
        # A sender's tensor has to outlive what the other made of it.
        self.side.meet()
        del self.own


class QueueDropped(QueueKept):
    """The receiver lets go of each tensor before it waits for the next, which opens the memory anew."""

    name = "torch.multiprocessing, dropped"

    def receive(self) -> Any:
        self.received = None
        return super().receive()


class QueueOfPyTorch(QueueKept):
    """With a kernel of PyTorch's, as its user sees it."""

    name = "torch.multiprocessing, PyTorch's add"
    role: Role = "usual, PyTorch's add"
    kernel = PYTORCH


class LegacyHandle(_OwnTensor):
    """``cudaIpcGetMemHandle`` by way of PyTorch, once; then a byte over a pipe."""

    name = "legacy handle, opened once"

    def open(self, count: int) -> None:
        super().open(count)
        self.side.pipe.send(self.own)
        self.theirs = self.side.hear()
        self.side.meet()

    def hand_over(self, theirs: Any) -> None:
        self.fill(theirs)
        self.side.pipe.send_bytes(b"1")

    def receive(self) -> Any:
        self.side.pipe.recv_bytes()
        return self.theirs

    def close(self) -> None:
        del self.theirs
        self.side.meet()
        del self.own


class PoolBuffer(_OwnTensor):
    """A buffer of an IPC-enabled pool of cuda.core; its descriptor over a pipe each time, as its documentation shows."""

    name = "cuda.core, pool buffer"

    def open(self, count: int) -> None:
        if not isinstance(self.arrays, Torch):
            raise Missing("cuda.core is for GPUs")
        if self.side.crosses:
            raise Missing("a pool's memory is not open to another GPU by itself; only measured on one")
        self.torch = self.arrays.torch
        self.core = _cuda_core()
        device = self.core.Device(self.arrays.ordinal)
        device.set_current()
        size = count * ELEMENT_BYTES
        options = self.core.DeviceMemoryResourceOptions(ipc_enabled=True, max_size=max(size, 2 << 20))
        self.pool = self.core.DeviceMemoryResource(device, options=options)
        handle = _of(self.pool, "allocation_handle", "get_allocation_handle")
        self.side.meet()
        reduction.send_handle(self.side.pipe, int(handle), os.getppid())
        descriptor = reduction.recv_handle(self.side.pipe)
        self.imported = self.core.DeviceMemoryResource.from_allocation_handle(device, descriptor)
        os.close(descriptor)
        self.stream = device.default_stream
        self.buffer = self.pool.allocate(size, stream=self.stream)
        self.received = None
        self.take(self.tensor_of(self.buffer), count)
        self.arrays.synchronize()
        self.side.meet()

    def tensor_of(self, buffer: Any) -> Any:
        return self.torch.from_dlpack(buffer).view(self.torch.float32)

    def hand_over(self, theirs: Any) -> None:
        self.fill(theirs)
        self.side.pipe.send(_of(self.buffer, "ipc_descriptor", "get_ipc_descriptor"))

    def receive(self) -> Any:
        # A pointer is imported once at a time.
        self.let_go()
        descriptor = self.side.pipe.recv()
        self.received = self.core.Buffer.from_ipc_descriptor(self.imported, descriptor, stream=self.stream)
        return self.tensor_of(self.received)

    def let_go(self) -> None:
        if self.received is not None:
            self.received.close()
            self.received = None

    def close(self) -> None:
        self.let_go()
        self.side.meet()
        del self.own
        self.buffer.close()
        self.imported.close()
        self.pool.close()


def _cuda_core() -> Any:
    """The package, which was `experimental` until IPC was a year old, if it can share pools."""
    needed("cuda.core")
    for name in ("cuda.core", "cuda.core.experimental"):
        try:
            core = needed(name)
        except Missing:
            continue
        if hasattr(getattr(core, "DeviceMemoryResource", None), "from_allocation_handle") and hasattr(
            core, "DeviceMemoryResourceOptions"
        ):
            return core
    raise Missing("this cuda.core has no memory pools that can be shared; install 0.4 or newer")


def _of(thing: Any, attribute: str, method: str) -> Any:
    """What is a property in newer versions and a method in older ones."""
    found = getattr(thing, attribute, None)
    return found if found is not None else getattr(thing, method)()


class PickledQueue(QueueKept):
    """``put`` and ``get`` of arrays on the host: pickled, so every byte goes through a pipe."""

    name = "multiprocessing.Queue"
    bytes_max = 1 << 20
    bytes_max_reason = "every byte goes through a pipe: minutes for larger ones"


class SharedMemory(_OwnTensor):
    """``multiprocessing.shared_memory``, opened once; then a byte over a pipe."""

    name = "shared memory, opened once"

    def open(self, count: int) -> None:
        self.memory = shared_memory.SharedMemory(create=True, size=count * ELEMENT_BYTES)
        self.side.pipe.send(self.memory.name)
        self.other = shared_memory.SharedMemory(name=self.side.hear())
        self.take(self.array_in(self.memory, count), count)
        self.own[:] = 0
        self.theirs = self.array_in(self.other, count)
        self.side.meet()

    def array_in(self, memory: shared_memory.SharedMemory, count: int) -> Any:
        numpy = needed("numpy")
        return numpy.ndarray((count,), numpy.float32, buffer=memory.buf)

    def hand_over(self, theirs: Any) -> None:
        self.fill(theirs)
        self.side.pipe.send_bytes(b"1")

    def receive(self) -> Any:
        self.side.pipe.recv_bytes()
        return self.theirs

    def close(self) -> None:
        del self.own, self.theirs
        self.other.close()
        self.side.meet()
        self.memory.close()
        self.memory.unlink()


ON_GPUS: list[type[Contestant]] = [QueueKept, QueueDropped, QueueOfPyTorch, LegacyHandle, PoolBuffer]
ON_HOST: list[type[Contestant]] = [PickledQueue, SharedMemory]
