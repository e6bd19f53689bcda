"""A ring of ranks that read each other's device memory: for ``allreduce.py``."""

import importlib
import zlib
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
from ranks import LIMIT_SECONDS, SLICE_SECONDS, Ranks

import warpipe

FLOAT_BYTES = 4


class Arrays:
    """What adds on this device: NumPy on the host, PyTorch or CuPy on a GPU, behind ``stream`` there."""

    def __init__(self, device: warpipe.Device, stream: warpipe.Stream) -> None:
        # None: the CPU waits, as NumPy adds when it is called.
        self.stream: warpipe.Stream | None = None
        self.in_place = device.kind == "host"
        self._library: Any = np
        for name in ("torch", "cupy") if device.kind == "cuda" else ():
            try:
                self._library = importlib.import_module(name)
            except ImportError:
                continue
            cuda = self._library.cuda
            if name == "torch":
                cuda.set_stream(cuda.ExternalStream(stream.ptr, device=f"cuda:{device.ordinal}"))
            else:
                cuda.Device(device.ordinal).use()
                cuda.ExternalStream(stream.ptr, device.ordinal).use()
            self.stream, self.in_place = stream, True
            break

    def __str__(self) -> str:
        return f"{self._library.__name__}{'' if self.in_place else ' on copies, as neither PyTorch nor CuPy is here'}"

    def of(self, view: warpipe.View) -> Any:
        """The memory as an array, where it lies."""
        return getattr(view, self._library.__name__)() if self.in_place else view

    def add(self, total: Any, other: Any) -> None:
        """Adds one array to another."""
        if self.in_place:
            self._library.add(total, other, out=total)
        else:
            total.copy_from(total.numpy() + other.numpy())


class Ring:
    """This rank's place in a ring: its own memory, its left neighbour's, and everybody's timeline of steps.

    All ranks count the same steps. ``steps`` of a rank says how many it has done: on a stream, or on the CPU at the end of a
    round.
    """

    def __init__(self, ranks: Ranks, members: list[int], device: warpipe.Device, nbytes: int) -> None:
        self.ranks, self.members, self.device, self.nbytes = ranks, members, device, nbytes
        self.place = members.index(ranks.rank)
        self.left = members[self.place - 1]
        self.count = max(1, nbytes // FLOAT_BYTES // len(members))
        self.stream = warpipe.Stream(device)
        self.arrays = Arrays(device, self.stream)
        # Rings of other members have other names.
        ring = zlib.crc32(repr(members).encode())
        self._prefix = f"{ranks.job}/ring-{ring:08x}"
        self.memory = warpipe.Memory.allocate(self.count * len(members) * FLOAT_BYTES, device=device)
        self.inbox = warpipe.Memory.allocate(self.memory.nbytes, device=device)
        self.published = self.memory.publish(self._name(ranks.rank, "memory"))
        self.steps = {ranks.rank: warpipe.Timeline.create(self._name(ranks.rank, "steps"), device=device)}
        self.done = 0
        self._awaited: dict[int, int] = {}
        self.ticket: warpipe.Ticket | None = None
        self.theirs: warpipe.SharedMemory | None = None
        self.parts: list[warpipe.View] = []
        self.their_parts: list[warpipe.View] = []
        self.sums: list[Any] = []
        self.their_sums: list[Any] = []

    def _name(self, rank: int, what: str) -> str:
        return f"{self._prefix}/{rank}/{what}"

    def ticket_by_name(self) -> warpipe.Ticket:
        """The left neighbour's ticket, where MPI brings none: the name alone says whose it is."""
        return warpipe.Ticket.to(self._name(self.left, "memory"))

    def open(self, ticket: warpipe.Ticket) -> None:
        """Opens the memory of the left neighbour, and the timelines of all."""
        self.ticket = ticket
        options: Any = {"device": self.device, "wait": SLICE_SECONDS}
        self.theirs = theirs = self.ranks.patiently(self.left, partial(ticket.open, **options))
        for rank in set(self.members) - {self.ranks.rank}:
            timeline = partial(warpipe.Timeline.open, self._name(rank, "steps"), **options)
            self.steps[rank] = self.ranks.patiently(rank, timeline)
        parts = [(self.count, "float32", part * self.count * FLOAT_BYTES) for part in range(len(self.members))]
        self.parts = [self.memory.view(*part) for part in parts]
        self.their_parts = [theirs.view(*part) for part in parts]
        self.sums = [self.arrays.of(part) for part in self.parts]
        self.their_sums = [self.arrays.of(part) for part in self.their_parts]

    def close(self) -> None:
        """Releases all memory, and the names."""
        for arrays in (self.sums, self.their_sums, self.parts, self.their_parts):
            arrays.clear()
        self.theirs = None
        for timeline in self.steps.values():
            timeline.close()
        self.published.close()
        self.memory.release()
        self.inbox.release()

    def fill(self, values: Any) -> None:
        """Writes this rank's input."""
        self.memory.view(values.shape, "float32").copy_from(values)

    def exchange(self) -> None:
        """Copies all of the left neighbour's memory into the inbox."""
        self._step(self.stream)
        self._after_left(self.stream)
        self.inbox.copy_from(self.theirs, stream=self.stream)
        self._step(self.stream)
        self._agree()

    def all_reduce(self, killed: Callable[[], None] | None = None) -> None:
        """Makes the memory of every rank the sum of all. Half of the steps add a part of the left neighbour's memory to
        this rank's, and the other half copy the parts that are complete. ``killed`` is called between the halves."""
        size, stream = len(self.members), self.arrays.stream
        self._step(stream)
        for step in range(2 * (size - 1)):
            if step == size - 1 and killed:
                killed()
            self._after_left(stream)
            if step < size - 1:
                part = (self.place - 1 - step) % size
                self.arrays.add(self.sums[part], self.their_sums[part])
            else:
                part = (self.place + size - 1 - step) % size
                self.parts[part].copy_from(self.their_parts[part], stream=stream)
                if stream is None:
                    self.parts[part].wait(LIMIT_SECONDS)
            self._step(stream)
        self._agree()

    def _step(self, stream: warpipe.Stream | None) -> None:
        """Counts a step, behind the work on the stream."""
        self.done += 1
        self.steps[self.ranks.rank].signal(self.done, stream=stream)

    def _after_left(self, stream: warpipe.Stream | None) -> None:
        """Lets what follows wait until the left neighbour has done as many steps as this rank."""
        self._awaited[self.left] = self.done
        if stream is None:
            self._wait(self.left, self.done)
        else:
            self.steps[self.left].wait(self.done, stream=stream)

    def _wait(self, rank: int, value: int) -> None:
        """Waits on the CPU until a rank has done ``value`` steps."""
        self.ranks.patiently(rank, lambda: self.steps[rank].wait(value, timeout=SLICE_SECONDS))

    def _agree(self) -> None:
        """Waits until every rank has found its result complete, so that it may be used, and the memory written again.

        A stream goes on when the rank that it waits for has died, so a rank first asks whether what it waited for came.
        """
        self._wait(self.ranks.rank, self.done)
        for rank, value in self._awaited.items():
            assert self.steps[rank].check(value)
        self._step(None)
        for rank in self.members:
            self._wait(rank, self.done)
