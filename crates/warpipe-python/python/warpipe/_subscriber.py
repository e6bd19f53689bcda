"""What a subscriber can do beside the native half: wait in an event loop."""

from __future__ import annotations

import time
from types import EllipsisType

from . import _warpipe
from ._errors import PublisherGoneError, TimeoutError
from ._loop import LOOK_SECONDS, readable


class Subscriber(_warpipe._Subscriber):
    __doc__ = _warpipe._Subscriber.__doc__

    async def receive_async(self, timeout: float | None | EllipsisType = ...) -> _warpipe.Sample:
        """Waits for the next frame in the running event loop: ``receive`` for asyncio.

        ``timeout`` is in seconds (default: the subscriber's; None: as long as it takes). The loop sleeps in its poller
        until the subscriber's descriptor says that a frame may be there. Cancelling it loses no frame.

        Raises as ``receive``.
        """
        if timeout is ...:
            timeout = self._timeout
        end = None if timeout is None else time.monotonic() + timeout
        # Asked for first: from now on the publisher rings for each frame.
        descriptor = self.fileno()
        while True:
            frame = self.try_receive()
            if frame is not None:
                return frame
            left = LOOK_SECONDS if end is None else min(LOOK_SECONDS, end - time.monotonic())
            if left <= 0:
                error = TimeoutError(f"a sample of {self.name!r} did not come within {timeout} s; wait longer")
                error.waited = timeout or 0.0
                raise error
            await readable(descriptor, left)

    def __aiter__(self) -> Subscriber:
        return self

    async def __anext__(self) -> _warpipe.Sample:
        """The next frame; the iteration ends when the publisher says goodbye."""
        try:
            return await self.receive_async()
        except PublisherGoneError as gone:
            if gone.graceful:
                raise StopAsyncIteration from None
            raise

    async def __aenter__(self) -> Subscriber:
        return self

    async def __aexit__(self, *_exception: object) -> None:
        self.close()


Subscriber.__module__ = "warpipe"
