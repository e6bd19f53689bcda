"""Sleeping in an event loop's own poller."""

from __future__ import annotations

import asyncio

# A look without having been woken: a publisher that comes back, or memory that is still being mapped, may not ring.
LOOK_SECONDS = 0.1


async def readable(descriptor: int, seconds: float) -> None:
    """Returns when the descriptor is readable, or the time is over."""
    loop = asyncio.get_running_loop()
    ready = loop.create_future()

    def settle() -> None:
        if not ready.done():
            ready.set_result(None)

    loop.add_reader(descriptor, settle)
    timer = loop.call_later(seconds, settle)
    try:
        await ready
    finally:
        timer.cancel()
        loop.remove_reader(descriptor)
