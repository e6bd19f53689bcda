"""Waits in an event loop: it sleeps in its own poller, and nobody polls for it.

Whatever waits looks, and sleeps until a descriptor rings. What is found is given out in the same step as the look, with
no ``await`` in between: a wait that is cancelled has taken nothing. Nor is there a call in between, before which the
interpreter could run a signal's handler: one that raises would lose what was taken.
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
        # With each waiter, whether a ring may be for it.
        self._waiting: dict[asyncio.Future[None], Callable[[], bool]] = {}
        self._descriptor = -1
        try:
            # One of its own: the endpoint may be closed meanwhile, and then its number is the next one's.
            # Taken as items of receivers are.
            (self._descriptor,) = map(os.dup, (doorbell.fileno(),))
            loop.add_reader(self._descriptor, self._ring)
        except BaseException as error:
            if self._descriptor >= 0:
                os.close(self._descriptor)
            if isinstance(error, OSError):
                # Another thread may have closed the endpoint, and another file have its number: that is the error then.
                doorbell.fileno()
            raise
        _hubs[key] = self

    def _ring(self) -> None:
        try:
            self._doorbell.quiet()
        finally:
            # What comes from here on rings again.
            self._wake()
        self._close_unless_waited_for()

    def _wake(self) -> None:
        for waiter, is_worth_a_look in list(self._waiting.items()):
            if waiter.done():
                # It leaves before the next ring, unless a signal's handler has kept it from that.
                self._waiting.pop(waiter, None)
            elif is_worth_a_look():
                waiter.set_result(None)

    async def sleep(self, limit: float, is_worth_a_look: Callable[[], bool]) -> None:
        """Sleeps until it rings and a look is worth it, for at most ``limit`` seconds."""
        waiter = self._loop.create_future()
        self._waiting[waiter] = is_worth_a_look
        timer = None
        try:
            timer = self._loop.call_later(limit, _settle, waiter)
            await waiter
        finally:
            if timer is not None:
                timer.cancel()
            self._waiting.pop(waiter, None)
            self._close_unless_waited_for()

    def _close_unless_waited_for(self) -> None:
        if not self._waiting and self._descriptor >= 0:
            if _hubs.get(self._key) is self:
                del _hubs[self._key]
            self._loop.remove_reader(self._descriptor)
            descriptor, self._descriptor = self._descriptor, -1
            os.close(descriptor)


# A hub holds its loop and what it is of, so their identities stay their own. A loop that is given
# up takes its hubs along.
_hubs: weakref.WeakValueDictionary[tuple[int, Hashable], _Hub] = weakref.WeakValueDictionary()


def _settle(waiter: asyncio.Future[None]) -> None:
    if not waiter.done():
        waiter.set_result(None)


def _always() -> bool:
    return True


async def found(
    what: Hashable,
    doorbell: Callable[[], Doorbell],
    look: Callable[[], _Found | None],
    end: float,
    patience: float,
    is_worth_a_look: Callable[[], bool] = _always,
) -> _Found | None:
    """Looks, and sleeps until it rings, until something is there; None if ``time.monotonic()`` is ``end`` before.

    Of many waits for one doorbell a ring wakes those alone for which ``is_worth_a_look``.
    """
    while (here := look()) is None and (left := end - time.monotonic()) > 0:
        loop = asyncio.get_running_loop()
        hub = _hubs.get((id(loop), what))
        if hub is None:
            rings = doorbell()
            # It rings for what comes from now on. There is nothing to undo yet if something has come.
            if (here := look()) is not None:
                break
            hub = _Hub((id(loop), what), loop, rings)
        await hub.sleep(min(left, patience), is_worth_a_look)
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
