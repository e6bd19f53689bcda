# Written by stubs/generate.py: types are in stubs/types.pyi, texts in src/.
"""The native half of warpipe. Units: seconds for times, bytes for sizes, elements for shapes and strides."""
import os
import pathlib
from collections.abc import (
    Callable,
    Coroutine,
    Generator,
    ItemsView,
    Iterator,
    KeysView,
    Mapping,
    Sequence,
    ValuesView,
)
from concurrent.futures import Future
from types import EllipsisType, TracebackType
from typing import Any, Final, Literal, Protocol, SupportsIndex, TypeAlias, final
from typing_extensions import Buffer as _BytesLike, Never, Self, disjoint_base

from ._tuples import (
    Change,
    Discontinuity,
    EndpointInfo,
    MemberInfo,
    MemoryInfo,
    MemoryUse,
    PeerState,
    PoolStats,
    PoolUsage,
    QueueState,
    SubscriberInfo,
)
from .weights import Follower

__version__: Final[str]
_DTYPES: Final[list[tuple[str, int]]]
class _CudaStream(Protocol):
    def __cuda_stream__(self) -> tuple[int, int]: ...

_StreamLike: TypeAlias = Stream | int | _CudaStream | Any
class _TorchDevice(Protocol):
    @property
    def type(self) -> str: ...
    @property
    def index(self) -> int | None: ...

_DeviceLike: TypeAlias = Device | str | int | _TorchDevice
_DomainLike: TypeAlias = Domain | str | os.PathLike[str]
_Metadata: TypeAlias = dict[str, Any] | _BytesLike
_Shape: TypeAlias = SupportsIndex | Sequence[int]
_Timeout: TypeAlias = float | None | EllipsisType
_Policy: TypeAlias = Literal["block", "drop_oldest", "drop_newest", "fail"]
@final
class Device:
    """A device and the backend that drives it: a GPU (``cuDeviceGet``), or the host.

    ``Device()`` is the first GPU if there is one, else the host; ``Device("host")``,
    ``Device("cuda:1")`` and ``Device(1)`` ask for one, and ``Device("GPU-...")`` for the one with this
    ``uuid``. ``why`` says in words why it was taken. Everything that takes a device also takes
    these, and a ``torch.device``. Pickled, a device is its ``uuid``.

    Raises ``DeviceError`` when there is no such device.
    """
    def __new__(cls, device: _DeviceLike | None = None, /) -> Self: ...
    @property
    def _facts(self) -> Sequence[Any]: ...
    @property
    def kind(self) -> Literal["cuda", "host"]:
        """``"cuda"`` or ``"host"``."""
    @property
    def ordinal(self) -> int:
        """The device's number in this process (0 for the host), as ``CUDA_VISIBLE_DEVICES`` leaves it."""
    @property
    def name(self) -> str:
        """For display: the GPU's product name, or ``host``."""
    @property
    def uuid(self) -> str:
        """The identity that is the same in every process: ``GPU-...`` or ``host``."""
    @property
    def memory_bytes(self) -> int:
        """Total memory in bytes."""
    @property
    def bytes_held(self) -> int:
        """Bytes of memory that this process holds through warpipe: allocated and imported, not yet
        released.
        """
    @property
    def why(self) -> str:
        """Why this device was chosen, in words."""
    def __eq__(self, other: object, /) -> bool: ...
    def __hash__(self) -> int: ...

@final
class Domain:
    """The directory in which endpoint names live.

    ``Domain()`` is that of the environment: ``$WARPIPE_DOMAIN``, else ``$XDG_RUNTIME_DIR/warpipe``,
    else ``/run/user/UID/warpipe``, else ``/tmp/warpipe-UID``. ``Domain(path)`` creates a missing
    directory with mode 0700. With ``owner`` (a user id) the directory belongs to that user, and its
    names are trusted. Everything that takes a domain also takes a path. Pickled, it is its path.

    Raises ``DomainError`` for a directory that cannot be trusted or used.
    """
    def __new__(cls, path: str | os.PathLike[str] | None = None, *, owner: int | None = None) -> Self: ...
    @property
    def _owner(self) -> int | None: ...
    @property
    def path(self) -> pathlib.Path:
        """The directory."""
    def endpoints(self) -> list[EndpointInfo]:
        """Every endpoint, an ``EndpointInfo`` each, sorted by name. ``alive`` is False for files of a
        dead process, unless ``foreign`` says that something else stands there; ``pid`` is None where
        it could not be determined.
        """
    def clean(self) -> list[str]:
        """Removes the files of dead endpoints, and nothing else. Returns their names."""
    def __fspath__(self) -> str: ...

@final
class Stream:
    """A stream of a device: the order of its work (``cuStreamCreate``, non-blocking; a thread on the
    host).

    ``Stream()`` belongs to the first GPU, else the host. Everything that takes a stream takes one
    of these, a raw ``CUstream`` as an int (0 or 1: the legacy default stream, 2: the per-thread
    one), anything with ``__cuda_stream__``, and the streams of PyTorch, CuPy and Numba; on the host
    only one of these. A stream object is referenced while its work is waited for; a stream that is
    given as an int has to last until everything made on it is dropped.

    Raises ``DeviceError``.
    """
    def __new__(cls, device: _DeviceLike | None = None) -> Self: ...
    @property
    def device(self) -> Device:
        """Its device."""
    @property
    def ptr(self) -> int:
        """The handle: a ``CUstream`` on CUDA."""
    def is_idle(self) -> bool:
        """Whether all work enqueued so far is done (``cuStreamQuery``).

        Raises ``DriverError``, also for a fault of earlier work.
        """
    def synchronize(self, timeout: float | None = 10.0) -> None:
        """Waits on the CPU until all work enqueued so far is done, at most ``timeout`` seconds (None:
        no limit).

        Raises ``TimeoutError``, ``DriverError``.
        """
    def wait_for(self, other: _StreamLike) -> None:
        """Makes this stream wait until the work enqueued on ``other`` so far is done
        (``cuStreamWaitEvent``). No CPU waits.

        Raises ``ArgumentError`` for a stream of another device, ``DriverError``.
        """
    def __cuda_stream__(self) -> tuple[int, int]: ...

@disjoint_base
class _Tensor:
    """A tensor in memory that warpipe holds: the base of ``Sample``, ``Loan`` and ``View``.

    It is an array of any framework, in place: ``torch()``, ``cupy()``, ``numpy()``, or any consumer
    of DLPack, ``__cuda_array_interface__`` or, on the host, ``__array_interface__`` and Python's
    buffer protocol (``memoryview``). The memory stays while this object, or any array made of it,
    lives.
    """
    @property
    def shape(self) -> tuple[int, ...]:
        """The dimensions, outermost first, in elements."""
    @property
    def strides(self) -> tuple[int, ...]:
        """The strides, in elements."""
    @property
    def dtype(self) -> str:
        """The element type's name, as NumPy and ml_dtypes write it: ``"float32"``, ``"bfloat16"``."""
    @property
    def ndim(self) -> int:
        """The number of dimensions."""
    @property
    def size(self) -> int:
        """The number of elements."""
    @property
    def nbytes(self) -> int:
        """The size of the elements, in bytes."""
    @property
    def device(self) -> Device:
        """The device that it is used with."""
    @property
    def ptr(self) -> int:
        """The device address of the element with all indices 0, while it is held.

        Raises ``ReleasedError``.
        """
    @property
    def released(self) -> bool:
        """Whether it is released: by a call, handed on or discarded, or by the end of its ``with``
        block.
        """
    @property
    def _layout(self) -> str: ...
    def _host_view(self) -> Any: ...
    def numpy(self) -> Any:
        """A NumPy array: in place for host memory, and read only where the memory is; a copy of GPU memory, except for a
        loan, which is to be written. Waits for the data, and for the streams that were given work on it. Element types
        that NumPy lacks are those of ml_dtypes.

        Raises ``SampleLostError``, ``TimeoutError``, ``ReleasedError``, ``DTypeError``, ``ExportError``.
        """
    def torch(self) -> Any:
        """A PyTorch tensor in place; PyTorch's current stream waits for the data. Work that this
        stream is given from then on comes before the memory is handed on, or goes back.

        Raises ``SampleLostError``, ``ReleasedError``, ``ImportError``.
        """
    def cupy(self) -> Any:
        """A CuPy array in place; CuPy's current stream waits for the data. Work that this stream is given from then on
        comes before the memory is handed on, or goes back.

        Raises ``SampleLostError``, ``ReleasedError``, ``ImportError``.
        """
    def __dlpack__(
        self,
        *,
        stream: int | None = None,
        max_version: tuple[int, int] | None = None,
        dl_device: tuple[int, int] | None = None,
        copy: bool | None = None,
    ) -> Any: ...
    def __dlpack_device__(self) -> tuple[int, int]: ...
    @property
    def __array_interface__(self) -> dict[str, Any]: ...
    @property
    def __cuda_array_interface__(self) -> dict[str, Any]: ...
    def __buffer__(self, flags: int, /) -> memoryview: ...
    def __release_buffer__(self, buffer: memoryview, /) -> None: ...
    def __enter__(self) -> Self: ...

class _Held(_Tensor):
    """A tensor of memory given up by a call, or at the end of a ``with`` block: the base of
    ``Sample``, ``Part`` and ``View``.
    """
    def release(self, *, stream: _StreamLike | None = None) -> None:
        """Gives up this object's part of the memory, which goes back when no object or array of it is
        left. With ``stream``, not before the work enqueued there so far is done. Releasing twice is
        no error.

        Raises ``ArgumentError`` for a stream of another device.
        """
    def tobytes(self) -> bytes:
        """The elements as bytes in row-major order, as ``numpy().tobytes()`` gives them, copied once
        the data is complete, and the streams that were given work on it are past it.

        Raises ``SampleLostError``, ``TimeoutError``, ``ReleasedError``, ``DriverError``;
        ``ExportError`` for a part of a loan.
        """
    def jax(self, *, copy: bool | None = None) -> Any:
        """A JAX array: in place on the host, a copy on a GPU, because JAX releases foreign memory before its own work on it
        is done. With ``copy=False`` it is in place there, too: call ``block_until_ready()`` on every result computed from
        it before releasing it.

        Raises ``SampleLostError``, ``ReleasedError``, ``ImportError``.
        """
    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Any: ...
    def __exit__(self, *_exception: object) -> None: ...

@disjoint_base
class Closeable:
    """The base of every class with ``closed``: ``Publisher``, ``Queue``, ``Timeline`` and others. The
    end of a ``with`` block closes it, and so does dropping it.
    """
    @property
    def closed(self) -> bool:
        """Whether it is closed in this process."""
    def close(self) -> None:
        """Closes it in this process. Closing twice is no error."""
    def __enter__(self) -> Self: ...
    def __exit__(self, *_exception: object) -> None: ...

@disjoint_base
class _Named(Closeable):
    """The base of those of them that have a name in a domain."""
    @property
    def name(self) -> str:
        """Its name."""

@final
class Publisher(_Named):
    """Publishes tensors in device memory to any number of subscribers.

    ``name``: 1 to 80 bytes of ``a-z A-Z 0-9 _ - .`` in parts joined by ``/``. ``device``: the
    device of the tensors' memory (default: the first GPU, else the host). ``depth``: how many
    frames each subscriber may hold unreleased, 1 to 4096. ``policy``: the reaction to a subscriber
    that holds that many: ``"block"`` (``send`` waits ``timeout`` seconds, None: no limit),
    ``"drop_oldest"``, ``"drop_newest"``, ``"fail"``. A ``send`` of another thread that the driver
    blocks is waited for as long, with the other policies at least 10 s. ``history``: how many of
    the last frames a late subscriber gets first. ``timestamps``: whether frames say when they were
    sent and received. ``memory_limit``: bytes of device memory,
    allocated as needed. ``loan_timeout``: seconds to wait for memory that is in use.
    ``evict_after``: seconds of silence after which a subscriber loses its link.
    ``subscribers_max``: the most at once, of which half may be of one other user, and a quarter, or
    64, of one other process. ``allow_uids``, ``allow_gids``: users and groups that are admitted
    beside this user.

    Any number of threads may use it. ``close()``, the end of a ``with`` block, or dropping it
    closes gracefully.

    Raises ``InvalidNameError``, ``NameTakenError``, ``ForeignFileError``, ``DomainError``,
    ``ArgumentError``, ``DeviceError``.
    """
    def __new__(
        cls,
        name: str,
        *,
        domain: _DomainLike | None = None,
        device: _DeviceLike | None = None,
        depth: int = 16,
        policy: _Policy = "block",
        timeout: float | None = 5.0,
        history: int = 0,
        timestamps: bool = False,
        memory_limit: int = 4294967296,
        loan_timeout: float | None = 5.0,
        evict_after: float | None = None,
        subscribers_max: int = 256,
        handshake_timeout: float = 5.0,
        allow_uids: Sequence[int] = ...,
        allow_gids: Sequence[int] = ...,
    ) -> Self: ...
    @property
    def device(self) -> Device:
        """Its device."""
    @property
    def policy(self) -> _Policy:
        """The reaction to a subscriber that holds ``depth`` frames: ``"block"``, ``"drop_oldest"``,
        ``"drop_newest"`` or ``"fail"``.
        """
    @property
    def depth(self) -> int:
        """How many frames a subscriber may have received and not released."""
    @property
    def history(self) -> int:
        """How many of the last frames a late subscriber gets first."""
    @property
    def timeout(self) -> float | None:
        """How many seconds ``send`` waits for room; None for no limit."""
    def send(
        self,
        tensor: Any,
        *,
        metadata: _Metadata | None = None,
        stream: _StreamLike | None = None,
        zero_copy: bool | Literal["require"] = False,
    ) -> int:
        """Copies a tensor into a slot and sends it to every subscriber. Returns its sequence number,
        from 1.

        ``tensor`` is anything with ``__dlpack__``, ``__array_interface__`` or
        ``__cuda_array_interface__`` (PyTorch, CuPy, JAX, NumPy, Numba, ...), or bytes. On a GPU it
        is copied on ``stream``, by default the current stream of its framework, and may be changed
        in that stream's order; no CPU waits. On the host it may be changed at once. A tensor
        without gaps keeps its strides; one with gaps is gathered, on its own device.

        A mapping of names to tensors, at most 127, goes as one message, which arrives as
        ``SampleParts``. With ``zero_copy`` all of them are sent in place, or all are copied.

        ``metadata``: a dict (as JSON) or any buffer, at most 4,096 bytes, less what describes
        several tensors, or one in place.

        ``zero_copy``: nothing is copied; subscribers read the tensor in place, and it is kept until
        all of them have released it: see ``in_place``. Do not write it before. It must lie in
        memory of ``warpipe.torch.pool()``, which subscribers map read-only and have as long as they
        use it; or in memory of ``cudaMalloc``, as PyTorch's caching allocator's does, which they
        open by a legacy handle. A tensor in host, pooled or ``expandable_segments`` memory is
        copied, with a ``CopyWarning`` that says why, or is an error with ``zero_copy="require"``.
        The whole allocation around it is accessible to subscribers: memory of ``cudaMalloc`` must
        not go back to the driver while they exist.

        Raises ``NotATensorError``, ``DTypeError``, ``LayoutError``, ``WrongDeviceError``,
        ``MetadataError``; ``NotExportableError``, ``ExportError`` with ``"require"``;
        ``TimeoutError`` or ``FullError`` by the policy; ``MemoryLimitError``, ``ClosedError``,
        ``DriverError``.
        """
    @property
    def in_place(self) -> int:
        """How many tensors that were sent with ``zero_copy`` are still kept, because a subscriber may
        be reading them. Those that are free again are dropped by this call, if not before.

        Raises ``ForkedError``.
        """
    def loan(self, shape: _Shape, dtype: Any, *, metadata: _Metadata | None = None) -> SampleMut:
        """Lends a slot for a tensor of this shape and element type, to be filled in place: see
        ``SampleMut``. ``dtype`` is a name (``"float32"``, ``"bfloat16"``, ...) or a dtype of NumPy,
        ml_dtypes, PyTorch or JAX.

        Raises ``LayoutError``, ``DTypeError``, ``MetadataError``, ``MemoryLimitError``,
        ``DeviceMemoryError``, ``ClosedError``.
        """
    def loan_parts(
        self, parts: Mapping[str, tuple[_Shape, Any]], *, metadata: _Metadata | None = None
    ) -> SampleMut:
        """Lends a slot for several tensors, to be filled in place and sent as one message. ``parts``:
        a mapping of names to ``(shape, dtype)``. ``out[name]`` is a ``Part``, and ``out[name] =
        tensor`` copies one in, until it is sent.

        Raises as ``loan``, and ``ArgumentError`` for names that are empty or too long.
        """
    @property
    def subscribers(self) -> list[SubscriberInfo]:
        """All subscribers, and their states.

        Raises ``ClosedError``.
        """
    def wait_for_subscribers(self, count: int = 1, timeout: float | None = 10.0) -> None:
        """Waits until ``count`` subscribers are attached, at most ``timeout`` seconds (None: no
        limit).

        Raises ``TimeoutError``, ``ClosedError``.
        """
    @property
    def memory_in_use(self) -> MemoryUse:
        """Device memory allocated so far and its limit, in bytes: a ``MemoryUse``.

        Raises ``ClosedError``.
        """
    def close(self) -> None:
        """Releases the name and closes gracefully. Sent frames can still be received. Closing twice is
        no error.
        Waits, as long as ``send`` waits for room, for tensors that were sent with ``zero_copy``;
        those that are still read after that are kept until they are not.
        """

@disjoint_base
class Loan(_Tensor):
    """Memory on loan that has no reader yet, to be filled in place: see ``SampleMut``, ``Queue.loan``
    and ``Output``.

    Fill it through any array made of it (``torch()``, ``cupy()``, ``numpy()`` on the host, DLPack),
    with ``out[...] = values``, or with ``out.copy_from(tensor)``. It is handed on after the work of
    all streams that arrays of it were made on. Its initial contents are undefined. Do not write
    once it is handed on. If it is not handed on by the end of a ``with`` block, it goes back.
    """
    def set_metadata(self, metadata: _Metadata) -> None:
        """Sets the metadata: a dict (as JSON), or any buffer; at most 4,096 bytes for a frame, less
        what describes its parts, 200 for a job.

        Raises ``MetadataError``, ``ReleasedError``.
        """
    def discard(self, *, stream: _StreamLike | None = None) -> None:
        """Gives the slot back unused, after the work of all streams that arrays of it were made on,
        and of ``stream``. Discarding twice, or after it was handed on, is no error.

        Raises ``DriverError``.
        """
    def copy_from(self, tensor: Any) -> None:
        """Copies a tensor of the same shape and element type in, as ``Publisher.send`` would.

        Raises ``LayoutError``, ``DTypeError``, ``WrongDeviceError``, ``ReleasedError``.
        """
    def _part(self, name: str) -> Part: ...
    def _fill(self, name: str | None, tensor: Any) -> None: ...
    def __getitem__(self, key: Any, /) -> Any: ...
    def __setitem__(self, key: Any, value: Any, /) -> None: ...
    def __exit__(
        self,
        kind: type[BaseException] | None,
        _error: BaseException | None,
        _trace: TracebackType | None,
        /,
    ) -> None: ...

@final
class SampleMut(Loan):
    """A slot on loan: memory of the publisher's device that has no reader yet, to be filled in place.

    In ``with publisher.loan(shape, dtype) as out:`` the end of the block sends it, or discards it
    if the block raises. Fill it as any ``Loan``.
    """
    def send(self, *, stream: _StreamLike | None = None) -> int:
        """Sends it to every subscriber, after the work of all streams that arrays of it were made on,
        and of ``stream``. Returns its sequence number, from 1. Does not wait for the device. If it
        raises, the loan is gone.

        Raises ``TimeoutError`` or ``FullError`` by the publisher's policy, ``ClosedError``,
        ``ReleasedError``, ``DriverError``.
        """

@disjoint_base
class _Receiver(Closeable):
    """Receives the samples of a publisher, or takes the jobs of a queue, or the requests of a service."""
    def __new__(
        cls,
        kind: Literal["subscriber", "worker", "server"],
        name: str,
        domain: _DomainLike | None,
        device: _DeviceLike | None,
        wait: float | None,
        timeout: _Timeout,
        spin: float | None,
        handshake_timeout: float,
        stream: _StreamLike | None,
        *,
        reconnect: bool = False,
        orphan_timeout: float = ...,
        answer_timeout: float | None = None,
        memory_limit: int = 0,
        clients_max: int = 0,
    ) -> Self: ...
    @property
    def _name(self) -> str: ...
    @property
    def device(self) -> Device:
        """The device that it works with."""
    @property
    def _iteration(self) -> float | None: ...
    def _limit(self, timeout: _Timeout) -> float | None: ...
    def _facts(self) -> Any: ...
    def _next(self, timeout: _Timeout) -> Any: ...
    def _last(self, waited: float | None, /) -> Any: ...
    def _try(self) -> Any: ...
    def fileno(self) -> int:
        """A descriptor that is readable when a try for an item is worth a call (an epoll descriptor,
        which nests); a server's is so once a second, too. Try until that gives None before waiting on
        the descriptor.

        Raises ``ClosedError``.
        """
    def close(self) -> None:
        """Closes the link: it takes no more items. Received samples and leases stay valid, and leases can
        still be answered. Closing twice is no error.
        """
    def __next__(self) -> Any: ...

@disjoint_base
class Sample(_Held):
    """A received tensor in its publisher's memory, lent until it is released, and read in place.

    Make an array of it: ``torch()``, ``cupy()``, ``jax()``, ``numpy()``, or any consumer of DLPack
    or ``__cuda_array_interface__``. The consumer's stream waits on the GPU until the data is
    complete; no CPU does. (The host has no streams: there the array is made once the data is
    complete.)

    The memory stays lent while this object, or any array made of it, lives. It goes back after the
    work that the streams of those arrays have been given by then. ``release()``, ``finish()`` and
    the end of a ``with`` block give up this object's part. The memory is read only: NumPy knows
    that; PyTorch does not, and faults on a write.
    """
    @property
    def in_place(self) -> bool:
        """Whether it lies in its sender's own tensor, which was sent with ``zero_copy``."""
    @property
    def sequence(self) -> int:
        """Its number among its publisher's frames, from 1. A gap counts frames that this subscriber
        did not get: see ``discontinuity``.
        """
    @property
    def sent_at_ns(self) -> int | None:
        """When it was sent, in nanoseconds of ``time.monotonic_ns()``. Untrusted: the sender states
        it. None from a publisher without ``timestamps``.
        """
    @property
    def received_at_ns(self) -> int | None:
        """When it was received, in nanoseconds of ``time.monotonic_ns()``. None where ``sent_at_ns`` is."""
    @property
    def metadata(self) -> dict[str, Any]:
        """The dict that was sent with it (as JSON); empty if there was none.

        Raises ``MetadataError`` for bytes that are no JSON object: see ``metadata_bytes``.
        """
    @property
    def metadata_bytes(self) -> bytes:
        """The bytes that were sent with it, at most 4,096."""
    @property
    def discontinuity(self) -> Discontinuity | None:
        """The break before this frame: frames of its publisher are missing, or with ``reconnect`` it is
        the first one of another incarnation, or of the same one after the link had ended. Else None,
        as on the first frame that a subscriber receives.
        """
    def wait(self, timeout: _Timeout = ...) -> None:
        """Waits on the CPU until the data is complete, at most ``timeout`` seconds (default: the
        subscriber's; None: no limit). GPU work needs no such wait: its stream waits.

        Raises ``SampleLostError`` when the sender died first, ``TimeoutError``, ``ReleasedError``.
        """
    def finish(self, timeout: _Timeout = ...) -> None:
        """Releases the frame, waits on the CPU until its data was complete, and verifies that the
        sender lived until then. Results computed from a lost frame are to be discarded.

        Raises ``SampleLostError``, ``TimeoutError``, ``ReleasedError``, ``DriverError``.
        """

@final
class Part(_Held):
    """One of several tensors in one message: of a received ``SampleParts``, which is read only, or of
    a loan of ``Publisher.loan_parts``, to be filled.

    It is an array of any framework, in place, as a ``Sample`` or a ``Loan`` is, and keeps the
    memory as an array of them does.
    """

@final
class SampleParts(Sample):
    """A received ``Sample`` of several tensors: a mapping of their names to ``Part`` objects. They are
    complete together, and go back together, when no part and no array of one is left. As a tensor
    itself it is the bytes of its slot.
    """
    def __getitem__(self, name: str, /) -> Part: ...
    def __len__(self) -> int: ...
    def __iter__(self) -> Iterator[str]: ...
    def __contains__(self, key: object) -> bool: ...
    def get(self, key: str, default: Any = None) -> Any:
        """D.get(k[,d]) -> D[k] if k in D, else d.  d defaults to None."""
    def keys(self) -> KeysView[str]:
        """D.keys() -> a set-like object providing a view on D's keys"""
    def values(self) -> ValuesView[Part]:
        """D.values() -> an object providing a view on D's values"""
    def items(self) -> ItemsView[str, Part]:
        """D.items() -> a set-like object providing a view on D's items"""

@disjoint_base
class _Jobs(Closeable):
    """Submits jobs to a queue of its own, or requests to a service."""
    def __new__(
        cls,
        client: bool,
        name: str,
        domain: _DomainLike | None,
        device: _DeviceLike | None,
        prefetch: int,
        max_attempts: int,
        lease_timeout: float | None,
        limit: int,
        memory_limit: int,
        spin: float | None,
        timeout: float | None,
        loan_timeout: float | None,
        by_completion: bool,
        workers_max: int,
        handshake_timeout: float,
    ) -> Self: ...
    @property
    def _name(self) -> str: ...
    @property
    def device(self) -> Device:
        """Its device."""
    def _submit(self, tensor: Any, metadata: _Metadata | None, stream: _StreamLike | None, timeout: _Timeout) -> Any: ...
    def loan(self, shape: _Shape, dtype: Any, *, metadata: _Metadata | None = None) -> Loan:
        """Lends memory for the input of a job, or of a request, to be filled in place and given to
        ``submit``, ``call`` or ``request``: no copy.

        Raises ``LayoutError``, ``DTypeError``, ``MetadataError``, ``MemoryLimitError``,
        ``DeviceMemoryError``, ``ClosedError``.
        """
    def _results(self, timeout: float | None, follow: bool) -> Results: ...
    def _drain(self, timeout: float | None) -> None: ...
    def _shutdown(self, wait: bool, cancel_waiting: bool, timeout: float | None) -> None: ...
    def _wait_for(self, what: str, count: int, timeout: float | None) -> None: ...
    @property
    def state(self) -> QueueState:
        """The present state of its jobs, or requests. A client's workers are the servers.

        Raises ``ClosedError``.
        """
    @property
    def _memory_in_use(self) -> MemoryUse: ...
    def close(self) -> None:
        """Closes it: workers are notified, and waits for outcomes end with an error. Received results
        stay valid. Closing twice is no error.
        """

@disjoint_base
class _Future(Future[JobResult]):
    """The outcome of a job or a request, with the methods of a ``concurrent.futures.Future``: the base
    of ``JobHandle`` and ``Pending``.
    """
    @property
    def job(self) -> int:
        """The number of the job, or the request, from 1."""
    def result(self, timeout: float | None = None) -> JobResult:
        """Waits for the result, at most ``timeout`` seconds (None: no limit; a request has its deadline). Its data is
        complete. Each call gives the same object.

        Raises ``TimeoutError``, after which it may be called again; ``DeadLetteredError`` when all attempts failed,
        ``RejectedError``; ``concurrent.futures.CancelledError``; ``DeadlinePassedError`` (a TimeoutError) of a request;
        ``NoSuchJobError`` when ``Queue.results`` gave the outcome; ``QueueClosedError`` when the queue or client was closed.
        ``await`` raises the same: an ``asyncio.CancelledError`` is of the task that awaits.
        """
    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Waits as ``result``, and gives the exception that it raises; None if there is a result.

        Raises ``TimeoutError``, ``concurrent.futures.CancelledError``.
        """
    def done(self) -> bool:
        """Whether ``result()`` would return, or raise, at once."""
    def cancelled(self) -> bool:
        """Whether it was cancelled."""
    def running(self) -> bool:
        """False: until it is done it can be cancelled, also while a worker, or a server, has it."""
    def add_done_callback(self, fn: Callable[[Self], object]) -> None:
        """Calls ``fn(self)`` once it is done, in the order in which callbacks were added: on the package's thread
        ``warpipe-callbacks``, or on the thread that cancels it, or, if it is done already, at once on this thread. An
        exception of a callback is logged (logger ``warpipe``) and stops no other. The object is kept until then.
        """
    def cancel(self) -> bool:
        """Cancels it: no worker, or server, gets it any more, and the answer of one that has it is discarded. Returns
        whether it is cancelled: False if it was done before.
        """
    def _outcome(self, timeout: float | None) -> JobResult | BaseException | None: ...
    def _call_off(self) -> bool | None: ...
    def _poll(self) -> JobResult | None: ...
    @property
    def _waits(self) -> dict[Any, Any]: ...
    def _watch(self) -> _Watch: ...
    @property
    def _name(self) -> str: ...
    @property
    def _queue(self) -> int: ...
    def __await__(self) -> Generator[Any, None, JobResult]: ...
    def send(self, value: None, /) -> Any:
        """One step of the asyncio task that wraps this object: see ``asyncio.create_task``."""
    def throw(self, *error: Any) -> Any:
        """Ends a step of that task with an error, as a cancellation does."""
    def close(self) -> None:
        """Ends the wait of that task; the job, or the request, itself goes on."""

@final
class JobHandle(_Future):
    """A submitted job, with the methods of a ``concurrent.futures.Future``; ``await handle`` in asyncio.

    The first call that asks takes the outcome, and keeps it as long as the handle lives. If the
    handle is dropped before, ``Queue.results()`` gives the outcome.
    """

@final
class JobResult(Sample):
    """A job's result, or a service's reply: a tensor in its worker's memory, complete, and lent as any
    ``Sample`` is. It outlives its worker. A job completed without an array has a result of no
    bytes.
    """
    @property
    def job(self) -> int:
        """The job's number, from 1."""
    @property
    def attempt(self) -> int:
        """Which attempt it was, from 1."""
    @property
    def worker_pid(self) -> int:
        """The process id of its worker."""

@final
class Results:
    """The results of a queue one by one, see ``Queue.results``: for ``for``, or ``async for``.

    A job that was dead-lettered or rejected raises in its place, and the iteration can go on.
    """
    def __iter__(self) -> Self: ...
    def __next__(self) -> JobResult: ...
    def __aiter__(self) -> Self: ...
    async def __anext__(self) -> JobResult: ...
    def _poll(self) -> JobResult | Literal[False] | None: ...
    def _last(self) -> JobResult: ...
    def _watch(self) -> _Watch: ...
    @property
    def _queue(self) -> int: ...
    @property
    def _timeout(self) -> float | None: ...

@final
class _Watch:
    """The descriptor of a queue for event loops."""
    def fileno(self) -> int: ...
    def quiet(self) -> None: ...

@final
class Lease(Sample):
    """A job of a worker, or a request of a server, to be answered once: ``complete``, ``fail``,
    ``requeue`` or ``reject``. Its input is an array, lent as any ``Sample`` is, and given back with the
    answer; arrays made of it keep it longer.

    In ``with lease:`` an exception in the block fails the job with that reason, is logged, and ends
    the block alone; an exception that ends the program (``KeyboardInterrupt``, ``SystemExit``) gives
    the job back, which costs no attempt. A lease that is left, or dropped, without an answer has
    failed.
    """
    @property
    def job(self) -> int:
        """The job's number, from 1."""
    @property
    def attempt(self) -> int:
        """Which attempt this is, from 1."""
    @property
    def queue_pid(self) -> int:
        """The process id of the queue's owner: of a request the client."""
    @property
    def deadline_ns(self) -> int | None:
        """The deadline of the answer, in nanoseconds of ``time.monotonic_ns()``; None if there is
        none.
        """
    @property
    def is_answered(self) -> bool:
        """Whether the job has been answered."""
    def output(self, shape: _Shape, dtype: Any, *, metadata: _Metadata | None = None) -> Output:
        """Lends memory for the result, to be filled in place: see ``Output``. In ``with
        lease.output(shape, dtype) as out:`` the end of the block completes the job with it; without
        ``with``, ``lease.complete(out)`` does.

        Raises ``LayoutError``, ``DTypeError``, ``MetadataError``, ``MemoryLimitError``,
        ``DeviceMemoryError``, ``ReleasedError``.
        """
    def complete(
        self, tensor: Any = None, *, metadata: _Metadata | None = None, stream: _StreamLike | None = None
    ) -> None:
        """Completes the job: with a tensor, which is copied as ``Publisher.send`` does; with an
        ``output`` of this lease, without a copy; or without any. The result is complete once the
        work on the tensor's stream is done; no CPU waits for that. ``metadata``: a dict or any
        buffer, at most 200 bytes, for the submitter.

        Raises ``ReleasedError`` when the job was answered before; ``PeerGoneError``;
        ``TimeoutError`` when the owner holds too many earlier results; ``NotATensorError``,
        ``DTypeError``, ``LayoutError``, ``WrongDeviceError``, ``MetadataError``,
        ``MemoryLimitError``, ``DriverError``.
        """
    def fail(self, reason: str) -> None:
        """Fails this attempt; another worker tries again, as often as the queue allows. The reason is
        cut to 200 bytes.

        Raises ``ReleasedError`` when the job was answered before, ``PeerGoneError``,
        ``TimeoutError``.
        """
    def requeue(self) -> None:
        """Gives the job to another worker, which costs no attempt: for a worker that leaves.

        Raises as ``fail``.
        """
    def reject(self, reason: str) -> None:
        """Rejects the job, so that no worker tries it again: the submitter gets ``RejectedError``. The
        reason is cut to 200 bytes.

        Raises as ``fail``.
        """
    def __exit__(  # type: ignore[override]
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
        /,
    ) -> bool: ...

@final
class Output(Loan):
    """Memory on loan for a job's result, of this attempt only: see ``Lease.output``.

    In ``with lease.output(shape, dtype) as out:`` the end of the block completes the job with it;
    if the block raises, the memory goes back, and the job is still to be answered. Fill it as any
    ``Loan``.
    """
    @property
    def _lease(self) -> Lease: ...

@final
class Pending(_Future):
    """A request, with the methods of a ``concurrent.futures.Future``; ``await pending`` in asyncio.
    Dropping or cancelling it cancels the request. It keeps the reply as long as it lives.
    """
    @property
    def deadline_ns(self) -> int:
        """The deadline of the reply, in nanoseconds of ``time.monotonic_ns()``."""

def _end() -> None:
    """``atexit`` calls this: closes all open endpoints, and waits for running callbacks."""
def _has_open() -> bool:
    """Whether an endpoint is open in this process."""
def _run(function: Callable[[], object]) -> Any:
    """Calls a function for the library, and the end of the program waits for it; what it gives, or
    None once the program ends: then no callback begins.
    """
def _call(function: Callable[[Any], object], argument: Any) -> None:
    """Calls a function, unless the program ends. An exception goes to ``sys.unraisablehook``."""
def _seconds(timeout: float | None) -> float | None:
    """The limit of a wait as a float; an error unless it is one."""
def _run_command(arguments: Sequence[str], executable: str) -> int:
    """Runs a command line and returns its exit code. ``executable`` starts this interpreter again, in
    the children of ``demo`` and ``doctor``.
    """
def _skip_waits(skip: bool) -> None:
    """Hands out arrays without waiting for their data, or no longer does: the negative control of the
    tests of waits.
    """

def _slow_fill(loan: Loan, stream: Stream, seed: int, delay: float) -> None:
    """Enqueues on ``stream`` a kernel that waits ``delay`` seconds and then fills the loan with the
    pattern of ``seed``.
    """

def _pattern(seed: int, index: int) -> int:
    """Word ``index`` of the pattern of ``seed``."""

def _preload(stream: Stream) -> None:
    """Loads the kernels of these tests, so that no later launch loads them behind a stream that waits."""

@final
class _Adder:
    """The kernel of the benchmark and of tests, on one stream: float32 ``i`` of a target becomes that
    of a source plus ``addend``. Made once, so that a launch from Python costs little more than the
    driver's own.

    The stream is a ``Stream`` of the device, or any argument that ``Stream`` documents as one; a
    stream that is given by its number has to outlive this. The kernels are loaded here.

    Raises ``ArgumentError`` for a stream of another device, ``DriverError``.
    """
    def __new__(cls, device: _DeviceLike, stream: _StreamLike, count: int, addend: float) -> Self: ...
    def launch(self, source: int, target: int, /) -> None:
        """Enqueues it (``cuLaunchKernel``). Both addresses are of ``count`` float32 that the device
        reaches and that stay until the kernel is done; they are equal, or the two ranges do not
        overlap. None of that is checked.

        Raises ``DriverError``.
        """

_list: TypeAlias = list[MemberInfo]
@final
class Timeline(_Named):
    """A named number that only grows: one process's streams signal it, other processes' streams wait
    for it (``cuStreamWriteValue64``, ``cuStreamWaitValue64``), without a CPU wait.

    ``Timeline.create(name)`` makes one at 0, ``Timeline.open(name)`` opens it in any process. When
    its owner dies, streams that wait for a value that will never come are released, and ``check``
    raises: call it before a result is used. ``close()`` of its owner also releases the name.
    """
    VALUE_MAX: Final[int]
    @staticmethod
    def create(
        name: str,
        *,
        domain: _DomainLike | None = None,
        device: _DeviceLike | None = None,
        allow_uids: Sequence[int] = ...,
        allow_gids: Sequence[int] = ...,
    ) -> Timeline:
        """Makes a timeline at 0 and takes its name. ``allow_uids``, ``allow_gids``: users and groups that
        may open it beside this process's own user.

        Raises ``InvalidNameError``, ``NameTakenError``, ``DomainError``, ``DeviceError``.
        """
    @staticmethod
    def open(
        name: str, *, domain: _DomainLike | None = None, device: _DeviceLike | None = None, wait: float | None = 0.0
    ) -> Timeline:
        """Opens a timeline up to ``wait`` seconds (None: no limit) until it exists.

        Raises ``NotFoundError``, ``OtherKindError``, ``AccessDeniedError``, ``HandshakeError``,
        ``DeviceError``.
        """
    @property
    def device(self) -> Device:
        """The device of the streams that signal and wait."""
    @property
    def is_owner(self) -> bool:
        """Whether this handle may signal."""
    @property
    def value(self) -> int:
        """The value now; the last one, when the owner is gone.

        Raises ``ClosedError``.
        """
    def signal(self, value: int, *, stream: _StreamLike | None = None) -> None:
        """Signals ``value`` after the work on ``stream`` so far, and returns at once; without a stream
        now, from the CPU.

        Raises ``RefusedError`` to all but the owner, ``ArgumentError`` (from the CPU also while a
        stream has yet to signal), ``TimeoutError`` after 10 s behind another thread's signal,
        ``ClosedError``, ``DriverError``.
        """
    def wait(self, value: int, *, stream: _StreamLike | None = None, timeout: float | None = 10.0) -> None:
        """Has ``stream`` wait for ``value``, and returns at once; without a stream the CPU waits, at
        most ``timeout`` seconds (None: no limit). Work of a stream after its wait is valid once
        ``check`` returns True.

        Raises ``PeerGoneError``, ``TimeoutError``, ``ArgumentError``, ``ClosedError``,
        ``DriverError``.
        """
    def check(self, value: int) -> bool:
        """Whether ``value`` has been reached; False if it may still be.

        Raises ``PeerGoneError`` if it never will be; ``ClosedError``.
        """

@final
class KernelRing(_Named):
    """A ring that kernels of two processes use from inside: the producer's kernel writes a slot and
    publishes it, the consumers' kernels wait for it and release it, with no launch, no stream
    operation and no CPU between items.

    ``KernelRing.create(name)`` makes one as its producer, ``KernelRing.open(name)`` opens it as a
    consumer. Kernels include ``warpipe/device.cuh`` of ``warpipe.include_dir()`` and give
    ``ring.params(stream=stream)`` to ``warpipe_ring_open``. Or ``wait_on``, ``publish_on`` and ``release_on``
    launch a tiny kernel each, which a CUDA graph may record and replay.

    A wait of a kernel ends when the peer has closed the ring or is proven dead, when this side stops,
    and after ``spin_limit`` looks. Both kernels must run at the same time: on two GPUs, or on one
    under MPS, where a client that is killed in the middle of a kernel ends all clients. A graph is not
    launched after ``close()``: it holds addresses of memory that is freed then.
    """
    @staticmethod
    def create(
        name: str,
        *,
        depth: int = 8,
        slot_bytes: int = 4096,
        consumers: int = 1,
        spin_limit: int | None = None,
        allow_time_slices: bool = False,
        domain: _DomainLike | None = None,
        device: _DeviceLike | None = None,
        allow_uids: Sequence[int] = ...,
        allow_gids: Sequence[int] = ...,
    ) -> KernelRing:
        """Makes a ring as its producer, and takes its name, which is free again when the ring was closed and
        its kernels are done. ``depth``: slots, a power of two up to 1024.
        ``slot_bytes``: bytes of each, rounded up to a multiple of 128. ``consumers``: 1 to 8, each of
        which gets every item. ``spin_limit``: looks at a word after which a kernel's wait ends, 2**26
        by default. ``allow_time_slices``: two of its processes may use one GPU without MPS, where a kernel
        that waits uses up its slice of time. ``allow_uids``, ``allow_gids``: users and groups that may
        open it beside this process's own user.

        Raises ``ArgumentError``, ``InvalidNameError``, ``NameTakenError``, ``DomainError``,
        ``DeviceMemoryError``, ``DeviceError``.
        """
    @staticmethod
    def open(
        name: str, *, domain: _DomainLike | None = None, device: _DeviceLike | None = None, wait: float | None = 0.0
    ) -> KernelRing:
        """Opens a ring as a consumer, waiting up to ``wait`` seconds (None: no limit) until it exists.

        Raises ``NotFoundError``, ``OtherKindError``, ``AccessDeniedError``, ``HandshakeError``,
        ``RefusedError`` by a ring that has its consumers, has started, or has one of another process on
        this GPU without MPS, ``ArgumentError`` for the producer's GPU without MPS, ``DeviceError``.
        """
    @property
    def device(self) -> Device:
        """The device of this side's kernels."""
    @property
    def is_producer(self) -> bool:
        """Whether this side writes the items."""
    @property
    def depth(self) -> int:
        """The number of slots."""
    @property
    def slot_bytes(self) -> int:
        """The bytes of a slot."""
    def slot(self, index: int) -> int:
        """The address of a slot, for work between two steps. A consumer may only read it. Item ``n`` lies
        in slot ``n % depth``.

        Raises ``ArgumentError``, ``ClosedError``.
        """
    def wait_for_consumers(self, timeout: float | None = 10.0) -> None:
        """The producer: waits up to ``timeout`` seconds (None: no limit) for every consumer; then the ring
        starts, and admits no other one. A consumer returns at once.

        Raises ``TimeoutError``, ``ClosedError``, ``DriverError``.
        """
    def params(self, *, stream: _StreamLike) -> int:
        """The address of the parameter block, for kernels on ``stream`` and for graphs that are launched
        there. The ring's memory lasts until the kernels that the stream has at ``close`` are done; each
        stream needs a call of its own.

        Raises ``ArgumentError``, also before ``wait_for_consumers``; ``ClosedError``.
        """
    def wait_on(self, *, stream: _StreamLike) -> None:
        """Has ``stream`` wait for the next item, or a producer's for the next free slot, by a kernel of one
        thread. If the wait ends without it, no later step of this side does anything, and ``check``
        raises.

        Raises ``ArgumentError``, ``ClosedError``, ``DriverError``.
        """
    def publish_on(self, *, stream: _StreamLike) -> None:
        """The producer: publishes the item that ``wait_on`` waited for, behind the work on ``stream`` so
        far. Without such a wait it does nothing.

        Raises as ``wait_on``.
        """
    def release_on(self, *, stream: _StreamLike) -> None:
        """A consumer: releases the item that ``wait_on`` waited for, behind the work on ``stream`` so far.

        Raises as ``wait_on``.
        """
    def check(self) -> None:
        """Returns if every finished wait of a ``wait_on`` was given its item. Synchronize the stream
        first.

        Raises ``PeerGoneError``, ``LinkClosedError``, ``ClosedError``.
        """
    def stop(self) -> None:
        """Has this side's kernels return from their waits. ``close()`` does so, too.

        Raises ``ClosedError``.
        """

@final
class Recording:
    """One recording of an event, for ``Event.check``."""
    def __eq__(self, other: object, /) -> bool: ...
    def __hash__(self) -> int: ...

@final
class EventHandle:
    """Names an event to other processes. It goes as text (``str(handle)``), as bytes, or pickled.

    ``EventHandle(text_or_bytes)`` raises ``HandleError`` if the argument is no handle.
    """
    def __new__(cls, handle: EventHandle | str | bytes) -> Self: ...
    def to_bytes(self) -> bytes:
        """As bytes, of no fixed length."""
    @property
    def ipc_bytes(self) -> bytes | None:
        """The 64 bytes of ``cuIpcGetEventHandle``, to open the event without this library; None on the
        host.
        """
    def open(self, *, device: _DeviceLike | None = None, domain: _DomainLike | None = None) -> Event:
        """Opens the event: see ``Event.open``."""
    def __eq__(self, other: object, /) -> bool: ...
    def __hash__(self) -> int: ...
    def __reduce__(self) -> tuple[type[EventHandle], tuple[str]]: ...

@final
class Event(Closeable):
    """An interprocess event (``cuEventCreate`` with ``CU_EVENT_INTERPROCESS``). It distinguishes never
    recorded, and lost with its recorder, from complete.

    ``Event.create()`` makes one; its ``handle()`` opens it in other processes, which may record it,
    too.
    """
    @staticmethod
    def create(
        *,
        domain: _DomainLike | None = None,
        device: _DeviceLike | None = None,
        allow_uids: Sequence[int] = ...,
        allow_gids: Sequence[int] = ...,
    ) -> Event:
        """Makes an event. ``allow_uids``, ``allow_gids``: users and groups that may open and record it
        beside this process's own user.

        Raises ``EventLimitError``, ``DomainError``, ``DeviceError``.
        """
    @staticmethod
    def open(
        handle: EventHandle | str | bytes, *, device: _DeviceLike | None = None, domain: _DomainLike | None = None
    ) -> Event:
        """Opens an event by its handle (an ``EventHandle``, its text, or its bytes), also in the
        process that made it. ``domain`` is for where the maker's domain lies at another path.

        Raises ``HandleError``, ``NotFoundError``, ``PeerGoneError``, ``TimeoutError``,
        ``DomainError``, ``ConnectionError``, ``DeviceError``.
        """
    def handle(self) -> EventHandle:
        """The handle that names the event to other processes.

        Raises ``ClosedError``, ``DriverError``.
        """
    @property
    def device(self) -> Device:
        """The device it was made or opened with."""
    @property
    def ptr(self) -> int | None:
        """CUDA's own event, for calls that take one, or None. A wait for it has CUDA's semantics: it
        does not wait for an event that was never recorded, or that a dead process recorded.

        Raises ``ClosedError``.
        """
    def record(self, *, stream: _StreamLike) -> Recording:
        """Records the work on ``stream`` so far (``cuEventRecord``), and returns at once. The last
        recording is what others wait for. The first one of an opened event asks its maker, which
        may take a moment.

        Raises ``PeerGoneError``, ``RefusedError`` when seven others record it, ``TimeoutError``
        after 10 s behind another thread's recording, ``ClosedError``, ``DriverError``.
        """
    def wait(self, *, stream: _StreamLike) -> Recording:
        """Has ``stream`` wait for the last recording (``cuStreamWaitEvent``), and returns that
        recording at once. Work of the stream after the wait is valid once ``check`` returns True
        for the recording.

        Raises ``EventNotRecordedError``, ``EventLostError``, ``ClosedError``, ``DriverError``.
        """
    def query(self) -> bool:
        """Whether the last recording is complete (``cuEventQuery``).

        Raises ``EventNotRecordedError``, ``EventLostError``, ``ClosedError``.
        """
    def synchronize(self, timeout: float | None = 10.0) -> None:
        """Waits on the CPU until the last recording is complete, at most ``timeout`` seconds (None: no
        limit).

        Raises ``TimeoutError``, ``EventNotRecordedError``, ``EventLostError``, ``ClosedError``.
        """
    def check(self, recording: Recording) -> bool:
        """Whether this recording is complete; False if it may still be.

        Raises ``EventLostError`` if it never will be; ``ClosedError``.
        """

@final
class Semaphore(_Named):
    """A limit of concurrent holders, across processes, on streams and on the CPU.

    ``Semaphore.create(name, permits)`` makes one, ``Semaphore.open(name)`` opens it in any process.
    ``with sem.acquire(stream=stream):`` holds a permit for the work that the block gives to ``stream``:
    the next holder's stream waits for that work on the device. Permits are granted in order of
    arrival. A holder's permit comes back when it dies. ``close()`` of its creator ends it, once the
    permits of this process are back.
    """
    @staticmethod
    def create(
        name: str,
        permits: int = 1,
        *,
        domain: _DomainLike | None = None,
        device: _DeviceLike | None = None,
        allow_uids: Sequence[int] = ...,
        allow_gids: Sequence[int] = ...,
    ) -> Semaphore:
        """Makes a semaphore of ``permits`` permits (1 to 1024), all free, and takes its name.
        ``allow_uids``, ``allow_gids``: users and groups that may open it beside this process's own
        user. Every member can write its counters, so admit users whose use of it you trust.

        Raises ``ArgumentError``, ``InvalidNameError``, ``NameTakenError``, ``DomainError``,
        ``DeviceError``.
        """
    @staticmethod
    def open(
        name: str, *, domain: _DomainLike | None = None, device: _DeviceLike | None = None, wait: float | None = 0.0
    ) -> Semaphore:
        """Opens the semaphore of this name, waiting up to ``wait`` seconds (None: no limit) until it
        exists.

        Raises ``NotFoundError``, ``OtherKindError``, ``AccessDeniedError``, ``RefusedError``,
        ``DeviceError``.
        """
    @property
    def device(self) -> Device:
        """The device of the streams that take permits."""
    @property
    def permits(self) -> int:
        """How many permits there are.

        Raises ``ClosedError``.
        """
    @property
    def available(self) -> int:
        """How many are free at this moment, for display only.

        Raises ``ClosedError``.
        """
    @property
    def waiting(self) -> int:
        """How many wait at this moment, for display only.

        Raises ``ClosedError``.
        """
    def acquire(self, timeout: float | None = 10.0, *, stream: _StreamLike | None = None) -> Permit:
        """Waits up to ``timeout`` seconds (None: no limit) for a permit. With ``stream``, that stream
        waits on the device for the last holder's work; without, the CPU does.

        Raises ``TimeoutError``, ``PeerGoneError``, ``ClosedError``, ``DriverError``.
        """
    def try_acquire(self, *, stream: _StreamLike | None = None) -> Permit | None:
        """Takes a permit if one is free and none waits for it, else gives None.

        Raises as ``acquire``, without the timeout.
        """

@final
class Permit:
    """A held permit, as ``Semaphore.acquire`` gives it: released at the end of a ``with`` block, or
    when it is dropped.

    It is released after the work of the stream that it was acquired on, or at once if it was
    acquired on the CPU.
    """
    @property
    def passed(self) -> int:
        """How many permits went to others during the wait for this one."""
    @property
    def released(self) -> bool:
        """Whether it has been released."""
    def release(self, *, stream: _StreamLike | None = None) -> None:
        """Releases it after the work on ``stream`` so far, by default the stream that it was acquired
        on, and returns at once. Releasing twice is no error.

        Raises ``ArgumentError`` for a stream of another device, ``DriverError``.
        """
    def release_now(self) -> None:
        """Releases it now: the next holder does not wait for this holder's device work. Releasing
        twice is no error.
        """
    def __enter__(self) -> Self: ...
    def __exit__(self, *_exception: object) -> None: ...

@final
class Member(_Named):
    """This process as a member of a domain, visible to its monitors until it is closed or dropped.

    ``Member.join(name)``: ``name`` is 1 to 72 bytes, as an endpoint's; ``role`` says what the
    process does, in up to 64 bytes.
    """
    @staticmethod
    def join(
        name: str,
        role: str = "",
        *,
        domain: _DomainLike | None = None,
        allow_uids: Sequence[int] = ...,
        allow_gids: Sequence[int] = ...,
    ) -> Member:
        """Joins the domain under a name. ``allow_uids``, ``allow_gids``: users and groups that see this
        member in their watches beside this process's own user.

        Raises ``NameTakenError``, ``InvalidNameError``, ``ArgumentError``, ``ForeignFileError``,
        ``DomainError``.
        """
    @property
    def role(self) -> str:
        """The role that it states."""
    @property
    def generation(self) -> bytes:
        """This incarnation, as ``MemberInfo.generation`` shows it."""

@final
class Members(Closeable):
    """The members of a domain, followed until this is closed: ``for change in Members.watch():``,
    ``async for``, or with callbacks.

    A watch is no member, and invisible to members.
    """
    @staticmethod
    def watch(
        domain: _DomainLike | None = None, *, on: Callable[[Change], object] | None = None, clean: bool = True
    ) -> Members:
        """Begins to watch, and waits until all present members have answered. ``on`` is called with
        each ``Change``, in order, on a thread of its own; without it ``changes`` or iteration gives
        the changes. Present members come first, as ``"joined"``. ``clean``: remove the endpoints
        that dead members leave in the domain.

        Raises ``DomainError``, ``SystemCallError``.
        """
    @staticmethod
    def _watch(
        domain: _DomainLike | None, on: Callable[[Change], object] | None, clean: bool
    ) -> Members: ...
    def list(self) -> _list:
        """All present members, sorted by name, with the endpoints of each one's process.

        Raises ``SystemCallError``, ``ClosedError``.
        """
    def _changes(self, timeout: float | None) -> Change | None: ...
    def changes(self, timeout: float | None = 10.0) -> Change | None:
        """The next change, waited for at most ``timeout`` seconds (None: no limit); None if there was none.

        Raises ``ArgumentError`` if this watch has a callback, which gets the changes; ``ClosedError``.
        """
    def changes_async(self, timeout: float | None = 10.0) -> Coroutine[Any, Any, Change | None]:
        """Waits for the next change in the running event loop: ``changes`` for asyncio. Cancelling it loses none.

        Raises as ``changes``.
        """
    def on_death_of(self, name: str, cleanup: Callable[[MemberInfo], object]) -> None:
        """Calls ``cleanup`` once with the ``MemberInfo`` of a member of this name when it has died
        (not when it leaves): the present member, or the next that dies.

        Raises ``InvalidNameError``, ``ArgumentError`` beyond 4096 at a time, ``ClosedError``.
        """
    @property
    def merged(self) -> int:
        """How many changes were dropped because more than 4096 were pending.

        Raises ``ClosedError``.
        """
    @property
    def overlooked(self) -> int:
        """How many members' names could not be followed at the last scan of the directory.

        Raises ``ClosedError``.
        """
    def fileno(self) -> int:
        """A descriptor that is readable while ``changes`` has a change. Only poll it.

        Raises ``ClosedError``.
        """
    def __iter__(self) -> Self: ...
    def __next__(self) -> Change: ...
    def __aiter__(self) -> Self: ...
    async def __anext__(self) -> Change: ...
    def close(self) -> None:
        """Ends the watch. Closing twice is no error."""

@disjoint_base
class View(_Held):
    """A tensor in held memory, as ``view(shape, dtype)`` gives it. ``Memory``, ``SharedMemory``,
    ``Buffer``, ``LentBuffer`` and ``LegacyMemory`` are views of their bytes.

    It is an array of any framework: ``torch()``, ``cupy()``, ``jax()``, ``numpy()`` (a copy of GPU
    memory), or any consumer of DLPack or ``__cuda_array_interface__``; ``copy_from(tensor)`` copies
    any tensor in. The memory stays while this object, a view, or an array of them lives, and is
    released after the work that the streams of those arrays have been given by then. Its users
    order their writes, with a ``Timeline`` for example.
    """
    @property
    def read_only(self) -> bool:
        """Whether it is read only."""
    def view(self, shape: _Shape, dtype: Any, offset: int = 0) -> View:
        """The same memory as a tensor of this shape and element type, row-major, from byte ``offset``
        on.

        Raises ``ArgumentError``, ``LayoutError``, ``DTypeError``, ``ReleasedError``.
        """
    def copy_from(self, tensor: Any, *, stream: _StreamLike | None = None) -> None:
        """Copies a tensor of the same shape and element type in, on ``stream``, by default the current
        stream of the tensor's framework. The tensor may be changed in that stream's order; a host
        tensor at once, unless it is a ``View`` and a stream is given. A copy from the host without a
        stream is complete when this returns. A tensor that overlaps this memory is read before the
        memory is written; a GPU allocates as much memory again for that, for a moment.

        Raises ``LayoutError``, ``DTypeError``, ``NotATensorError``, ``WrongDeviceError``,
        ``ArgumentError``, also for read-only memory, ``ReleasedError``, ``DriverError``, ``TimeoutError``
        if the work before it takes over 10 s; the copy is still done then.
        """
    def write(self, data: _BytesLike, offset: int = 0, *, stream: _StreamLike | None = None) -> None:
        """Copies the bytes of ``data``, any buffer of the host, to byte ``offset`` (``cuMemcpyHtoDAsync``), in the order of
        ``stream``; they may be changed at once. Without a stream the copy is complete when this returns.

        Raises ``ArgumentError``, also for read-only memory, ``ReleasedError``, ``DriverError``, ``TimeoutError`` if the work
        before it takes over 10 s; the copy is still done then.
        """
    def used_on(self, *, stream: _StreamLike) -> None:
        """Records work on this memory on ``stream``, beside that of arrays: the memory is not released
        before the work is done. Call it before the work is enqueued.

        Raises ``ArgumentError`` for a stream of another device, ``ReleasedError``.
        """
    def wait(self, timeout: float | None = 10.0) -> None:
        """Waits on the CPU until the streams that were given work on this memory are past it, at most
        ``timeout`` seconds (None: no limit).

        Raises ``TimeoutError``, ``ReleasedError``, ``DriverError``.
        """

@final
class Memory(View):
    """An allocation that can be given to other processes (``cuMemCreate`` with an exportable handle; a
    sealed memfd on the host). Zeroed at first.

    ``Memory.allocate(nbytes)`` makes one. It is a ``View`` of its bytes: ``memory.view(shape,
    dtype)`` is a tensor of it. ``publish(name)`` gives a ticket for other processes;
    ``export_fd()`` the bare descriptor, to be sent over a socket of the program's own. The memory
    lives as long as any process has it open, even after its maker's death.
    """
    @staticmethod
    def allocate(nbytes: int, *, device: _DeviceLike | None = None) -> Memory:
        """Allocates ``nbytes`` bytes, rounded up to the device's unit (2 MiB on CUDA as a rule, a page
        on the host).

        Raises ``DeviceMemoryError``, ``ArgumentError`` for 0 bytes, ``DeviceError``.
        """
    def publish(
        self,
        name: str,
        *,
        domain: _DomainLike | None = None,
        writable: bool = False,
        allow_uids: Sequence[int] = ...,
        allow_gids: Sequence[int] = ...,
    ) -> Published:
        """Publishes it under a name, for this user and those of ``allow_uids`` and ``allow_gids``;
        other processes may write it only if ``writable``.

        Raises ``InvalidNameError``, ``NameTakenError``, ``ForeignFileError``, ``DomainError``,
        ``ReleasedError``.
        """
    def export_fd(self) -> int:
        """A descriptor of it, close-on-exec; the caller closes it. A process that gets it can map all
        of the memory, for reading and writing.

        Raises ``SystemCallError``, ``ReleasedError``, ``DriverError``.
        """
    @property
    def info(self) -> MemoryInfo:
        """The size and device of the memory, to be sent with the descriptor.

        Raises ``ReleasedError``.
        """

@final
class Published(_Named):
    """Memory under a name, as ``Memory.publish`` gives it. Closing or dropping it releases the name:
    no further process can open the memory, and processes that have it open keep it.
    """
    @property
    def memory(self) -> Memory:
        """The memory, with one more reference.

        Raises ``ClosedError``.
        """
    def ticket(self, offset: int = 0, nbytes: int | None = None) -> Ticket:
        """A text that names ``nbytes`` bytes (None: up to the end) from byte ``offset`` on.

        Raises ``ArgumentError``, ``ClosedError``.
        """

@final
class SharedMemory(View):
    """Another process's memory, or a range of it, mapped here, as ``Ticket.open`` gives it. It stays
    valid when its owner closes it or dies.
    """
    @staticmethod
    def import_fd(
        fd: int, info: MemoryInfo, *, device: _DeviceLike | None = None, writable: bool = False
    ) -> SharedMemory:
        """Maps memory by a descriptor that was received over the program's own socket, and its
        ``Memory.info``. The descriptor may be closed afterwards. Its kind and size are checked.

        Raises ``DeviceError``, ``ArgumentError``,
        ``DeviceError``.
        """
    def range(self, offset: int, nbytes: int | None = None) -> SharedMemory:
        """Part of it; the part keeps all of it mapped.

        Raises ``ArgumentError``, ``ReleasedError``.
        """
    @property
    def owner(self) -> str:
        """The device that the memory is on: its ``Device.uuid``.

        Raises ``ReleasedError``.
        """
    @property
    def name(self) -> str:
        """The name that it was published under.

        Raises ``ReleasedError``.
        """

@final
class Ticket:
    """Names memory of a process on this machine: a text that can be sent through a file, a pipe, an
    environment variable, or pickled. It is no secret and grants no access: the owner checks each
    process that opens it.

    ``Ticket(text)`` raises ``HandleError`` if the text is no ticket. ``Ticket.to(name)`` names the
    memory that is or will be published under a name.
    """
    def __new__(cls, ticket: Ticket | str) -> Self: ...
    @staticmethod
    def to(name: str, *, domain: _DomainLike | None = None) -> Ticket:
        """A ticket for the memory published under ``name``, now or later.

        Raises ``InvalidNameError``, ``DomainError``.
        """
    @staticmethod
    def read_file(path: str | os.PathLike[str], *, wait: float | None = 0.0) -> Ticket:
        """Reads a ticket from a file, waiting up to ``wait`` seconds (None: no limit) until the file
        exists.

        Raises ``SystemCallError``, ``TimeoutError``, ``HandleError``.
        """
    def write_file(self, path: str | os.PathLike[str]) -> None:
        """Writes it to a file, whole or not at all (``rename(2)``).

        Raises ``SystemCallError``.
        """
    @property
    def _facts(self) -> Sequence[Any]: ...
    @property
    def domain(self) -> pathlib.Path:
        """The domain's directory."""
    @property
    def name(self) -> str:
        """The endpoint's name."""
    @property
    def kind(self) -> str:
        """The kind of the endpoint: ``"memory"`` or ``"pool"``."""
    @property
    def device(self) -> str | None:
        """The device that the memory is on (its ``Device.uuid``), or None if unknown."""
    @property
    def nbytes(self) -> int | None:
        """Its length, or None if unknown."""
    def open(self, *, device: _DeviceLike | None = None, wait: float | None = 0.0) -> SharedMemory:
        """Fetches the memory from its owner and maps it, waiting up to ``wait`` seconds (None: no
        limit) for an owner that has not published yet. A pool's ticket is for ``LentBuffer.open``.

        Raises ``NotFoundError``, ``TicketExpiredError``, ``HandleError``, ``OtherKindError``,
        ``AccessDeniedError``, ``ArgumentError``, ``DeviceError``.
        """
    def __eq__(self, other: object, /) -> bool: ...
    def __hash__(self) -> int: ...
    def __reduce__(self) -> tuple[type[Ticket], tuple[str]]: ...

@final
class LegacyHandle:
    """``cuIpcGetMemHandle``: names a tensor in memory of ``cudaMalloc``, for example PyTorch's, for
    another process of the same machine and user. It is sent as text (``str(handle)``), as bytes, or
    pickled.

    Use a channel's ``send`` where the memory may be chosen: a handle orders no work, dies with its
    exporter, and opens the *whole* allocation for reading and writing.
    ``LegacyHandle(text_or_bytes)`` raises ``HandleError`` if the argument is no handle.
    """
    def __new__(cls, handle: LegacyHandle | str | bytes) -> Self: ...
    @staticmethod
    def export(tensor: Any, *, device: _DeviceLike | None = None) -> LegacyHandle:
        """A handle for the memory of a tensor without gaps (anything with ``__dlpack__`` or an array
        interface). The tensor must stay alive as long as another process uses it, and writes to it
        must be agreed with the reader.

        Raises ``NotExportableError`` for memory that is not of ``cudaMalloc`` (host, pinned,
        managed, pooled, PyTorch's ``expandable_segments``), ``WrongDeviceError``, ``LayoutError``,
        ``DriverError``.
        """
    def open(self, *, device: _DeviceLike | None = None) -> LegacyMemory:
        """``cuIpcOpenMemHandle``: maps the memory here. An allocation that is open already, or that
        this process exported, has the same address again.

        Raises ``PeerGoneError``, ``HandleError``, ``DeviceError``.
        """
    @property
    def _facts(self) -> Sequence[Any]: ...
    @property
    def nbytes(self) -> int:
        """The range's length in bytes."""
    @property
    def offset(self) -> int:
        """The offset of the range in its allocation, in bytes."""
    @property
    def allocation_nbytes(self) -> int:
        """The length of the allocation. A process that opens the handle can access all of it."""
    @property
    def device(self) -> str:
        """The device that owns the memory: its ``Device.uuid``."""
    @property
    def pid(self) -> int:
        """The exporter's process id, in its own PID namespace."""
    @property
    def raw(self) -> bytes:
        """The ``CUipcMemHandle`` itself, of the allocation's base."""
    def to_bytes(self) -> bytes:
        """The handle as bytes, of variable length."""
    def __eq__(self, other: object, /) -> bool: ...
    def __hash__(self) -> int: ...
    def __reduce__(self) -> tuple[type[LegacyHandle], tuple[str]]: ...

@final
class LegacyMemory(View):
    """An open range of another process's memory, as ``LegacyHandle.open`` gives it: a ``View`` of its
    bytes. It stays mapped until the last one of its allocation, and every array of it, is dropped,
    and their streams are past their work.
    """

@final
class Pool(_Named):
    """Memory that is lent in blocks, to this process and to others.

    ``Pool.create(name)`` makes one, of at most ``memory_limit`` bytes of device memory, allocated
    as needed; ``reserve`` bytes at once. Peers open blocks by ticket (``Buffer.lend``,
    ``LentBuffer.open``), or allocate themselves (``PoolClient``). A block is reused when its owner
    and all its borrowers have released it and their streams are past it. ``close()`` releases the
    name; held blocks stay valid until they are released.

    ``allow_uids``, ``allow_gids``: users and groups that may connect beside this process's own user.
    Each user gets regions of its own. ``user_quota`` is the ``Quota`` of each of them but the pool's
    own, ``quotas`` maps single users to theirs.
    """
    @staticmethod
    def create(
        name: str,
        *,
        domain: _DomainLike | None = None,
        device: _DeviceLike | None = None,
        memory_limit: int = 4294967296,
        reserve: int = 0,
        peers_max: int = 256,
        allow_uids: Sequence[int] = ...,
        allow_gids: Sequence[int] = ...,
        user_quota: tuple[int | None, int | None] = ...,
        quotas: Mapping[int, tuple[int | None, int | None]] = ...,
    ) -> Pool:
        """Makes a pool and takes its name.

        Raises ``InvalidNameError``, ``NameTakenError``, ``DomainError``, ``MemoryLimitError``,
        ``DeviceError``.
        """
    @property
    def device(self) -> Device:
        """Its device."""
    def allocate(self, nbytes: int, timeout: float | None = 0.0, *, uid: int | None = None) -> Buffer:
        """A free block of ``nbytes`` bytes, waiting up to ``timeout`` seconds (None: no limit) for
        releases. With ``uid`` it lies in a region of that user, whose processes alone can open its
        ticket, and counts against that user's quota.

        Raises ``MemoryLimitError``, ``QuotaExceededError``, ``DeviceMemoryError``, ``ArgumentError`` for 0 bytes,
        ``ClosedError``, ``DriverError``.
        """
    def usage(self, uid: int) -> PoolUsage:
        """The part of the pool that the user ``uid`` has, and its quota.

        Raises ``ClosedError``.
        """
    @property
    def stats(self) -> PoolStats:
        """The present state.

        Raises ``ClosedError``.
        """

@final
class Buffer(View):
    """A block of a pool of this process: a ``View`` of its bytes. Once it is released or dropped, the
    pool reuses it when the streams of its arrays are past it, and all borrowing peers have released
    it, too.
    """
    def lend(self, *, writable: bool = False) -> Ticket:
        """A ticket with which peers may open this block (``LentBuffer.open``), for writing only if
        ``writable``. The ticket is valid until the block is released here; peers that have opened
        it by then keep it.

        Raises ``PeerGoneError`` when the pool is closed, ``ReleasedError``.
        """

@final
class PoolClient(_Named):
    """A connection to a pool of another process: ``PoolClient.open(name)``. Its blocks stay valid after
    ``close()``.
    """
    @staticmethod
    def open(
        name: str, *, domain: _DomainLike | None = None, device: _DeviceLike | None = None, wait: float | None = 0.0
    ) -> PoolClient:
        """Connects to the pool of this name, waiting up to ``wait`` seconds (None: no limit) until it
        exists.

        Raises ``NotFoundError``, ``OtherKindError``, ``AccessDeniedError``, ``RefusedError``,
        ``InvalidNameError``.
        """
    @property
    def is_owner_gone(self) -> bool:
        """Whether the owner has closed the pool, or has died. Its blocks stay valid.

        Raises ``ClosedError``.
        """
    def allocate(self, nbytes: int, timeout: float | None = 0.0) -> LentBuffer:
        """A block of ``nbytes`` bytes of the owner's memory, for reading and writing, waiting up to
        ``timeout`` seconds (None: no limit) for releases.

        Raises ``MemoryLimitError``, ``QuotaExceededError``, ``PeerGoneError``, ``RefusedError``, ``ArgumentError``,
        ``ClosedError``, ``DeviceError``.
        """

@final
class LentBuffer(View):
    """A block of another process's pool: a ``View`` of its bytes. Once it is released or dropped, the
    owner reuses it when the streams of its arrays are past it. It stays valid when its owner closes
    the pool, or dies.
    """
    @staticmethod
    def open(ticket: Ticket | str, *, device: _DeviceLike | None = None) -> LentBuffer:
        """Opens the block of a ticket of ``Buffer.lend``.

        Raises ``TicketExpiredError``, ``HandleError``, ``OtherKindError``, ``AccessDeniedError``,
        ``RefusedError``, ``PeerGoneError``, ``TimeoutError``, ``DeviceError``.
        """
    @property
    def name(self) -> str:
        """The pool's name."""

def _allocate_plain(nbytes: int, device: _DeviceLike) -> View:
    """Memory of ``nbytes`` bytes as another allocator makes it (``cuMemAlloc``), which no descriptor
    names.
    """

@final
class _AllocationServer(_Named):
    """Shares memory that other libraries allocate in this process, for ``warpipe.torch``."""
    def __new__(cls, name: str, device: _DeviceLike, domain: _DomainLike | None) -> Self: ...
    def share(self, address: int, nbytes: int, owner: object, *, stream: _StreamLike | None) -> int:
        """Shares ``nbytes`` bytes at ``address``, complete behind the work of ``stream`` so far, and
        returns the number that one other process opens: for reading alone, if the memory is of
        ``warpipe.torch.pool()``. ``owner`` keeps the memory allocated: it is referenced until the
        share is over.

        Raises ``NotExportableError``, ``ArgumentError``, ``HandleError``, ``CapturingError``,
        ``ClosedError``, ``DriverError``.
        """
    def withdraw(self, number: int) -> bool:
        """Takes back a share that no process has opened. False if it was opened or withdrawn.

        Raises ``ClosedError``.
        """
    def is_opened(self, number: int) -> bool | None:
        """Whether a process has opened the share: False while it waits for one, or the process for its
        contents, None once it is over.

        Raises ``ClosedError``.
        """
    def stats(self) -> dict[str, int]:
        """The present numbers, by their names in the Rust library's ``AllocationStats``.

        Raises ``ClosedError``.
        """

@final
class _AllocationClient(Closeable):
    """Opens what an ``_AllocationServer`` of another process shares."""
    def __new__(cls, name: str, device: _DeviceLike, domain: _DomainLike | None) -> Self: ...
    @property
    def is_owner_gone(self) -> bool:
        """Whether the server has closed, or its process has died.

        Raises ``ClosedError``.
        """
    def open(self, number: int, timeout: float) -> _OpenAllocation:
        """Opens a share, once its contents are complete, waiting at most ``timeout`` seconds.

        Raises ``NotFoundError``, ``TimeoutError``, ``PeerGoneError``, ``ArgumentError``,
        ``DeviceError``, ``HandleError``, ``SystemCallError``, ``DriverError``.
        """

@final
class _OpenAllocation(View):
    """Memory of another process's library: a ``View`` of its bytes, released there when the last array
    of it is dropped and their streams are past their work.
    """
    def watch(self) -> Callable[[], None]:
        """A check of this memory, which does not hold it: raises ``PeerGoneError`` if the memory went
        with its owner.
        """

@final
class SharedWeights(_Named):
    """All tensors of one version of weights, mapped read only where they lie: nothing is copied.

    ``warpipe.weights.open`` gives it. ``weights[name]`` is a ``View``: an array of any framework. The
    memory stays mapped as long as this object, or a tensor or array of it, lives; meanwhile this
    process is one of those that a new keeper takes the version over from. Opened again, a version
    is the same memory.
    """
    @property
    def version(self) -> int:
        """The number of the version: larger for later ones. A ``Follower`` changes it."""
    @property
    def nbytes(self) -> int:
        """The length of the memory that all tensors lie in, in one part or several."""
    @property
    def device(self) -> Device:
        """The device that they are mapped on."""
    def keys(self) -> list[str]:
        """The names of the tensors, in the order of their places in the memory.

        Raises ``ClosedError``.
        """
    def values(self) -> list[View]:
        """The tensors, in the order of ``keys``.

        Raises ``ClosedError``.
        """
    def items(self) -> list[tuple[str, View]]:
        """The names with the tensors, in the order of ``keys``.

        Raises ``ClosedError``.
        """
    def get(self, name: str, default: Any = None, /) -> Any:
        """The tensor of that name, or ``default`` if there is none.

        Raises ``ClosedError``.
        """
    def offset(self, name: str) -> int:
        """Where a tensor begins in the memory: a multiple of 512. The memory may have parts that are not
        mapped side by side. Two names of one tensor, as tied weights have them, begin at the same
        byte.

        Raises ``KeyError``, ``ClosedError``.
        """
    def content_hash(self, name: str) -> bytes | None:
        """The hash of a tensor's bytes: 128 bits of XXH3. None if it has not been computed.

        Raises ``KeyError``, ``ClosedError``.
        """
    @property
    def hash(self) -> str:
        """When the publisher computes the content hashes: ``"device"``, ``"later"`` or ``"none"``.

        Raises ``ClosedError``.
        """
    @property
    def is_hashed(self) -> bool:
        """Whether each tensor had a content hash when these weights were opened.

        Raises ``ClosedError``.
        """
    @property
    def metadata(self) -> Any:
        """What the publisher gave with the version; None if it gave nothing.

        Raises ``ClosedError``.
        """
    def _metadata(self) -> bytes: ...
    def __getitem__(self, name: str, /) -> View: ...
    def __contains__(self, name: object, /) -> bool: ...
    def __len__(self) -> int: ...
    def __iter__(self) -> Iterator[str]: ...
    def newer(self, timeout: float | None = 10.0) -> SharedWeights:
        """Opens the next version of the same name on the same device, waiting for it up to ``timeout``
        seconds (None: no limit), also while the keeper is replaced. Versions in between are left
        out. This version stays open as long as this object.

        Raises ``TimeoutError`` when none came, ``NotFoundError`` when there is no keeper, and as
        ``open``.
        """
    def follow(self) -> Follower:
        """Later versions come in at the addresses of this one: see ``Follower``.

        Raises ``ClosedError``.
        """
    def _follow(self) -> None: ...
    def _update(
        self, stream: _StreamLike | None = None, timeout: float | None = 10.0
    ) -> tuple[int | None, list[tuple[str, float]]]: ...
    def __reduce__(self) -> Never: ...

@final
class Keeper(_Named):
    """The versions of a name, offered to every process that asks: descriptors alone, without a device.

    ``warpipe.weights.keep`` makes it. Closing it releases the name; processes that have the weights
    open keep them, and the next keeper takes over what they have.
    """
    @property
    def version(self) -> int | None:
        """The version that is offered; None before one is published.

        Raises ``ClosedError``.
        """
    @property
    def candidate(self) -> int | None:
        """The version that was taken over from another process. It is offered once ``verify`` has
        compared its content hashes; None if there is none.

        Raises ``ClosedError``.
        """
    @property
    def unanswered(self) -> int:
        """How many processes held a version when this keeper began, and did not answer it."""
    def __reduce__(self) -> Never: ...

@final
class PublishedWeights(_Named):
    """Weights that a keeper has taken: see ``warpipe.weights.publish``.

    While it is open this process is one of those that a new keeper takes the version over from.
    Closing it takes nothing back.
    """
    @property
    def version(self) -> int:
        """The number of the version."""
    @property
    def nbytes(self) -> int:
        """The length of the memory that the tensors lie in."""
    @property
    def copied(self) -> int:
        """The bytes of the tensors that were copied: 0 if all were published where they lie."""
    def wait_for_hashes(self, timeout: float | None = 10.0) -> bool:
        """Whether each tensor has a content hash. Waits up to ``timeout`` seconds (None: no limit) for
        those that are computed later, until the keeper has them, too.

        Raises ``TimeoutError``; once, the error for which there will be none; ``ClosedError``.
        """
    def __reduce__(self) -> Never: ...

@disjoint_base
class _Bare(_Named):
    """The base of a watch that Python makes of other calls."""
    _after: int
    def __new__(cls, name: str, after: int) -> Self: ...
    def _check(self) -> None: ...
    def __reduce__(self) -> Never: ...

def _publish_weights(
    name: str,
    names: Sequence[str],
    tensors: Sequence[Any],
    device: _DeviceLike | None,
    domain: _DomainLike | None,
    wait: float | None,
    zero_copy: bool | str,
    hash: str,
    row_major: bool,
    metadata: bytes,
    base: Any,
) -> tuple[PublishedWeights, int, list[str], list[tuple[str, float]]]:
    """Publishes tensors: the publication, their number, why some were copied that were to be published
    where they lie, and the seconds of each step.
    """
def _open_weights(
    name: str,
    device: _DeviceLike | None,
    domain: _DomainLike | None,
    wait: float | None,
    after: int = 0,
    watch: _Bare | None = None,
    or_none: bool = False,
) -> Any:
    """Opens a version after number ``after``, for a ``watch`` while that is open; with ``or_none`` None
    if there is none for now.
    """
def _version_after(name: str, device: _DeviceLike | None, domain: _DomainLike | None, after: int) -> int | None:
    """The number of a version after ``after``, waited for ``LOOK`` at most; None if there is none for now."""
def _keep_weights(
    name: str, domain: _DomainLike | None, allow_uids: Sequence[int], allow_gids: Sequence[int]
) -> Keeper:
    """Claims a name, and asks the processes that hold a version of it."""
def _verify_weights(
    name: str, device: _DeviceLike | None, domain: _DomainLike | None, wait: float | None
) -> int:
    """Compares the hashes of the version that a new keeper took over."""
