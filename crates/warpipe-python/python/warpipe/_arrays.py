"""Tensors of the native half as arrays of frameworks, and written through these: calls of Python alone."""

from __future__ import annotations

import functools
import sys
from collections.abc import Mapping
from importlib import import_module
from typing import Any

from . import _warpipe
from ._errors import DTypeError, ExportError

# DLPack's number of the kind of device.
_DLPACK_CUDA = 2


def numpy(self: _warpipe._Tensor) -> Any:
    """A NumPy array: in place for host memory, and read only where the memory is; a copy of GPU memory, except for a
    loan, which is to be written. Waits for the data, and for the streams that were given work on it. Element types
    that NumPy lacks are those of ml_dtypes.

    Raises ``SampleLostError``, ``TimeoutError``, ``ReleasedError``, ``DTypeError``, ``ExportError``.
    """
    import numpy

    array = numpy.asarray(self._host_view())
    element = _element(self.dtype)
    return array if array.dtype == element else array.view(element)


class _Asked:
    """A tensor that records which capsules are requested."""

    versioned: bool | None = None

    def __init__(self, tensor: _warpipe._Tensor) -> None:
        self.tensor, self.__dlpack_device__ = tensor, tensor.__dlpack_device__

    def __dlpack__(self, **options: Any) -> Any:
        self.versioned = (options.get("max_version") or (0, 0))[0] >= 1
        return self.tensor.__dlpack__(**options)


def ask_torch(torch: Any, tensor: _warpipe._Tensor) -> tuple[Any, bool | None]:
    """PyTorch's tensor in the same memory, and whether it has asked for a capsule that has a version."""
    asked = _Asked(tensor)
    return torch.from_dlpack(asked), asked.versioned


def cupy(self: _warpipe._Tensor) -> Any:
    """A CuPy array in place; CuPy's current stream waits for the data. Work that this stream is given from then on
    comes before the memory is handed on, or goes back.

    Raises ``SampleLostError``, ``ReleasedError``, ``ImportError``.
    """
    return import_module("cupy").from_dlpack(self)


def jax(self: _warpipe._Tensor, *, copy: bool | None = None) -> Any:
    """A JAX array: in place on the host, a copy on a GPU, because JAX releases foreign memory before its own work on it
    is done. With ``copy=False`` it is in place there, too: call ``block_until_ready()`` on every result computed from
    it before releasing it.

    Raises ``SampleLostError``, ``ReleasedError``, ``ImportError``.
    """
    array = import_module("jax.dlpack").from_dlpack(self)
    if not (_is_of_gpu(self) if copy is None else copy):
        return array
    return import_module("jax.numpy").copy(array).block_until_ready()


def as_array(self: _warpipe._Tensor, dtype: Any = None, copy: bool | None = None) -> Any:
    """As ``numpy()``, for ``np.asarray``; of another element type it is a copy.

    Raises as ``numpy``, and ``ValueError`` if ``copy`` is False and it must be copied.
    """
    import numpy

    if copy is False and _is_of_gpu(self):
        raise ValueError("from a GPU to the host it must be copied, and `copy` is False")
    array = self.numpy()
    if dtype is None or array.dtype == numpy.dtype(dtype):
        return array.copy() if copy else array
    if copy is False:
        raise ValueError("as another element type it must be copied, and `copy` is False")
    return array.astype(dtype)


def set_item(self: _warpipe.Loan, key: Any, value: Any) -> None:
    if isinstance(key, str):
        self._fill(key, value)
        return
    if not _is_of_gpu(self):
        numpy(self)[key] = value
        return
    is_everything = key is ... or (isinstance(key, slice) and key.start is key.stop is key.step is None)
    if is_everything and _framework() is None:
        # The values are on the host, and no imported framework can broadcast them on the GPU.
        array = import_module("numpy").empty(self.shape, _element(self.dtype))
        array[...] = value
        self.copy_from(array)
    else:
        _on_gpu(self)[key] = value


def get_item(self: _warpipe.Loan, key: Any) -> Any:
    if isinstance(key, str):
        return self._part(key)
    return (_on_gpu(self) if _is_of_gpu(self) else numpy(self))[key]


def write(self: _warpipe.View, data: Any, offset: int = 0, *, stream: Any = None) -> None:
    """Copies the bytes of ``data``, any buffer of the host, to byte ``offset`` (``cuMemcpyHtoDAsync``), in the order of
    ``stream``; they may be changed at once. Without a stream the copy is complete when this returns.

    Raises ``ArgumentError``, also for read-only memory, ``ReleasedError``, ``DriverError``, ``TimeoutError`` if the work
    before it takes over 10 s; the copy is still done then.
    """
    given = memoryview(data if isinstance(data, bytes) else memoryview(data).tobytes())
    self.view(given.nbytes, "uint8", offset).copy_from(given, stream=stream)


def _on_gpu(loan: _warpipe.Loan) -> Any:
    """An array of an imported framework."""
    framework = _framework()
    if framework is None:
        advice = "import torch or cupy, or use out[...] = values or out.copy_from(tensor)"
        raise ExportError(f"no framework that can write memory of a GPU is imported; {advice}")
    return getattr(loan, framework)()


def _framework() -> str | None:
    """The imported framework that can write memory of a GPU."""
    return next((name for name in ("torch", "cupy") if sys.modules.get(name) is not None), None)


def _is_of_gpu(tensor: _warpipe._Tensor) -> bool:
    return tensor.__dlpack_device__()[0] == _DLPACK_CUDA


@functools.cache
def _element(dtype: str) -> Any:
    """NumPy's type of these elements, or the one that it borrows from ml_dtypes."""
    import numpy

    try:
        return numpy.dtype(dtype)
    except TypeError:
        pass
    try:
        ml_dtypes = import_module("ml_dtypes")
    except ImportError:
        raise DTypeError(f"element type {dtype} needs the package ml_dtypes for NumPy; install it") from None
    if not hasattr(ml_dtypes, dtype):
        raise DTypeError(f"element type {dtype} is not one that NumPy or ml_dtypes has; use .torch()")
    return numpy.dtype(getattr(ml_dtypes, dtype))


def _complete() -> None:
    """Gives the native classes these methods."""
    tensor: Any = _warpipe._Tensor
    tensor.numpy, tensor.cupy = numpy, cupy
    held: Any = _warpipe._Held
    held.jax, held.__array__ = jax, as_array
    loan: Any = _warpipe.Loan
    loan.__setitem__, loan.__getitem__ = set_item, get_item
    view: Any = _warpipe.View
    view.write = write
    several: Any = _warpipe.SampleParts
    Mapping.register(several)
    for name in ("__contains__", "get", "keys", "values", "items"):
        setattr(several, name, getattr(Mapping, name))


_complete()
