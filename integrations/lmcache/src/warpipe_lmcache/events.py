"""Events of LMCache's transfers, as values of warpipe's timelines in the place of CUDA's interprocess events.

CUDA reads an event as complete when its recorder has died in the middle of the work. A value of a timeline is reached, or
never will be; LMCache has no check after a wait, so that a wait here is the CPU's, and ends with one or the other.
"""

from __future__ import annotations

import functools
import os
import threading
import uuid
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import warpipe

_PREFIX = "lmcache/"
# Of streams that this process records on, and of those of other processes.
_TIMELINES_MAX = 256
# Seconds for work that was enqueued before an event, after which LMCache does without the transfer.
_LIMIT = 30.0


@dataclass
class TimelineEvent:
    """A value of a timeline: unknown until the event is recorded."""

    device: warpipe.Device
    timeline: warpipe.Timeline | None = None
    value: int = 0
    open: Callable[[], warpipe.Timeline] | None = None
    """Of another process's event. LMCache imports events where an error ends an engine, so that the query or the wait opens."""

    def reached(self) -> tuple[warpipe.Timeline, int]:
        """The timeline, and the value at which the event is complete.

        Raises ``EventNotRecordedError``, and ``NotFoundError`` when the recorder has gone.
        """
        if self.timeline is None and self.open is not None:
            self.timeline = self.open()
        if self.timeline is None:
            raise warpipe.EventNotRecordedError("the event was never recorded; record it before it is passed on or waited for")
        return self.timeline, self.value

    def wait(self, stream: object = None) -> None:
        """Returns when the recorded work is complete, so that work given to any stream then is behind it.

        Raises ``PeerGoneError`` or ``NotFoundError`` if the recorder died first, ``TimeoutError``.
        """
        del stream
        timeline, value = self.reached()
        timeline.wait(value, timeout=_LIMIT)


@dataclass
class _Recorder:
    """The timeline of one stream: its values are reached in the order of the stream's work alone."""

    timeline: warpipe.Timeline
    value: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)


class TimelineEvents:
    """LMCache's ``EventIPCBackend``."""

    device_type = "cuda"

    def __init__(self, domain: Any = None) -> None:
        self._domain = warpipe.Domain(domain)
        self._lock = threading.Lock()
        self._recorders: OrderedDict[tuple[str, int], _Recorder] = OrderedDict()
        self._opened: OrderedDict[str, warpipe.Timeline] = OrderedDict()

    def check_event_support(self, device: object) -> None:
        """Raises ``RuntimeError`` if this process can make no timeline for the device."""
        try:
            warpipe.Timeline.create(_new_name(), domain=self._domain, device=self._device(device)).close()
        except warpipe.Error as error:
            raise RuntimeError(f"no timeline of warpipe for {device}: {error}") from error

    def create_event(self, device: object) -> TimelineEvent:
        return TimelineEvent(self._device(device))

    def record_event(self, event: TimelineEvent, stream: object) -> None:
        """Has the stream signal the next value of its timeline."""
        recorder = self._recorder(event.device, stream)
        with recorder.lock:
            recorder.value += 1
            recorder.timeline.signal(recorder.value, stream=self._stream(event.device, stream))
            event.timeline, event.value = recorder.timeline, recorder.value

    def export_event(self, event: TimelineEvent, device: object) -> bytes:
        timeline, value = event.reached()
        return f"{value}:{timeline.name}".encode()

    def import_event(self, handle: bytes, device: object) -> TimelineEvent:
        """Raises ``ValueError`` for bytes of another kind."""
        value, _, name = handle.decode("ascii", "replace").partition(":")
        if not (value.isascii() and value.isdigit() and len(value) < 20 and name.startswith(_PREFIX)):
            raise ValueError(f"{handle[:80]!r} is no event of warpipe; set LMCACHE_DEVICE_BACKEND=warpipe on both sides")
        if not 0 < int(value) <= warpipe.Timeline.VALUE_MAX:
            raise ValueError(f"event {handle[:80]!r} has no value of a timeline")
        found = self._device(device)
        return TimelineEvent(found, value=int(value), open=functools.partial(self._open, name, found))

    def wait_event(self, event: TimelineEvent, stream: object) -> None:
        event.wait(stream)

    def query_event(self, event: TimelineEvent) -> bool:
        """Whether the event is complete; a dead recorder's is not and never will be, and LMCache's health check ends its
        request."""
        try:
            timeline, value = event.reached()
            return timeline.check(value)
        except warpipe.ConnectionError:
            return False

    def synchronize_event(self, event: TimelineEvent, device: object) -> None:
        event.wait()

    def _device(self, device: object) -> warpipe.Device:
        import torch

        place = torch.device("cuda", device) if isinstance(device, int) else torch.device(device)  # type: ignore[call-overload]
        return warpipe.Device(torch.cuda.current_device() if place.index is None else place.index)

    def _stream(self, device: warpipe.Device, stream: object) -> Any:
        return stream

    def _recorder(self, device: warpipe.Device, stream: Any) -> _Recorder:
        key = device.uuid, int(stream.cuda_stream)
        with self._lock:
            recorder = self._recorders.get(key)
            if recorder is None:
                self._make_room()
                timeline = warpipe.Timeline.create(_new_name(), domain=self._domain, device=device)
                recorder = self._recorders[key] = _Recorder(timeline)
            self._recorders.move_to_end(key)
            return recorder

    def _make_room(self) -> None:
        if len(self._recorders) < _TIMELINES_MAX:
            return
        for key, recorder in self._recorders.items():
            # A value that was reached stays so for all that have the timeline open.
            if recorder.timeline.value == recorder.value:
                del self._recorders[key]
                return
        raise warpipe.EventLimitError(f"{_TIMELINES_MAX} streams have work before an event; wait for one of them first")

    def _open(self, name: str, device: warpipe.Device) -> warpipe.Timeline:
        with self._lock:
            timeline = self._opened.get(name)
        if timeline is None:
            timeline = warpipe.Timeline.open(name, domain=self._domain, device=device)
        with self._lock:
            self._opened[name] = timeline
            self._opened.move_to_end(name)
            if len(self._opened) > _TIMELINES_MAX:
                # Events that have it keep it.
                self._opened.popitem(last=False)
        return timeline


def _new_name() -> str:
    return f"{_PREFIX}{os.getpid()}.{uuid.uuid4().hex}"
