"""How objects of the native half are told in words, how they are pickled, and why others are not."""

from __future__ import annotations

import math
from typing import Any, Never

from . import _warpipe


def _repr(*fields: str) -> Any:
    """By name, layout and device, as far as the object has them, and by these attributes."""

    def told(self: Any) -> str:
        if isinstance(self, _warpipe._Tensor):
            # Not its name, which opened memory has no more once it is released.
            words = [self._layout, self.device.name]
        else:
            names = (getattr(self, one, None) for one in ("name", "queue", "service", "_name"))
            words = [f'"{name}"' for name in names if name][:1]
            if isinstance(device := getattr(self, "device", None), _warpipe.Device):
                words.append(device.name)
        words += [f"{field}={getattr(self, field)!r}" for field in fields]
        return f"{type(self).__name__}({', '.join(words)})"

    return told


_FIELDS: dict[type, tuple[str, ...]] = {
    _warpipe.Closeable: (),
    _warpipe.JobResult: ("job", "attempt", "worker_pid"),
    _warpipe.KernelRing: ("is_producer",),
    _warpipe.Lease: ("job", "attempt"),
    _warpipe.Member: ("role",),
    _warpipe.PublishedWeights: ("version",),
    _warpipe.Sample: ("sequence",),
    _warpipe.SharedWeights: ("version", "nbytes"),
    _warpipe._Future: ("job",),
    _warpipe._Tensor: (),
}

_NEXT: dict[type, str] = {
    _warpipe.Closeable: "open it in the other process, by its name",
    _warpipe.Keeper: "keep the name in one process",
    _warpipe.PublishedWeights: "send its name and version, and open the weights there",
    _warpipe.SharedWeights: "open them in the other process: `warpipe.weights.open(name)`",
    _warpipe._Bare: "watch the name in the other process",
    _warpipe._Future: "wait for its outcome here, and send a copy of that: numpy.array(handle.result())",
    _warpipe._Tensor: "send it by a Publisher or a Queue, or pickle a copy, for example `.numpy().copy()`",
}


_WORDS: dict[type, Any] = {
    _warpipe.Device: lambda self: f"Device('{'host' if self.kind == 'host' else f'cuda:{self.ordinal}'}')",
    _warpipe.Domain: lambda self: f"Domain({str(self.path)!r})",
    _warpipe.EventHandle: lambda self: f"EventHandle('{self}')",
    _warpipe.LegacyHandle: lambda self: f"LegacyHandle(nbytes={self.nbytes}, pid={self.pid})",
    _warpipe.Recording: lambda self: str(self),
    _warpipe.Stream: lambda self: f"Stream({self.device.uuid}, {self.ptr:#x})",
    _warpipe.Ticket: lambda self: f"Ticket('{self}')",
}


# Properties, in the order of the object's ``_facts``.
_FACTS: dict[type, dict[str, str]] = {
    _warpipe.Device: {
        "kind": '``"cuda"`` or ``"host"``.',
        "ordinal": "The device's number in this process (0 for the host), as ``CUDA_VISIBLE_DEVICES`` leaves it.",
        "name": "For display: the GPU's product name, or ``host``.",
        "uuid": "The identity that is the same in every process: ``GPU-...`` or ``host``.",
        "memory_bytes": "Total memory in bytes.",
    },
    _warpipe.LegacyHandle: {
        "nbytes": "The range's length in bytes.",
        "offset": "The offset of the range in its allocation, in bytes.",
        "allocation_nbytes": "The length of the allocation. A process that opens the handle can access all of it.",
        "device": "The device that owns the memory: its ``Device.uuid``.",
        "pid": "The exporter's process id, in its own PID namespace.",
    },
    _warpipe.Ticket: {
        "domain": "The domain's directory.",
        "name": "The endpoint's name.",
        "kind": 'The kind of the endpoint: ``"memory"`` or ``"pool"``.',
        "device": "The device that the memory is on (its ``Device.uuid``), or None if unknown.",
        "nbytes": "Its length, or None if unknown.",
    },
}


def _fact(at: int, doc: str) -> property:
    return property(lambda self: self._facts[at], doc=doc)


def _open_event(self: _warpipe.EventHandle, *, device: Any = None, domain: Any = None) -> _warpipe.Event:
    """Opens the event: see ``Event.open``."""
    return _warpipe.Event.open(self, device=device, domain=domain)


def _no_pickle(step: str) -> Any:
    def refused(self: Any) -> Never:
        raise TypeError(f"a {type(self).__name__} belongs to its process and cannot be pickled; {step}")

    return refused


def _complete() -> None:
    """Gives the native classes these methods."""
    one: Any
    for one, fields in _FIELDS.items():
        one.__repr__ = _repr(*fields)
    for one, words in _WORDS.items():
        one.__repr__ = words
    for one, facts in _FACTS.items():
        for at, (name, doc) in enumerate(facts.items()):
            setattr(one, name, _fact(at, doc))
    one = _warpipe._Tensor
    one.ndim = property(lambda self: len(self.shape), doc="The number of dimensions.")
    one.size = property(lambda self: math.prod(self.shape), doc="The number of elements.")
    for one, step in _NEXT.items():
        one.__reduce__ = _no_pickle(step)
    for one in (_warpipe.EventHandle, _warpipe.LegacyHandle, _warpipe.Ticket):
        one.__reduce__ = lambda self: (type(self), (str(self),))
    one = _warpipe.Domain
    one.__getnewargs_ex__ = lambda self: ((self.path,), {} if self._owner is None else {"owner": self._owner})
    one = _warpipe.EventHandle
    one.__hash__ = lambda self: hash(str(self))
    one.open = _open_event


_complete()
