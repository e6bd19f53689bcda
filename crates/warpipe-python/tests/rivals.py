"""Contestants of the benchmark that go wrong. They are spawned, so everything here can be imported."""

import os
import threading

from warpipe.bench.arrays import Missing
from warpipe.bench.rivals import SharedMemory

SMALL, LARGE = 4096, 8192


class Liar(SharedMemory):
    """Does not do the work in one of its round trips."""

    name = "liar"
    hands = 0

    def hand_over(self, theirs):
        self.hands += 1
        if self.hands == 7 and not self.side.is_a:
            self.side.pipe.send_bytes(b"1")
        else:
            super().hand_over(theirs)


class Silent(SharedMemory):
    """Never hands over."""

    name = "silent"

    def hand_over(self, theirs):
        if not self.side.is_a:
            threading.Event().wait()
        super().hand_over(theirs)


class Mortal(SharedMemory):
    """Dies at the first size, and only there."""

    name = "mortal"

    def open(self, count):
        super().open(count)
        if count * 4 == SMALL and not self.side.is_a:
            self.memory.unlink()
            os._exit(7)


class Absent(SharedMemory):
    """Needs what is not installed."""

    name = "absent"

    def open(self, count):
        raise Missing("nothing_of_that_name cannot be imported")
