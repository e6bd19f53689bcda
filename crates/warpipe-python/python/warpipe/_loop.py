"""Waits in an event loop: it sleeps in its own poller, and nobody polls for it.

Whatever waits looks, and sleeps until a descriptor rings. What is found is given out in the same step as the look, with
no ``await`` in between: a wait that is cancelled has taken nothing.
"""

from __future__ import annotations

import asyncio
import os
import time
import weakref
from collections.abc import Callable, Hashable
from typing import Protocol, TypeVar

# A look without having been woken: a publisher that comes back may not ring, nor does an endpoint
# that is closed here.
LOOK_SECONDS = 0.1

_Found = TypeVar("_Found")


class Doorbell(Protocol):
    """What is readable when a look is worth it."""

    def fileno(self) -> int: ...
    def quiet(self) -> None: ...


class _Endpoint(Protocol):
    def __hash__(self) -> int: ...
    def fileno(self) -> int: ...


class _EndpointDoorbell:
    """The doorbell of an endpoint. Its looks take in the items that rang it."""

    def __init__(self, endpoint: _Endpoint) -> None:
        self._endpoint = endpoint

    def fileno(self) -> int:
        return self._endpoint.fileno()

    def quiet(self) -> None:
        pass


class _Hub:
    """Wakes all waiters for one thing in one event loop: one descriptor for any number of waiters."""

    def __init__(self, key: tuple[int, Hashable], loop: asyncio.AbstractEventLoop, doorbell: Doorbell) -> None:
        self._key, self._loop, self._doorbell = key, loop, doorbell
        self._waiting: set[asyncio.Future[None]] = set()
        # One of its own: the endpoint may be closed meanwhile, and then its number is the next
        # one's.
        self._descriptor = os.dup(doorbell.fileno())
        try:
            loop.add_reader(self._descriptor, self._ring)
        except BaseException:
            os.close(self._descriptor)
            raise

    @staticmethod
    def of(what: Hashable, doorbell: Callable[[], Doorbell]) -> _Hub:
        """The hub of this loop for ``what``. While it has no waiter yet, the caller is about to be one."""
        loop = asyncio.get_running_loop()
        key = (id(loop), what)
        hub = _hubs.get(key)
        if hub is None:
            rings = doorbell()
            try:
                hub = _hubs[key] = _Hub(key, loop, rings)
            except OSError:
                # Another thread may have closed it, and another file have its number: that is the error then.
                rings.fileno()
                raise
        return hub

    def _ring(self) -> None:
        # In this order: what rings from now on is about what comes after the look.
        self._doorbell.quiet()
        self._wake()

    def _wake(self) -> None:
        for waiter in self._waiting:
            if not waiter.done():
                waiter.set_result(None)

    async def sleep(self, look: Callable[[], _Found | None], end: float, patience: float) -> tuple[_Found | None, bool]:
        """Looks, and if nothing is there sleeps until it rings, for ``patience``, or until the end. Says whether that is."""
        waiter = self._loop.create_future()
        # Entered before the look: what comes after the look rings.
        self._waiting.add(waiter)
        timer = None
        try:
            found = look()
            if found is not None:
                return found, True
            left = min(patience, end - time.monotonic())
            if left <= 0:
                return None, True
            timer = self._loop.call_later(left, _settle, waiter)
            await waiter
            return None, False
        finally:
            if timer is not None:
                timer.cancel()
            self._leave(waiter)

    def _leave(self, waiter: asyncio.Future[None]) -> None:
        self._waiting.discard(waiter)
        if not self._waiting and self._descriptor >= 0:
            if _hubs.get(self._key) is self:
                del _hubs[self._key]
            self._loop.remove_reader(self._descriptor)
            os.close(self._descriptor)
            self._descriptor = -1


# A hub holds its loop and what it is of, so their identities stay their own. A loop that is given
# up takes its hubs along.
_hubs: weakref.WeakValueDictionary[tuple[int, Hashable], _Hub] = weakref.WeakValueDictionary()


def _settle(waiter: asyncio.Future[None]) -> None:
    if not waiter.done():
        waiter.set_result(None)


async def found(
    what: Hashable, doorbell: Callable[[], Doorbell], look: Callable[[], _Found | None], end: float, patience: float
) -> _Found | None:
    """Looks, and sleeps until it rings, until something is there; None if ``time.monotonic()`` is ``end`` before."""
    here, is_over = look(), False
    while here is None and not is_over:
        here, is_over = await _Hub.of(what, doorbell).sleep(look, end, patience)
        if here is None:
            here = look()
    return here


def end_of(timeout: float | None) -> float:
    """When a wait of so many seconds from now ends."""
    return float("inf") if timeout is None else time.monotonic() + timeout


async def rung_of(endpoint: _Endpoint, look: Callable[[], _Found | None], timeout: float | None) -> _Found | None:
    """What ``look`` finds within ``timeout`` at an endpoint that can be polled."""
    return await found(endpoint, lambda: _EndpointDoorbell(endpoint), look, end_of(timeout), LOOK_SECONDS)


async def next_of(
    endpoint: _Endpoint, look: Callable[[], _Found | None], last: Callable[[float | None], _Found], timeout: float | None
) -> _Found:
    """The same, where nothing is an error: that of ``last``, which looks once more and knows the cause."""
    here = await rung_of(endpoint, look, timeout)
    if here is None:
        (here,) = map(last, (timeout,))
    return here
