"""The kernel that every contestant runs, and the little else that is asked of arrays: in PyTorch on a GPU, in NumPy on the
host."""

from __future__ import annotations

import importlib
from typing import Any, Callable

# Elements that the kernel works on: 4 KiB of float32, whatever the tensor's size.
HEAD = 1024
ELEMENT_BYTES = 4

AddOne = Callable[[Any, Any], None]


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

    def head(self, array: Any) -> Any:
        return array if len(array) == HEAD else array[:HEAD]

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
        # Every kernel once: loading one later can wait behind a stream that waits.
        warm = self.zeros(2 * HEAD)
        for crosses in (False, True):
            self.adder(crosses)(self.head(warm), self.head(self.zeros(HEAD)))
        self.values(self.head(warm))
        self.synchronize()

    def zeros(self, count: int) -> Any:
        return self.torch.zeros(count, dtype=self.torch.float32, device=f"cuda:{self.ordinal}")

    def head(self, tensor: Any) -> Any:
        return tensor if len(tensor) == HEAD else tensor.narrow(0, 0, HEAD)

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
