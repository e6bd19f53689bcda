"""The kernel that every contestant runs, and the little else that is asked of arrays: in PyTorch on a GPU, in NumPy on the
host."""

from __future__ import annotations

import importlib
from typing import Any, Callable

# Elements that the kernel works on: 4 KiB of float32, whatever the tensor's size.
HEAD = 1024
ELEMENT_BYTES = 4

AddOne = Callable[[Any, Any], None]
Head = Callable[[Any], Any]


def whole(array: Any) -> Any:
    """The head of a tensor that is no longer than that."""
    return array


class Missing(Exception):
    """Something that a contestant needs is not installed here. It is skipped, with this reason."""


def needed(module: str) -> Any:
    """Imports what may not be there."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise Missing(f"{module} cannot be imported: {error}") from error


class NumPy:
    """Arrays on the host. There is no stream: what a call did is done."""

    def __init__(self) -> None:
        self.numpy = needed("numpy")

    def zeros(self, count: int) -> Any:
        return self.numpy.zeros(count, self.numpy.float32)

    def head(self, count: int) -> Head:
        """What gives the head of a tensor of ``count`` elements."""

        def head(array: Any) -> Any:
            return array[:HEAD]

        return whole if count == HEAD else head

    def adder(self, crosses: bool) -> AddOne:
        add = self.numpy.add

        def add_one(source: Any, target: Any) -> None:
            add(source, 1, out=target)

        return add_one

    def of(self, memory: Any) -> Any:
        """Memory of warpipe's as an array."""
        return memory.numpy()

    def values(self, array: Any) -> list[float]:
        return [float(value) for value in array]

    def synchronize(self) -> None:
        pass


class Torch:
    """Tensors on a GPU, on PyTorch's current stream."""

    def __init__(self, ordinal: int) -> None:
        self.torch = needed("torch")
        if not self.torch.cuda.is_available():
            raise Missing("PyTorch finds no GPU here")
        self.torch.cuda.set_device(ordinal)
        self.ordinal = ordinal
        # As DLPack counts: the legacy default stream is 1.
        self.stream_number = self.torch.cuda.current_stream().cuda_stream or 1
        # Every kernel once: loading one later can wait behind a stream that waits.
        warm = self.head(2 * HEAD)(self.zeros(2 * HEAD))
        for crosses in (False, True):
            self.adder(crosses)(warm, self.zeros(HEAD))
        self.values(warm)
        self.synchronize()

    def zeros(self, count: int) -> Any:
        return self.torch.zeros(count, dtype=self.torch.float32, device=f"cuda:{self.ordinal}")

    def head(self, count: int) -> Head:
        """What gives the head of a tensor of ``count`` elements."""

        def head(tensor: Any) -> Any:
            return tensor.narrow(0, 0, HEAD)

        return whole if count == HEAD else head

    def adder(self, crosses: bool) -> AddOne:
        """The kernel; where the source is a tensor of another GPU, which PyTorch adds nothing to, behind a copy of it."""
        add = self.torch.add

        def add_one(source: Any, target: Any) -> None:
            add(source, 1, out=target)

        def fetch_and_add_one(source: Any, target: Any) -> None:
            target.copy_(source)
            target.add_(1)

        return fetch_and_add_one if crosses else add_one

    def of(self, memory: Any) -> Any:
        """Memory of warpipe's as a tensor."""
        return memory.torch()

    def of_capsule(self, memory: Any) -> Any:
        """The same without the part of PyTorch's import that is written in Python: it asks for the stream each time."""
        return self.torch.from_dlpack(memory.__dlpack__(stream=self.stream_number))

    def values(self, tensor: Any) -> list[float]:
        return [float(value) for value in tensor.tolist()]

    def synchronize(self) -> None:
        self.torch.cuda.current_stream().synchronize()


Arrays = NumPy | Torch


def arrays_of(device: str) -> Arrays:
    """What works on ``"host"``, or on ``"cuda:1"``."""
    if device == "host":
        return NumPy()
    return Torch(int(device.partition(":")[2] or 0))
