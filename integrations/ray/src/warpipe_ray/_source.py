"""The memory that this process offers: a pool for each device, and the order of its contents.

The tensors of an object lie in one block of the pool, or, where ``empty`` made them, in blocks of their own. A receiver
opens a block by its ticket. The block is used again when Ray has collected the object and the last receiver has dropped its
tensors, or is dead.
"""

from __future__ import annotations

import functools
import os
import secrets
import threading
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import warpipe
from ray.experimental.rdt.tensor_transport_manager import TensorTransportMetadata

from ._arrays import Library, library, library_of_type, nbytes

LIMIT_VARIABLE = "WARPIPE_RAY_MEMORY_LIMIT"
"""The environment variable with the most bytes that a process offers on each device."""

# Of the host's memory; of a GPU's it is all.
_HOST_SHARE = 2
# How long a task waits until objects are collected, if there is no room.
_ROOM_SECONDS = 10.0
# Arrays begin at multiples of it, as those of the libraries do.
_ALIGNMENT = 512


@dataclass
class Metadata(TensorTransportMetadata):
    """An object on its way: Ray pickles it."""

    library: str = ""
    machine: str = ""
    pid: int = 0
    device: str = ""
    """The ``Device.uuid`` of the memory."""
    tickets: list[str] = field(default_factory=list)
    """Of the blocks."""
    places: list[tuple[int, int] | None] = field(default_factory=list)
    """Of each tensor the number of its block and its first byte there; None for one without elements."""
    domain: str = ""
    pool: str = ""
    """The name of the pool."""
    complete: int | None = None
    """The value of the pool's timeline that says that the contents are there. None if they are."""


@dataclass(frozen=True)
class Offer:
    """An object that others may open, as long as this lives."""

    blocks: list[warpipe.Buffer]
    metadata: Metadata


def offer(arrays: Sequence[Any], writable: bool) -> Offer:
    """Offers arrays of one library on one device; those that do not lie in blocks are copied, on the current stream.

    Raises ``MemoryLimitError`` when objects that were not collected leave no room, ``NotATensorError``, ``DTypeError``,
    ``ArgumentError``.
    """
    if not arrays:
        return Offer([], Metadata([]))
    with_type = library_of_type(type(arrays[0]))
    for array in arrays:
        with_type.check(array)
    kind, device = with_type.device(arrays[0])
    if any(with_type.device(array)[1] != device for array in arrays):
        raise warpipe.ArgumentError("the tensors of an object lie on several devices; return those of each device as an object")
    return source(device).offer(with_type, kind, arrays, writable)


def empty(shape: Sequence[int] | int, dtype: Any, device: Any = None) -> Any:
    """An array without values, in memory that the transport offers where it lies: it is not copied when a method returns it.

    It is a tensor if ``dtype`` is one of PyTorch, else an array of NumPy. ``device`` is that of warpipe: ``"host"``, which it
    is by default, or ``"cuda:0"`` or a ``torch.device``. Actors that have received it see what is written to it later: make
    a new one for each object. The block comes back when neither this process nor a receiver has an array of it.

    Raises ``MemoryLimitError``, ``DTypeError``, ``DeviceError``.
    """
    with_type = library("torch" if type(dtype).__module__.startswith("torch") else "numpy")
    dtype, item = with_type.dtype(dtype)
    shape = (shape,) if isinstance(shape, int) else tuple(shape)
    place = warpipe.Device("host" if device is None or str(device) == "cpu" else device)
    length = nbytes(shape, item)
    if length == 0:
        return with_type.empty(shape, dtype, place)
    return with_type.shaped(with_type.owning(source(place).block(length)), dtype, shape)


class Source:
    """The pool of one device."""

    def __init__(self, device: warpipe.Device) -> None:
        name = f"ray/{os.getpid()}-{secrets.token_hex(6)}"
        domain = warpipe.Domain()
        # An actor that was killed leaves its names, and here the next ones begin.
        domain.clean()
        self._device, self._domain = device, str(domain.path)
        self._pool = warpipe.Pool.create(name, domain=domain, device=device, memory_limit=_limit(device))
        self._timeline: warpipe.Timeline | None = None
        if device.kind != "host":
            self._timeline = warpipe.Timeline.create(timeline_of(name), domain=domain, device=device)
        self._value, self._lock = 0, threading.Lock()
        # By their addresses, those of arrays that `empty` has made: an array holds its block.
        self._made: weakref.WeakValueDictionary[int, warpipe.Buffer] = weakref.WeakValueDictionary()

    def block(self, length: int) -> warpipe.Buffer:
        """A block for arrays that hold it."""
        made = self._pool.allocate(length, _ROOM_SECONDS)
        self._made[made.ptr] = made
        return made

    def offer(self, with_type: Library, kind: str, arrays: Sequence[Any], writable: bool) -> Offer:
        meta, lying, room = [], [], 0
        for array in arrays:
            dtype, item = with_type.dtype(array.dtype)
            length, lies = nbytes(array.shape, item), self._lying(with_type, array)
            meta.append((array.shape, dtype))
            lying.append((length, lies))
            # The other arrays are copied, side by side in one block.
            room += 0 if lies else _aligned(length)
        packed = self._pool.allocate(room, _ROOM_SECONDS) if room else None
        blocks: dict[int, tuple[int, warpipe.Buffer]] = {}
        places: list[tuple[int, int] | None] = []
        end = 0
        for array, (shape, dtype), (length, lies) in zip(arrays, meta, lying, strict=True):
            if length == 0:
                places.append(None)
                continue
            if lies is None:
                assert packed is not None
                lies = packed, end
                with_type.copy(with_type.over(packed.view((length,), "uint8", end), dtype, tuple(shape)), array)
                end += _aligned(length)
            block, at = lies
            number, _ = blocks.setdefault(block.ptr, (len(blocks), block))
            places.append((number, at))
        offered = [block for _, block in blocks.values()]
        metadata = Metadata(
            meta, kind, with_type.name, machine(), os.getpid(), self._device.uuid,
            [str(block.lend(writable=writable)) for block in offered], places, self._domain, self._pool.name,
            self._completion(with_type) if offered else None,
        )  # fmt: skip
        return Offer(offered, metadata)

    def _lying(self, with_type: Library, array: Any) -> tuple[warpipe.Buffer, int] | None:
        """The block that ``empty`` made an array in, and where it begins there."""
        place = with_type.place(array)
        if place is None:
            return None
        block = self._made.get(place[0])
        return None if block is None else (block, place[1] - place[0])

    def _completion(self, with_type: Library) -> int | None:
        """The value that is reached behind the work of the current stream so far."""
        if self._timeline is None:
            return None
        # The values grow in the order of the signals.
        with self._lock:
            self._value += 1
            self._timeline.signal(self._value, stream=with_type.stream(self._device))
            return self._value


def timeline_of(pool: str) -> str:
    """The name of the timeline of a pool on a GPU."""
    return f"{pool}/t"


def source(device: warpipe.Device) -> Source:
    """That of a device, made with its first array."""
    found = _sources.get(device.uuid)
    if found is None:
        with _making:
            found = _sources.get(device.uuid)
            if found is None:
                found = _sources[device.uuid] = Source(device)
    return found


# Reentrant: a collection of garbage may come in between.
_making = threading.RLock()
_sources: dict[str, Source] = {}


def _aligned(length: int) -> int:
    return -(-length // _ALIGNMENT) * _ALIGNMENT


def _limit(device: warpipe.Device) -> int:
    usual = device.memory_bytes // (_HOST_SHARE if device.kind == "host" else 1)
    text = os.environ.get(LIMIT_VARIABLE)
    if text is None:
        return usual
    if not text.isdecimal() or not int(text):
        raise warpipe.ArgumentError(f"{LIMIT_VARIABLE} is {text!r}; give a number of bytes above 0")
    return min(int(text), device.memory_bytes)


@functools.cache
def machine() -> str:
    """The same in all processes of a running system, and in no other."""
    with open("/proc/sys/kernel/random/boot_id") as file:
        return file.read().strip()
