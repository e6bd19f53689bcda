"""What a watch of members can do beside the native half: wait in an event loop."""

from __future__ import annotations

from . import _warpipe
from ._tuples import Change
from ._errors import ClosedError
from ._loop import rung_of


async def change_within(members: _warpipe.Members, timeout: float | None) -> Change | None:
    """The next change, in the running event loop; None when there was none."""
    return await rung_of(members, lambda: members.changes(0), timeout)


async def next_change(members: _warpipe.Members) -> Change:
    """The next change, however long that takes; the iteration ends when the watch is closed."""
    try:
        change = await change_within(members, None)
    except ClosedError:
        raise StopAsyncIteration from None
    assert change is not None, "a wait without a limit ends with a change"
    return change
