"""Shares that their receiver has not opened yet, and the rules by which they are taken back.

1. A share that was pickled as an argument of a new process is that process's. It is withdrawn when the process is dead.
2. A share that a queue's feeder thread pickled, or that was written to a pipe, is read before all that comes later there.
   Once a later one was opened, or no process can read from the pipe any more, a reader has it or nobody will: the reader
   opens it within moments, or is dead. It is withdrawn ``GRACE_SECONDS`` after that. A reader that is stopped as long gets
   an error, and no wrong memory.

A message that no process has read yet keeps its tensors otherwise, as that of any queue: another reader may come.
"""

from __future__ import annotations

import multiprocessing.connection
import select
import threading
import time
import weakref
from multiprocessing.connection import Connection
from multiprocessing.context import get_spawning_popen
from typing import Any, TypeAlias

from ._errors import ClosedError

GRACE_SECONDS = 60.0
_LOOK_SECONDS = (0.05, 1.0)
_FEEDER = "QueueFeederThread"


# What is read in the order in which it was written: the thread of a queue, or a pipe.
Fifo: TypeAlias = "threading.Thread | weakref.ref[Connection]"


class Waiting:
    """A share that waits for its receiver."""

    __slots__ = ("fifo", "is_forgotten", "number", "overtaken", "pipe", "popen", "server")

    def __init__(self, server: Any, number: int, popen: Any, fifo: Fifo | None, pipe: Connection | None = None) -> None:
        self.server, self.number, self.popen, self.fifo = server, number, popen, fifo
        self.pipe = None if pipe is None else weakref.ref(pipe)
        self.overtaken: float | None = None
        self.is_forgotten = False


class Unclaimed:
    """A thread looks at the shares while there are any. It is a daemon: it keeps no process from ending."""

    def __init__(self) -> None:
        # A collection of garbage inside may run a finalizer that sends something.
        self.lock = threading.RLock()
        self.waiting: list[Waiting] = []
        self.is_followed = False

    def note(self, server: Any, number: int, pipe: Connection | None) -> None:
        """A share of this thread's pickling, and the pipe that it is written to, where that is known."""
        popen, thread = get_spawning_popen(), threading.current_thread()
        # The objects, as the next ones may have the numbers of those that have ended.
        fifo: Fifo | None = None
        if thread.name == _FEEDER:
            fifo = thread
        elif pipe is not None:
            fifo = weakref.ref(pipe)
        if popen is None and fifo is None:
            return
        with self.lock:
            self.waiting.append(Waiting(server, number, popen, fifo, pipe))
            begins, self.is_followed = not self.is_followed, True
        if begins:
            try:
                threading.Thread(target=self._follow, name="warpipe-unclaimed", daemon=True).start()
            except RuntimeError:
                # The interpreter ends, or there are too many threads. The message goes all the same; the next one
                # tries again.
                self._ends_following()
            except BaseException:
                # An interrupt. A thread that has begun all the same ends by itself.
                self._ends_following()
                raise

    def forget(self, server: Any, number: int) -> None:
        """The share was not sent. Called before it is withdrawn, which shows nothing of a reader then."""
        with self.lock:
            for one in self.waiting:
                one.is_forgotten |= (one.server, one.number) == (server, number)
            self.waiting = [one for one in self.waiting if not one.is_forgotten]

    def pipe_ends(self, pipe: Connection) -> None:
        """Called before this process closes a pipe: afterwards nothing shows whether another one can read from it."""
        with self.lock:
            written = [one for one in self.waiting if one.pipe is not None and one.pipe() is pipe]
        if written and _has_no_reader(pipe):
            now = time.monotonic()
            for one in written:
                one.overtaken = now if one.overtaken is None else one.overtaken

    def _ends_following(self) -> None:
        with self.lock:
            self.is_followed = False

    def _follow(self) -> None:
        pause = threading.Event()
        shortest, longest = _LOOK_SECONDS
        seconds = shortest
        try:
            while True:
                pause.wait(seconds)
                self.look(time.monotonic())
                with self.lock:
                    if not self.waiting:
                        self.is_followed = False
                        return
                seconds = min(2 * seconds, longest)
        except BaseException:
            # The next share has another thread look.
            self._ends_following()
            raise

    def look(self, now: float) -> None:
        """Withdraws the shares with a dead receiver, by the rules above."""
        with self.lock:
            waiting = list(self.waiting)
        over: set[Waiting] = set()
        # From the newest on: a later share of the same queue that was opened comes first.
        read: set[int] = set()
        for one in reversed(waiting):
            if not _waits(one):
                over.add(one)
                if one.fifo is not None and not one.is_forgotten:
                    read.add(id(one.fifo))
            elif self._is_lost(one, id(one.fifo) in read, now):
                # A reader that waits for the contents has it: what it says comes first.
                if _is_withdrawn(one):
                    over.add(one)
        with self.lock:
            self.waiting = [one for one in self.waiting if one not in over]

    def _is_lost(self, one: Waiting, is_read: bool, now: float) -> bool:
        if one.popen is not None:
            return _is_dead(one.popen)
        is_read = is_read or one.pipe is not None and _has_no_reader(one.pipe())
        if is_read and one.overtaken is None:
            one.overtaken = now
        return one.overtaken is not None and now - one.overtaken >= GRACE_SECONDS


def _waits(one: Waiting) -> bool:
    """Whether nobody has it for good: a reader may give it back until its contents are complete."""
    try:
        return one.server.is_opened(one.number) is False
    except ClosedError:
        # This process ends.
        return False


def _is_withdrawn(one: Waiting) -> bool:
    try:
        return bool(one.server.withdraw(one.number))
    except ClosedError:
        return True


def _has_no_reader(pipe: Connection | None) -> bool:
    """Whether the other end of a pipe is open in no process."""
    if pipe is None or pipe.closed:
        # What was written may still be read.
        return False
    poll = select.poll()
    try:
        poll.register(pipe.fileno(), 0)
        found = poll.poll(0)
    except (OSError, ValueError):
        return False
    # A thread may have closed it meanwhile, and another one have opened something else.
    return bool(found) and not pipe.closed


def _is_dead(popen: Any) -> bool:
    """Whether a process of ``multiprocessing`` is dead, or never began."""
    if getattr(popen, "returncode", None) is not None:
        return True
    # It has no process until it is written; the finalizer comes after that, also if it fails.
    finalizer = getattr(popen, "finalizer", None)
    if finalizer is None:
        return False
    sentinel = getattr(popen, "sentinel", None)
    if sentinel is None or not finalizer.still_active():
        return True
    try:
        return bool(multiprocessing.connection.wait([sentinel], 0))
    except OSError:
        return True
