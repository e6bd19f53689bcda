"""What watches of members can do beside the native half: wait in an event loop."""

from __future__ import annotations

from collections.abc import Coroutine
from typing import Any

from . import _warpipe
from ._errors import ClosedError
from ._loop import rung_of


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
    members.changes, members.changes_async, members.__anext__ = changes, changes_async, next_change
    members.__iter__ = members.__aiter__ = lambda self: self


_complete()
