"""What watches of members can do beside the native half: begin so that Ctrl-C ends it, and wait in an event loop."""

from __future__ import annotations

import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from typing import Any

from . import _warpipe
from ._errors import ClosedError
from ._loop import rung_of


def apart(call: Callable[..., Any], *arguments: Any) -> Any:
    """Runs a call that asks other processes for a while on a thread of its own, and lets Ctrl-C end the wait. A call that is
    waited for no more ends by itself, and what it gives is dropped."""
    found: Future[Any] = Future()

    # An error's traceback has both frames.
    def run(found: Future[Any]) -> None:
        try:
            found.set_result(call(*arguments))
        except BaseException as error:
            found.set_exception(error)
        finally:
            del found

    threading.Thread(target=run, args=(found,), name="warpipe-asks", daemon=True).start()
    try:
        return found.result()
    finally:
        del found


def watch(domain: Any = None, *, on: Callable[[Any], object] | None = None, clean: bool = True) -> Any:
    """Begins to watch, and waits until all present members have answered. ``on`` is called with
    each ``Change``, in order, on a thread of its own; without it ``changes`` or iteration gives
    the changes. Present members come first, as ``"joined"``. ``clean``: remove the endpoints
    that dead members leave in the domain.

    Raises ``DomainError``, ``SystemCallError``.
    """
    return apart(_warpipe.Members._watch, domain, on, clean)


def changes(self: Any, timeout: float | None = 10.0) -> Any:
    """The next change, waited for at most ``timeout`` seconds (None: no limit); None if there was none.

    Raises ``ArgumentError`` if this watch has a callback, which gets the changes; ``ClosedError``.
    """
    # As items of receivers are taken.
    (change,) = map(self._changes, (timeout,))
    return change


def changes_async(self: Any, timeout: float | None = 10.0) -> Coroutine[Any, Any, Any]:
    """Waits for the next change in the running event loop: ``changes`` for asyncio. Cancelling it loses none.

    Raises as ``changes``.
    """
    return rung_of(self, lambda: self.changes(0), _warpipe._seconds(timeout))


async def next_change(self: Any) -> Any:
    """The next change, however long that takes; the iteration ends when the watch is closed."""
    try:
        return await changes_async(self, None)
    except ClosedError:
        raise StopAsyncIteration from None


def _complete() -> None:
    """Gives the native class these methods."""
    members: Any = _warpipe.Members
    members.watch = staticmethod(watch)
    members.changes, members.changes_async, members.__anext__ = changes, changes_async, next_change
    members.__iter__ = members.__aiter__ = lambda self: self


_complete()
