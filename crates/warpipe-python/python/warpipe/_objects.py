"""How objects of the native half are told in words, how they are pickled, and why others are not."""

from __future__ import annotations

from typing import Any, Never

from . import _warpipe


def _repr(*fields: str) -> Any:
    """By name, layout and device, as far as the object has them, and by these attributes."""

    def told(self: Any) -> str:
        named = self.weights if isinstance(self, _warpipe.Follower) else self
        name = next((found for one in ("name", "queue", "service", "_name") if (found := getattr(named, one, None))), None)
        words = [] if name is None else [f'"{name}"']
        if isinstance(self, _warpipe._Tensor):
            words = [self._described]
        elif isinstance(device := getattr(self, "device", None), _warpipe.Device):
            words.append(device.name)
        words += [f"{field}={getattr(self, field)!r}" for field in fields]
        return f"{type(self).__name__}({', '.join(words)})"

    return told


_FIELDS: dict[type, tuple[str, ...]] = {
    _warpipe.Closeable: (),
    _warpipe.Follower: ("version",),
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
    _warpipe.Follower: "follow them in the other process: `warpipe.weights.open(name).follow()`",
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
    for one, step in _NEXT.items():
        one.__reduce__ = _no_pickle(step)
    for one in (_warpipe.EventHandle, _warpipe.LegacyHandle, _warpipe.Ticket):
        one.__reduce__ = lambda self: (type(self), (str(self),))
    one = _warpipe.Domain
    one.__getnewargs_ex__ = lambda self: ((self.path,), {} if self._owner is None else {"owner": self._owner})
    one = _warpipe.EventHandle
    one.__hash__ = lambda self: hash(str(self))


_complete()
