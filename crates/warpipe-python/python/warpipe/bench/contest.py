"""What a contestant is: one of two processes that hand tensors to each other."""

from __future__ import annotations

from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any, Literal

from .arrays import DIRECT, ELEMENT_BYTES, HEAD, NUMPY, Arrays, Kernel

# "ours" is compared with "usual"; the rest is measured beside.
Role = Literal["ours", "ours, PyTorch's add", "ours, copied", "usual", "usual, PyTorch's add", "other"]


@dataclass
class Side:
    """One of the two processes, and what joins it to the other. ``A`` begins."""

    is_a: bool
    device: str
    other_device: str
    domain: str
    # Seconds that a single wait may take.
    limit: float
    pipe: Connection
    inbox: Any
    outbox: Any

    @property
    def crosses(self) -> bool:
        """Whether the two work on different GPUs."""
        return self.device != self.other_device

    def hear(self) -> Any:
        """The other's next message, outside of what is measured."""
        if not self.pipe.poll(self.limit):
            raise TimeoutError(f"the other process said nothing for {self.limit} s")
        return self.pipe.recv()

    def meet(self) -> None:
        """Returns when the other has come here, too."""
        self.pipe.send("here")
        self.hear()


class Contestant:
    """A way to hand a tensor over and back. One object in each of the two processes, for one size at a time.

    Waits within a round trip may be endless: ``pair`` ends a hung pair, and no contestant pays for a timer.
    """

    name: str
    role: Role = "other"
    # Which kernel it runs on a GPU; on the host that is NumPy's.
    kernel: Kernel = DIRECT
    # Whether a kernel here needs a copy of a tensor that lies on another GPU.
    fetches = False
    # Bytes of the largest tensor that it is asked to carry, and why.
    bytes_max: int | None = None
    bytes_max_reason = ""

    def __init__(self, side: Side, arrays: Arrays) -> None:
        self.side = side
        self.arrays = arrays

    @classmethod
    def kernel_between(cls, device: str, other_device: str) -> str:
        """What it runs, for the report."""
        if device == "host":
            return NUMPY
        return f"copy_, {cls.kernel}" if cls.fetches and device != other_device else cls.kernel

    def open(self, count: int) -> None:
        """Makes ready for tensors of ``count`` float32."""
        raise NotImplementedError

    def hand_over(self, theirs: Any) -> None:
        """Writes ``theirs`` plus one into the head of a tensor of this process's, and hands that to the other."""
        raise NotImplementedError

    def receive(self) -> Any:
        """The other's next tensor, its head ready for this process's stream."""
        raise NotImplementedError

    def close(self) -> None:
        """Gives back what ``open`` and the round trips took."""
        raise NotImplementedError


def check(found: list[float], wanted: int, contestant: str) -> None:
    """That the other's kernel worked on what this process's wrote, all the way."""
    wrong = [value for value in found if value != wanted]
    if len(found) != HEAD or wrong:
        said = f"{len(wrong)} of {len(found)} elements are wrong, the first is {wrong[0] if wrong else None}"
        raise ValueError(f"{contestant} received wrong data: {said}, and should be {wanted}")


def elements(size: int) -> int:
    """Of a tensor of ``size`` bytes."""
    return size // ELEMENT_BYTES
