"""What a subscriber can do beside the native half: wait in an event loop."""

from __future__ import annotations

from types import EllipsisType

from . import _warpipe
from ._errors import PeerGoneError
from ._loop import AsyncIteration, next_of


class Subscriber(_warpipe._Subscriber, AsyncIteration):
    __doc__ = _warpipe._Subscriber.__doc__

    async def receive_async(self, timeout: float | None | EllipsisType = ...) -> _warpipe.Sample:
        """Waits for the next frame in the running event loop: ``receive`` for asyncio.

        ``timeout`` is in seconds (default: the subscriber's; None: as long as it takes). The loop sleeps in its poller
        until the subscriber's descriptor says that a frame may be there. Cancelling it loses no frame.

        Raises as ``receive``.
        """
        return await next_of(self, self.try_receive, self._last, self._limit(timeout))

    async def __anext__(self) -> _warpipe.Sample:
        """The next frame; the iteration ends when the publisher closes gracefully."""
        try:
            return await self.receive_async(self._iteration)
        except PeerGoneError as gone:
            if gone.graceful:
                raise StopAsyncIteration from None
            raise


Subscriber.__module__ = "warpipe"
