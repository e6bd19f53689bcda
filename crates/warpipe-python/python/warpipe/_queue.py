"""What queues and services can do beside the native half: wait in an event loop."""

from __future__ import annotations

import asyncio
import time
from types import EllipsisType
from typing import Protocol, TypeVar

from . import _warpipe
from ._errors import QueueGoneError, TimeoutError
from ._loop import LOOK_SECONDS, readable

# Every change rings: this is for what no ring tells.
_PATIENCE_SECONDS = 1.0

_Found = TypeVar("_Found", covariant=True)


class _Watched(Protocol):
    """Something that has to do with a queue, and can be looked at when that has changed."""

    @property
    def _queue(self) -> int: ...
    def _watch(self) -> _warpipe._Watch: ...


class _Awaited(_Watched, Protocol[_Found]):
    def _poll(self) -> _Found | None: ...


class _Hub:
    """Wakes all who wait for one queue in one event loop: one descriptor, however many they are."""

    def __init__(self, key: tuple[int, int], loop: asyncio.AbstractEventLoop, watch: _warpipe._Watch) -> None:
        self._key, self._loop, self._watch = key, loop, watch
        self._waiting: set[asyncio.Future[None]] = set()
        loop.add_reader(watch.fileno(), self._ring)

    @staticmethod
    def of(watched: _Watched) -> _Hub:
        """The hub of this loop and this queue. While it has no waiter yet, the caller is about to be one."""
        loop = asyncio.get_running_loop()
        key = (id(loop), watched._queue)
        hub = _hubs.get(key)
        if hub is None:
            hub = _hubs[key] = _Hub(key, loop, watched._watch())
        return hub

    def _ring(self) -> None:
        # In this order: what rings from now on is about what comes after the look.
        self._watch.quiet()
        for waiter in self._waiting:
            if not waiter.done():
                waiter.set_result(None)

    def enter(self) -> asyncio.Future[None]:
        """What is done at the next ring. To be left again."""
        waiter = self._loop.create_future()
        self._waiting.add(waiter)
        return waiter

    def leave(self, waiter: asyncio.Future[None]) -> None:
        self._waiting.discard(waiter)
        if not self._waiting and _hubs.get(self._key) is self:
            del _hubs[self._key]
            self._loop.remove_reader(self._watch.fileno())


# A hub holds its loop, so the loop's identity stays its own.
_hubs: dict[tuple[int, int], _Hub] = {}


async def _found(awaited: _Awaited[_Found], end: float | None) -> _Found | None:
    """Looks, and sleeps until the queue rings, until something is there, or until ``time.monotonic()`` is ``end``."""
    found = awaited._poll()
    while found is None:
        hub = _Hub.of(awaited)
        # Entered before the look: what comes after the look rings.
        waiter = hub.enter()
        try:
            found = awaited._poll()
            left = _PATIENCE_SECONDS if end is None else min(_PATIENCE_SECONDS, end - time.monotonic())
            if found is not None or left <= 0:
                break
            await asyncio.wait([waiter], timeout=left)
        finally:
            hub.leave(waiter)
    return found


async def outcome_of(handle: _warpipe.JobHandle | _warpipe.Pending) -> _warpipe.JobResult:
    """Waits for a job's result, or a reply, in the running event loop. Cancelling it loses nothing."""
    awaited: _Awaited[_warpipe.JobResult] = handle
    end = handle.deadline_ns / 1e9 if isinstance(handle, _warpipe.Pending) else None
    while True:
        found = await _found(awaited, end)
        if found is not None:
            return found
        # At its deadline the next look raises; until then it is a rounding's time away.
        await asyncio.sleep(0)


async def next_of(results: _warpipe.Results) -> _warpipe.JobResult:
    """The next of a queue's results, in the running event loop."""
    timeout = results._timeout
    awaited: _Awaited[_warpipe.JobResult | bool] = results
    end = None if timeout is None else time.monotonic() + timeout
    found: _warpipe.JobResult | bool | None = await _found(awaited, end)
    if found is None:
        error = TimeoutError(f"a result did not come within {timeout} s; wait longer")
        error.waited = timeout or 0.0
        raise error
    if isinstance(found, bool):
        raise StopAsyncIteration
    return found


class Worker(_warpipe._Worker):
    __doc__ = _warpipe._Worker.__doc__

    async def lease_async(self, timeout: float | None | EllipsisType = ...) -> _warpipe.Lease:
        """Waits for the next job in the running event loop: ``lease`` for asyncio.

        ``timeout`` is in seconds (default: the worker's; None: as long as it takes). Cancelling it loses no job.

        Raises as ``lease``.
        """
        if timeout is ...:
            timeout = self._timeout
        end = None if timeout is None else time.monotonic() + timeout
        # Asked for first: from now on the queue rings for each job.
        descriptor = self.fileno()
        while True:
            lease = self.try_lease()
            if lease is not None:
                return lease
            left = LOOK_SECONDS if end is None else min(LOOK_SECONDS, end - time.monotonic())
            if left <= 0:
                error = TimeoutError(f"a job of {self.queue!r} did not come within {timeout} s; wait longer")
                error.waited = timeout or 0.0
                raise error
            await readable(descriptor, left)

    def __aiter__(self) -> Worker:
        return self

    async def __anext__(self) -> _warpipe.Lease:
        """The next job; the iteration ends when the queue says goodbye."""
        try:
            return await self.lease_async()
        except QueueGoneError as gone:
            if gone.graceful:
                raise StopAsyncIteration from None
            raise

    async def __aenter__(self) -> Worker:
        return self

    async def __aexit__(self, *_exception: object) -> None:
        self.close()


Worker.__module__ = "warpipe"
