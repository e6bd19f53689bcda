"""warpipe's channel, as a program uses it: on the framework's current stream, by DLPack."""

from __future__ import annotations

from typing import Any

import warpipe

from .arrays import Missing, Torch
from .contest import Contestant, Role

# Round trips that may be enqueued ahead of the device; large tensors each have memory of their own.
DEPTH = 8
DEPTH_LARGE = 2
LARGE_ELEMENTS = 64 << 20
# A subscriber that polls: the round trip's cost is asked for, not that of a sleep.
SPIN_SECONDS = {"host": 20e-6, "cuda": 5e-3}


class _Channel(Contestant):
    def open(self, count: int) -> None:
        side = self.side
        device = warpipe.Device(side.device)
        depth = DEPTH if count < LARGE_ELEMENTS else DEPTH_LARGE
        mine, other = ("bench/ping", "bench/pong") if side.is_a else ("bench/pong", "bench/ping")
        self.publisher = warpipe.Publisher(
            mine,
            domain=side.domain,
            device=device,
            depth=depth,
            memory_limit=max(64 << 20, count * 4 * (depth + 2)),
            timeout=side.limit,
            loan_timeout=side.limit,
        )
        side.meet()
        self.subscriber = warpipe.Subscriber(
            other, domain=side.domain, device=device, timeout=side.limit, spin=SPIN_SECONDS[device.kind]
        )
        self.publisher.wait_for_subscribers(1, side.limit)
        self.shape = (count,)
        self.head = self.arrays.head(count)
        self.of = self.arrays.of
        self.add_one = self.arrays.adder(False)

    def receive(self) -> Any:
        return self.head(self.of(self.subscriber.receive()))

    def close(self) -> None:
        self.side.meet()
        self.subscriber.close()
        self.publisher.close()
        # Both names are free again.
        self.side.meet()


class Loaned(_Channel):
    """The kernel writes where the other reads."""

    name = "warpipe, loan"
    role: Role = "ours"

    def hand_over(self, theirs: Any) -> None:
        with self.publisher.loan(self.shape, "float32") as out:
            self.add_one(theirs, self.head(self.of(out)))


class LoanedByCapsule(Loaned):
    """The same for a program that knows its stream and imports the capsules itself."""

    name = "warpipe, loan by capsule"
    role: Role = "ours, by hand"

    def open(self, count: int) -> None:
        if not isinstance(self.arrays, Torch):
            raise Missing("NumPy imports no bare capsules")
        super().open(count)
        self.of = self.arrays.of_capsule


class Copied(_Channel):
    """The kernel writes a tensor of the framework's, and ``send`` copies all of it."""

    name = "warpipe, send"
    role: Role = "ours, copied"

    def open(self, count: int) -> None:
        super().open(count)
        self.tensor = self.arrays.zeros(count)
        self.own = self.head(self.tensor)

    def hand_over(self, theirs: Any) -> None:
        self.add_one(theirs, self.own)
        self.publisher.send(self.tensor)

    def close(self) -> None:
        super().close()
        del self.tensor, self.own


ON_GPUS: list[type[Contestant]] = [Loaned, LoanedByCapsule, Copied]
ON_HOST: list[type[Contestant]] = [Loaned, Copied]
