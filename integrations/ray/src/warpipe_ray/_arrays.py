"""The two libraries of arrays that are carried: the same calls for each.

Memory of warpipe is a row of bytes here. An array of any element type and shape is made over a part of it by the library
itself, so the types that warpipe has no name for are carried, too.
"""

from __future__ import annotations

import functools
import importlib
import math
import operator
from collections.abc import Callable
from typing import Any, Protocol

import warpipe


class Library(Protocol):
    """NumPy or PyTorch."""

    name: str
    devices: tuple[str, ...]
    """The types of device that Ray is told of."""

    def dtype(self, dtype: Any) -> tuple[Any, int]:
        """A dtype of the library, and the bytes of an element. Raises ``DTypeError`` for one that cannot be carried."""

    def device(self, array: Any) -> tuple[str, warpipe.Device]:
        """The type of an array's device in Ray's words, and the device."""

    def check(self, array: Any) -> None:
        """Raises ``NotATensorError`` for an array that has no plain memory."""

    def place(self, array: Any) -> tuple[int, int] | None:
        """The address of the allocation that an array lies in, and its own; None unless it is row-major."""

    def over(self, memory: warpipe.View, dtype: Any, shape: tuple[int, ...]) -> Any:
        """An array over all of some memory."""

    def owning(self, memory: warpipe.Buffer) -> Any:
        """The bytes of a block as an array that holds that very object."""

    def shaped(self, memory: Any, dtype: Any, shape: tuple[int, ...]) -> Any:
        """An array over an array of bytes."""

    def empty(self, shape: tuple[int, ...], dtype: Any, device: warpipe.Device) -> Any:
        """An array of the library's own memory."""

    def copy(self, into: Any, array: Any) -> None:
        """Copies, on the current stream of the device."""

    def stream(self, device: warpipe.Device) -> Any:
        """The current stream of a GPU."""

    def opener(self, device: str) -> warpipe.Device:
        """The device of this process that opens memory of the device with that UUID."""


class Numpy:
    name = "numpy"
    devices: tuple[str, ...] = ("cpu",)

    def __init__(self) -> None:
        self._numpy = importlib.import_module("numpy")

    def dtype(self, dtype: Any) -> tuple[Any, int]:
        found = self._numpy.dtype(dtype)
        if found.hasobject:
            raise warpipe.DTypeError(f"the elements are of {found}, references of one process; send numbers")
        return found, found.itemsize

    def device(self, array: Any) -> tuple[str, warpipe.Device]:
        return "cpu", _device("host")

    def check(self, array: Any) -> None:
        if not isinstance(array, self._numpy.ndarray):
            raise warpipe.NotATensorError(f"a {type(array).__name__} is no array of NumPy; give one of numpy.asarray()")

    def place(self, array: Any) -> tuple[int, int] | None:
        whole = array
        while isinstance(whole.base, self._numpy.ndarray):
            whole = whole.base
        return (_address(whole), _address(array)) if array.flags.c_contiguous else None

    def over(self, memory: warpipe.View, dtype: Any, shape: tuple[int, ...]) -> Any:
        return self.shaped(memory.numpy(), dtype, shape)

    def owning(self, memory: warpipe.Buffer) -> Any:
        return self._numpy.frombuffer(memory, self._numpy.uint8)

    def shaped(self, memory: Any, dtype: Any, shape: tuple[int, ...]) -> Any:
        return memory.view(dtype).reshape(shape)

    def empty(self, shape: tuple[int, ...], dtype: Any, device: warpipe.Device) -> Any:
        return self._numpy.empty(shape, dtype)

    def copy(self, into: Any, array: Any) -> None:
        self._numpy.copyto(into, array)

    def stream(self, device: warpipe.Device) -> Any:
        raise AssertionError("NumPy's arrays lie on no GPU")

    def opener(self, device: str) -> warpipe.Device:
        return warpipe.Device(device)


class Torch:
    name = "torch"
    devices: tuple[str, ...] = ("cuda", "cpu")

    def __init__(self) -> None:
        self._torch = importlib.import_module("torch")

    def dtype(self, dtype: Any) -> tuple[Any, int]:
        if not isinstance(dtype, self._torch.dtype):
            raise warpipe.DTypeError(f"{dtype!r} is no element type of PyTorch; give a torch.dtype")
        return dtype, dtype.itemsize

    def device(self, array: Any) -> tuple[str, warpipe.Device]:
        kind = array.device.type
        if kind not in self.devices:
            raise warpipe.ArgumentError(f"the tensor lies on {array.device}; move it to a GPU of CUDA, or to the CPU")
        return kind, _device("host" if kind == "cpu" else array.device.index)

    def check(self, array: Any) -> None:
        if not isinstance(array, self._torch.Tensor):
            raise warpipe.NotATensorError(f"a {type(array).__name__} is no tensor of PyTorch; give one of torch.as_tensor()")
        if array.layout is not self._torch.strided or array.is_quantized or array.is_nested:
            raise warpipe.NotATensorError("sparse, nested and quantized tensors have no plain memory; send their parts")

    def place(self, array: Any) -> tuple[int, int] | None:
        if array.is_contiguous() and not array.is_conj() and not array.is_neg():
            return array.untyped_storage().data_ptr(), array.data_ptr()
        return None

    def over(self, memory: warpipe.View, dtype: Any, shape: tuple[int, ...]) -> Any:
        return self.shaped(memory.torch(), dtype, shape)

    def owning(self, memory: warpipe.Buffer) -> Any:
        if memory.device.kind == "host":
            return self._torch.frombuffer(memory, dtype=self._torch.uint8)
        device = self._torch.device("cuda", memory.device.ordinal)
        # Of an array interface the tensor holds the object, and warpipe does not know its stream.
        memory.used_on(stream=self._torch.cuda.current_stream(device))
        return self._torch.as_tensor(memory, device=device)

    def shaped(self, memory: Any, dtype: Any, shape: tuple[int, ...]) -> Any:
        return memory.view(dtype).view(shape)

    def empty(self, shape: tuple[int, ...], dtype: Any, device: warpipe.Device) -> Any:
        place = "cpu" if device.kind == "host" else f"cuda:{device.ordinal}"
        return self._torch.empty(shape, dtype=dtype, device=place)

    def copy(self, into: Any, array: Any) -> None:
        into.copy_(array.detach(), non_blocking=array.is_cuda and into.is_cuda)

    def stream(self, device: warpipe.Device) -> Any:
        return self._torch.cuda.current_stream(device.ordinal)

    def opener(self, device: str) -> warpipe.Device:
        try:
            return warpipe.Device(device)
        except warpipe.NoSuchDeviceError:
            # It is another actor's. This process's own GPU can map its memory.
            if self._torch.cuda.is_available():
                return warpipe.Device(self._torch.cuda.current_device())
            raise


@functools.cache
def _device(place: str | int) -> warpipe.Device:
    return warpipe.Device(place)


def _address(array: Any) -> int:
    address: int = array.__array_interface__["data"][0]
    return address


def library_of_type(data_type: type) -> Library:
    """That of ``torch.Tensor`` or ``numpy.ndarray``."""
    name = data_type.__module__.partition(".")[0]
    if name not in _LIBRARIES:
        raise warpipe.ArgumentError(f"data_type is {data_type!r}; give torch.Tensor or numpy.ndarray")
    return library(name)


def library(name: str) -> Library:
    made = _made.get(name)
    if made is None:
        made = _made[name] = _LIBRARIES[name]()
    return made


_LIBRARIES: dict[str, Callable[[], Library]] = {"numpy": Numpy, "torch": Torch}
_made: dict[str, Library] = {}


def nbytes(shape: tuple[int, ...], item: int) -> int:
    """The bytes of an array. Raises ``LayoutError`` for lengths that are none."""
    lengths = [operator.index(length) for length in shape]
    if any(length < 0 for length in lengths):
        raise warpipe.LayoutError(f"{tuple(shape)} is no shape; lengths are 0 or more")
    return math.prod(lengths) * item
