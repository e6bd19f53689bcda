"""What queues and services can do beside the native half: wait in an event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from types import EllipsisType
from typing import Any

from . import _warpipe
from ._errors import PeerGoneError
from ._loop import end_of, found, next_of

# Every change rings: this is for what no ring tells.
_PATIENCE_SECONDS = 1.0


async def outcome_of(future: _warpipe._Future) -> _warpipe.JobResult:
    """Waits for a job's result, or a reply, in the running event loop. Cancelling it loses nothing."""
    end = future.deadline_ns / 1e9 if isinstance(future, _warpipe.Pending) else float("inf")
    while True:
        outcome = await found(future._queue, future._watch, future._poll, end, _PATIENCE_SECONDS)
        if outcome is not None:
            return outcome
        # At its deadline the next look raises; until then it is a rounding's time away.
        await asyncio.sleep(0)


def step(
    waits: dict[asyncio.Task[Any] | None, Coroutine[Any, Any, _warpipe.JobResult]],
    awaited: _warpipe._Future,
    how: str,
    arguments: tuple[Any, ...],
) -> Any:
    """A step of a task that was made of what is awaited. Each task has a wait of its own."""
    if how == "close":
        for wait in waits.values():
            wait.close()
        waits.clear()
        return None
    task = asyncio.current_task()
    if task not in waits:
        waits[task] = outcome_of(awaited)
    wait = waits[task]
    try:
        return getattr(wait, how)(*arguments)
    except BaseException:
        # Over, with its result or without.
        del waits[task]
        raise


async def next_result(results: _warpipe.Results) -> _warpipe.JobResult:
    """The next of a queue's results, in the running event loop."""
    end = end_of(results._timeout)
    result: _warpipe.JobResult | bool | None
    result = await found(results._queue, results._watch, results._poll, end, _PATIENCE_SECONDS)
    if result is None:
        result = _last_of(results)
    if isinstance(result, bool):
        raise StopAsyncIteration
    return result


def _last_of(results: _warpipe.Results) -> _warpipe.JobResult | bool:
    try:
        return results._last()
    except StopIteration:
        # A coroutine cannot raise it.
        return False


class Worker(_warpipe._Worker):
    __doc__ = _warpipe._Worker.__doc__

    async def lease_async(self, timeout: float | None | EllipsisType = ...) -> _warpipe.Lease:
        """Waits for the next job in the running event loop: ``lease`` for asyncio.

        ``timeout`` is in seconds (default: the worker's; None: as long as it takes). Cancelling it loses no job.

        Raises as ``lease``.
        """
        return await next_of(self, self.try_lease, self._last, self._limit(timeout))

    def __aiter__(self) -> Worker:
        return self

    async def __anext__(self) -> _warpipe.Lease:
        """The next job; the iteration ends when the queue is shut down and its jobs are done, or closes gracefully."""
        try:
            return await self.lease_async()
        except PeerGoneError as gone:
            if gone.graceful:
                raise StopAsyncIteration from None
            raise

    async def __aenter__(self) -> Worker:
        return self

    async def __aexit__(self, *_exception: object) -> None:
        self.close()


class Server(_warpipe._Server):
    __doc__ = _warpipe._Server.__doc__

    async def accept_async(self, timeout: float | None | EllipsisType = ...) -> _warpipe.Lease:
        """Waits for the next request of any client in the running event loop: ``accept`` for asyncio.

        ``timeout`` is in seconds (default: the server's; None: as long as it takes). Cancelling it loses no request.

        Raises as ``accept``.
        """
        return await next_of(self, self.try_accept, self._last, self._limit(timeout))

    def __aiter__(self) -> Server:
        return self

    async def __anext__(self) -> _warpipe.Lease:
        """The next request, as long as the server's timeout says."""
        return await self.accept_async()

    async def __aenter__(self) -> Server:
        return self

    async def __aexit__(self, *_exception: object) -> None:
        self.close()


for _one in (Worker, Server):
    _one.__module__ = "warpipe"
