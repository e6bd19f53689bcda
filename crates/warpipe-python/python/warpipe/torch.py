"""Tensors of PyTorch between processes, by ``torch.multiprocessing`` as it is.

>>> import warpipe.torch
>>> warpipe.torch.install()                                            # doctest: +SKIP
>>> queue.put(model(batch))                                            # doctest: +SKIP

After ``install`` the queues, pipes, pools and ``spawn`` arguments of ``multiprocessing`` carry GPU tensors by warpipe,
without another change of the program: their memory is not copied, and is kept until the receiver has released it, or is
dead. Everything else goes its usual way.
"""

from __future__ import annotations

import functools
import importlib
import multiprocessing
import os
import re
import threading
import warnings
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from multiprocessing.queues import JoinableQueue, Queue
from multiprocessing.reduction import ForkingPickler
from typing import Any, NamedTuple

from . import _messages, _warpipe
from ._allocations import TABLE, Opened, Options, Token, memory_for_copy
from ._errors import ArgumentError, CapturingError, CopyWarning, NotATensorError

__all__ = ["SharedTensors", "check", "install", "pool", "stats", "uninstall"]

_CONFIGURED = "warpipe.torch"

# What is registered with ``multiprocessing`` without this module.
_usual: dict[type, Callable[[Any], Any]] = {}
_warned: set[str] = set()
# What a message is ordered behind that was put while its stream was being captured: nothing of it has been computed.
_CAPTURED = object()
# The number of PyTorch's stream outside of any ``torch.cuda.stream``.
_DEFAULT_STREAM = 0
# Ranges of host memory that tests have carried as a GPU's.
_device_like: list[tuple[int, int]] = []


class SharedTensors(NamedTuple):
    """The storages that this process has sent: see ``stats``."""

    unclaimed: int
    """No process has received them."""
    claimed: int
    """Another process has them."""
    nbytes: int
    """Bytes of both."""


def install(*, copy: bool = True, domain: Any = None, timeout: float = 60.0) -> None:
    """Has ``multiprocessing`` carry GPU tensors by warpipe, in this process and in the processes that it starts afterwards
    with ``spawn`` or ``forkserver``.

    A tensor in memory that cannot be given to another process (a pool's, or that of a tensor that was itself received)
    is copied, and a ``CopyWarning`` says why, once for each reason; with ``copy=False`` that is an error. ``domain`` is
    that of the names that are used, by default the environment's. A receiver waits at most ``timeout`` seconds until the
    sender's stream has completed a tensor. Installing again changes the options.

    Raises ``ImportError`` without PyTorch, ``ArgumentError``.
    """
    if not 0 < timeout <= threading.TIMEOUT_MAX:
        allowed = f"a number of seconds above 0, and at most {threading.TIMEOUT_MAX:.0f}"
        raise ArgumentError(f"timeout is {timeout!r}; give {allowed}")
    reductions = importlib.import_module("torch.multiprocessing.reductions")
    options = Options(copy, None if domain is None else os.path.abspath(os.fspath(domain)), float(timeout))
    TABLE.options = options
    _configuration()[_CONFIGURED] = _Installed(options)
    if _usual:
        return
    ours = {reductions.reduce_tensor: _reduce_tensor, reductions.reduce_storage: _reduce_storage}
    for cls, reduce in list(ForkingPickler._extra_reducers.items()):  # type: ignore[attr-defined]
        if reduce in ours:
            _usual[cls] = reduce
            ForkingPickler.register(cls, ours[reduce])
    _messages.follow()
    _messages.replace(importlib.import_module("torch.multiprocessing.queue").ConnectionWrapper, "send", _messages.sending)
    # Each class that has a ``put`` of its own.
    for queue in (Queue, JoinableQueue):
        _messages.replace(queue, "put", _ordered_put)
    _messages.replace(BaseProcess, "start", _configured_start)


def uninstall() -> None:
    """Has ``multiprocessing`` carry tensors as PyTorch does, from the next one on. Those that are sent stay valid, and
    this process can still receive others."""
    _configuration().pop(_CONFIGURED, None)
    if not _usual:
        return
    for cls, reduce in _usual.items():
        ForkingPickler.register(cls, reduce)
    _usual.clear()
    _messages.leave()


def pool(**options: Any) -> Any:
    """A ``torch.cuda.MemPool`` over memory of warpipe: tensors in it go to other processes by descriptors, whatever
    PyTorch's allocator is configured to do, and stay valid there when this process dies. Other processes have them for
    reading alone: a kernel that writes there faults. ``options`` are those of ``MemPool``.

    >>> with torch.cuda.use_mem_pool(warpipe.torch.pool()):                # doctest: +SKIP
    ...     batch = torch.empty(1 << 20, device="cuda")

    Raises ``ImportError`` without PyTorch, and what ``MemPool`` raises without a GPU.
    """
    return _torch().cuda.MemPool(_allocator().allocator(), **options)


@functools.cache
def _allocator() -> Any:
    # For good: a pool does not hold its allocator.
    memory = importlib.import_module("torch.cuda.memory")
    return memory.CUDAPluggableAllocator(_warpipe.__file__, "warpipe_torch_allocate", "warpipe_torch_free")


def stats() -> SharedTensors:
    """The storages that this process has sent and that are not yet released."""
    found = TABLE.stats()
    return SharedTensors(found["unclaimed"], found["claimed"], found["bytes"])


def check(tensor: Any) -> None:
    """Raises ``PeerGoneError`` if the tensor was received, and its memory went with the process that sent it.

    Memory of PyTorch's default segments does; that of expandable segments stays. Raises ``NotATensorError``.
    """
    if not isinstance(tensor, _torch().Tensor):
        raise NotATensorError(f"tensor is a {type(tensor).__name__}; give a tensor of PyTorch")
    received = TABLE.received(_key(tensor.untyped_storage()))
    if received is not None:
        received.check()


def _configuration() -> dict[str, Any]:
    """Of this process: a ``Process`` copies it when it is made."""
    return multiprocessing.current_process()._config  # type: ignore[attr-defined,no-any-return]


class _Installed:
    """In the configuration of a process, which its children inherit: unpickled there, it installs this."""

    def __init__(self, options: Options) -> None:
        self.options = options

    def __reduce__(self) -> tuple[Any, ...]:
        # A ``Process`` that was made before ``uninstall`` has it still.
        return (_installed, tuple(self.options)) if _usual else (_not_installed, ())


def _installed(copy: bool, domain: str | None, timeout: float) -> _Installed:
    install(copy=copy, domain=domain, timeout=timeout)
    return _Installed(TABLE.options)


def _not_installed() -> None:
    """What another process has in the place of ``_Installed``."""


def _configured_start(start: Callable[[Any], None]) -> Callable[[Any], None]:
    def configured(process: Any) -> None:
        # It may have been made before ``install``, or with other options.
        installed = _configuration().get(_CONFIGURED)
        if installed is not None:
            process._config[_CONFIGURED] = installed
        start(process)

    return configured


def _ordered_put(put: Callable[..., Any]) -> Callable[..., Any]:
    # Callers may name the message, which has this name in ``multiprocessing``.
    def ordered(queue: Any, obj: Any, *arguments: Any, **named: Any) -> Any:
        # A thread of the queue's pickles it, and has current streams of its own.
        order = _order()
        return put(queue, _messages.Ordered(obj, order) if order else obj, *arguments, **named)

    return ordered


def _order() -> dict[int, Any]:
    """What tensors of each GPU are to be ordered behind that this thread has computed. Nothing for a default stream, behind
    which they are in any case."""
    cuda = _torch().cuda
    order: dict[int, Any] = {}
    for index in range(cuda.device_count()) if cuda.is_initialized() else ():
        if _current_stream(index) != _DEFAULT_STREAM:
            with cuda.device(index):
                # An event of a capture would draw the thread's stream into that.
                captured = cuda.is_current_stream_capturing()
                order[index] = _CAPTURED if captured else cuda.current_stream().record_event()
    return order


def _order_of(index: int) -> Any:
    """What a GPU's tensors in the message that this thread pickles are to be ordered behind; None for the thread's stream."""
    message = _messages.current()
    return None if message is None else message.order.get(index)


@functools.cache
def _behind(index: int) -> Any:
    """A stream to be ordered behind others."""
    return _torch().cuda.Stream(index)


@functools.cache
def _torch() -> Any:
    return importlib.import_module("torch")


def _current_stream(index: int) -> int:
    """PyTorch's current stream of a GPU. Its public function makes an object of it, which takes as long as a message's own
    steps; the private one below that is used where there is one."""
    raw = _raw_stream()
    return int(_torch().cuda.current_stream(index).cuda_stream if raw is None else raw(index))


@functools.cache
def _raw_stream() -> Any:
    return getattr(_torch()._C, "_cuda_getCurrentRawStream", None)


@functools.cache
def _weak_reference() -> Any:
    return importlib.import_module("torch.multiprocessing.reductions").StorageWeakRef


@functools.cache
def _host_uuid() -> str:
    return _warpipe.Device("host").uuid


class _Storage:
    """A storage of PyTorch, for the table."""

    def __init__(self, storage: Any, device: _warpipe.Device, what: str) -> None:
        self.storage, self.device, self.what = storage, device, what
        self.key, self.address, self.nbytes = _key(storage), storage.data_ptr(), storage.nbytes()
        self.rebuild = _rebuild_storage

    @property
    def stream(self) -> int | None:
        if self.device.kind == "host":
            return None
        index = self.storage.device.index
        return _current_stream(index) if _order_of(index) is None else int(self._stream().cuda_stream)

    def _stream(self) -> Any:
        stream = _torch().cuda.current_stream(self.storage.device)
        order = _order_of(self.storage.device.index)
        if order is None:
            return stream
        behind = _behind(self.storage.device.index)
        behind.wait_stream(stream)
        behind.wait_event(order)
        return behind

    def copied(self) -> _Storage:
        if self.device.kind == "host":
            target = self._copy()
        else:
            stream = self._stream()
            with _torch().cuda.stream(stream):
                target = self._copy()
            # The source may be released, or used again, on streams that know nothing of this one.
            stream.synchronize()
        return _Storage(target.untyped_storage(), self.device, self.what)

    def _copy(self) -> Any:
        return memory_for_copy(self.device, self.nbytes).torch().copy_(_bytes(self.storage))

    def warn(self, why: str) -> None:
        # Once for each reason, whatever the tensor, its address and its process.
        reason = re.sub(r"\b0x[0-9a-f]+|[0-9]+", "", why.split(":")[0].split("(")[0])
        if reason not in _warned:
            _warned.add(reason)
            warnings.warn(f"{self.what} is copied on its way to another process: {why}", CopyWarning, stacklevel=2)


def _key(storage: Any) -> tuple[int, int, int]:
    # A storage that was resized is another memory.
    return storage._cdata, storage.data_ptr(), storage.nbytes()


def _bytes(storage: Any) -> Any:
    torch = _torch()
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def _device_of(storage: Any, tensor: Any = None) -> _warpipe.Device | None:
    """The device of a storage, or of a tensor in it, if it is carried here; None for what goes its usual way."""
    kind = storage.device.type
    if kind == "cuda":
        if _order_of(storage.device.index) is _CAPTURED:
            what = f"a storage on {storage.device}" if tensor is None else _described(tensor)
            said = f"{what} was put into a queue while its stream was being captured, and is not sent"
            raise CapturingError(f"{said}; put it after the capture, behind a replay of the graph")
        return _gpu(storage.device.index)
    if kind != "cpu":
        return None
    address = storage.data_ptr()
    if TABLE.received(_key(storage)) or any(first <= address < end for first, end in _device_like):
        return _warpipe.Device("host")
    return None


@functools.cache
def _gpu(index: int) -> _warpipe.Device:
    return _warpipe.Device(index)


def _reduce_storage(storage: Any) -> Any:
    device = _device_of(storage)
    if device is None:
        return _usual_reduce(storage)
    return _messages.same, (_exported(storage, device, f"a storage of {storage.nbytes()} bytes on {storage.device}"),)


def _reduce_tensor(tensor: Any) -> Any:
    torch = _torch()
    if tensor.is_nested:
        return _usual_reduce(tensor)
    if tensor.layout is not torch.strided:
        return _reduce_sparse(tensor)
    storage = tensor.untyped_storage()
    device = _device_of(storage, tensor)
    if device is None:
        return _usual_reduce(tensor)
    what = _described(tensor)
    _check_leaf(tensor, what)
    torch.utils.hooks.warn_if_has_hooks(tensor)
    place = tensor.storage_offset(), tuple(tensor.shape), tensor.stride()
    flags = tensor.requires_grad, tensor.is_conj(), tensor.is_neg()
    return _rebuild_tensor, (type(tensor), _exported(storage, device, what), tensor.dtype, *place, *flags)


def _described(tensor: Any) -> str:
    return f"tensor {str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)} on {tensor.device}"


def _check_leaf(tensor: Any, what: str) -> None:
    if tensor.requires_grad and not tensor.is_leaf:
        raise RuntimeError(f"{what} is computed with gradients, which do not cross processes; send its detach()")


def _usual_reduce(found: Any) -> Any:
    # PyTorch has its own back if another thread has called ``uninstall`` in the middle of this message.
    usual = _usual.get(type(found)) or ForkingPickler._extra_reducers[type(found)]  # type: ignore[attr-defined]
    return usual(found)


def _exported(storage: Any, device: _warpipe.Device, what: str) -> Any:
    if storage.nbytes() == 0:
        return _Empty(device.uuid)
    return TABLE.export(_Storage(storage, device, what))


class _Empty:
    """A storage without memory."""

    def __init__(self, device: str) -> None:
        self.device = device

    def __reduce__(self) -> tuple[Any, ...]:
        return _empty_storage, (self.device,)


def _reduce_sparse(tensor: Any) -> Any:
    torch, bare = _torch(), tensor.detach()
    by_row, by_column = (torch.sparse_csr, torch.sparse_bsr), (torch.sparse_csc, torch.sparse_bsc)
    parts: tuple[Any, ...]
    reduced: tuple[Any, ...]
    # Each part is pickled as the tensor that it is.
    if tensor.layout is torch.sparse_coo:
        parts = bare._indices(), bare._values()
        reduced = _rebuild_coo, (*parts, tuple(tensor.shape), tensor.is_coalesced(), tensor.requires_grad)
    elif tensor.layout in by_row:
        parts = bare.crow_indices(), bare.col_indices(), bare.values()
        reduced = _rebuild_compressed, (*parts, tuple(tensor.shape), tensor.layout, tensor.requires_grad)
    elif tensor.layout in by_column:
        parts = bare.ccol_indices(), bare.row_indices(), bare.values()
        reduced = _rebuild_compressed, (*parts, tuple(tensor.shape), tensor.layout, tensor.requires_grad)
    else:
        return _usual_reduce(tensor)
    if all(_device_of(part.untyped_storage()) is None for part in parts):
        return _usual_reduce(tensor)
    _check_leaf(tensor, f"sparse {_described(tensor)}")
    return reduced


# The functions below make what was pickled. Their names are in messages.


def _empty_storage(device: str) -> Any:
    return _torch().UntypedStorage(0, device=_place(device))


def _place(uuid: str) -> Any:
    found = _warpipe.Device(uuid)
    return _torch().device("cpu" if found.kind == "host" else f"cuda:{found.ordinal}")


def _rebuild_storage(fields: tuple[Any, ...]) -> Any:
    token = Token(*fields)
    if token.device != _host_uuid():
        try:
            # In a forked child it says that CUDA is not for one, and what to use.
            _torch().cuda.init()
        except RuntimeError as error:
            return _messages.unopened(error)
    return TABLE.open(token, _opened)


def _opened(memory: Any) -> Opened:
    torch = _torch()
    storage = memory.torch().untyped_storage()
    weak = _weak_reference()(storage)
    return Opened(storage, _key(storage), lambda: torch.UntypedStorage._new_with_weak_ptr(weak.cdata))


def _rebuild_tensor(
    cls: Any,
    storage: Any,
    dtype: Any,
    offset: int,
    shape: tuple[int, ...],
    strides: tuple[int, ...],
    requires_grad: bool,
    is_conj: bool,
    is_neg: bool,
) -> Any:
    if isinstance(storage, _messages.Unopened):
        return storage
    torch = _torch()
    tensor = torch.empty(0, dtype=dtype, device=storage.device).set_(storage, offset, shape, strides)
    if is_conj:
        tensor = tensor.conj()
    if is_neg:
        tensor = torch._neg_view(tensor)
    if cls is torch.nn.Parameter:
        return torch.nn.Parameter(tensor, requires_grad=requires_grad)
    return tensor.requires_grad_(requires_grad)


def _rebuild_coo(indices: Any, values: Any, shape: tuple[int, ...], is_coalesced: bool, requires_grad: bool) -> Any:
    for part in (indices, values):
        if isinstance(part, _messages.Unopened):
            return part
    tensor = _torch().sparse_coo_tensor(indices, values, shape, is_coalesced=is_coalesced)
    return tensor.requires_grad_(requires_grad)


def _rebuild_compressed(
    compressed: Any, plain: Any, values: Any, shape: tuple[int, ...], layout: Any, requires_grad: bool
) -> Any:
    for part in (compressed, plain, values):
        if isinstance(part, _messages.Unopened):
            return part
    tensor = _torch().sparse_compressed_tensor(compressed, plain, values, shape, layout=layout)
    return tensor.requires_grad_(requires_grad)


def _carry_as_device(view: _warpipe.View) -> Any:
    """A tensor of host memory that is carried from now on as a GPU's is. For tests."""
    tensor = view.torch()
    _device_like.append((tensor.data_ptr(), tensor.data_ptr() + view.nbytes))
    return tensor
