"""warpipe's channel, as a program uses it: on the framework's current stream, by DLPack.

Between two GPUs, too, a received tensor is one of the receiver's GPU; its kernels read the other's memory where it lies.
"""

from __future__ import annotations

import operator
from typing import Any

import warpipe

from .arrays import PYTORCH
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
        # `memory.torch()`, or `memory.numpy()`.
        self.of = operator.methodcaller(self.arrays.method)
        self.add_one = self.arrays.adder(count, self.kernel)

    def receive(self) -> Any:
        return self.of(self.subscriber.receive())

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
            self.add_one(theirs, self.of(out))


class LoanedToPyTorch(Loaned):
    """The same with a kernel of PyTorch's, as its user sees it."""

    name = "warpipe, loan, PyTorch's add"
    role: Role = "ours, PyTorch's add"
    kernel = PYTORCH


class Copied(_Channel):
    """The kernel writes a tensor of the framework's, and ``send`` copies all of it."""

    name = "warpipe, send"
    role: Role = "ours, copied"

    def open(self, count: int) -> None:
        super().open(count)
        self.own = self.arrays.zeros(count)

    def hand_over(self, theirs: Any) -> None:
        self.add_one(theirs, self.own)
        self.publisher.send(self.own)

    def close(self) -> None:
        super().close()
        del self.own


ON_GPUS: list[type[Contestant]] = [Loaned, LoanedToPyTorch, Copied]
ON_HOST: list[type[Contestant]] = [Loaned, Copied]
