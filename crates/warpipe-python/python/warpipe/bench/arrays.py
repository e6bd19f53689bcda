"""The kernels that contestants run, and the little else that is asked of arrays: in PyTorch on a GPU, in NumPy on the host.

On a GPU there are two kernels. ``DIRECT`` is warpipe's own small one, launched by the tensors' addresses, so that its launch
takes of the CPU what it takes any program; ``PYTORCH`` is ``torch.add``: its way to the same launch is two or three
times as long. On the host there is ``NUMPY`` alone.
"""

from __future__ import annotations

import importlib
from typing import Any, Callable, Literal

from .. import _warpipe

# Elements that a kernel works on: 4 KiB of float32, whatever the tensor's size.
HEAD = 1024
ELEMENT_BYTES = 4

Kernel = Literal["direct", "PyTorch's add", "NumPy's add"]
DIRECT: Kernel = "direct"
PYTORCH: Kernel = "PyTorch's add"
NUMPY: Kernel = "NumPy's add"

# Writes the head of the first tensor, plus one, into the head of the second.
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

    kernels: tuple[Kernel, ...] = (NUMPY,)
    # The method of warpipe's memory that gives such an array.
    method = "numpy"

    def __init__(self) -> None:
        self.numpy = needed("numpy")

    def zeros(self, count: int) -> Any:
        return self.numpy.zeros(count, self.numpy.float32)

    def adder(self, count: int, kernel: Kernel, fetches: bool = False) -> AddOne:
        """NumPy's, whichever is asked for, on arrays of ``count`` elements."""
        add = self.numpy.add

        def add_one(source: Any, target: Any) -> None:
            add(source, 1, out=target)

        def add_one_to_head(source: Any, target: Any) -> None:
            add(source[:HEAD], 1, out=target[:HEAD])

        return add_one if count == HEAD else add_one_to_head

    def values(self, array: Any) -> list[float]:
        """Of its head."""
        return [float(value) for value in array[:HEAD]]

    def synchronize(self) -> None:
        pass


class Torch:
    """Tensors on a GPU, on the stream that was PyTorch's current one at the beginning, and still is."""

    kernels: tuple[Kernel, ...] = (DIRECT, PYTORCH)
    method = "torch"

    def __init__(self, ordinal: int) -> None:
        self.torch = needed("torch")
        if not self.torch.cuda.is_available():
            raise Missing("PyTorch finds no GPU here")
        self.torch.cuda.set_device(ordinal)
        self.ordinal = ordinal
        stream = self.torch.cuda.current_stream()
        self.synchronize: Callable[[], None] = stream.synchronize
        self.launch = _warpipe._Adder(f"cuda:{ordinal}", stream.cuda_stream, HEAD, 1.0).launch
        # Every kernel once: loading one later can wait behind a stream that waits.
        warm, count = self.zeros(2 * HEAD), 2 * HEAD
        for kernel in self.kernels:
            for fetches in (False, True):
                self.adder(count, kernel, fetches)(warm, self.zeros(count))
        self.values(warm)
        self.synchronize()

    def zeros(self, count: int) -> Any:
        return self.torch.zeros(count, dtype=self.torch.float32, device=f"cuda:{self.ordinal}")

    def adder(self, count: int, kernel: Kernel, fetches: bool = False) -> AddOne:
        """A kernel for tensors of ``count`` elements. With ``fetches`` it works on a copy of the source's head: PyTorch
        promises no kernel that it may read a tensor of another GPU."""
        if kernel == DIRECT:
            return self._fetch_and_launch(count) if fetches else self._launch()
        return self._fetch_and_add(count) if fetches else self._add(count)

    def _launch(self) -> AddOne:
        launch = self.launch

        def add_one(source: Any, target: Any) -> None:
            launch(source.data_ptr(), target.data_ptr())

        return add_one

    def _add(self, count: int) -> AddOne:
        add = self.torch.add

        def add_one(source: Any, target: Any) -> None:
            add(source, 1, out=target)

        def add_one_to_head(source: Any, target: Any) -> None:
            add(source.narrow(0, 0, HEAD), 1, out=target.narrow(0, 0, HEAD))

        return add_one if count == HEAD else add_one_to_head

    def _fetch_and_launch(self, count: int) -> AddOne:
        launch, fetch = self.launch, _fetching(count)

        def add_one(source: Any, target: Any) -> None:
            fetch(source, target)
            address = target.data_ptr()
            launch(address, address)

        return add_one

    def _fetch_and_add(self, count: int) -> AddOne:
        fetch = _fetching(count)

        def add_one(source: Any, target: Any) -> None:
            fetch(source, target).add_(1)

        return add_one

    def values(self, tensor: Any) -> list[float]:
        """Of its head."""
        return [float(value) for value in tensor.narrow(0, 0, HEAD).tolist()]


def _fetching(count: int) -> Callable[[Any, Any], Any]:
    """Copies the head of a tensor of ``count`` elements into that of another, and returns the latter. PyTorch orders the
    copy behind and before the current streams of both GPUs."""

    def fetch(source: Any, target: Any) -> Any:
        return target.copy_(source)

    def fetch_head(source: Any, target: Any) -> Any:
        return target.narrow(0, 0, HEAD).copy_(source.narrow(0, 0, HEAD))

    return fetch if count == HEAD else fetch_head


Arrays = NumPy | Torch


def arrays_of(device: str) -> Arrays:
    """What works on ``"host"``, or on ``"cuda:1"``."""
    if device == "host":
        return NumPy()
    return Torch(int(device.partition(":")[2] or 0))
