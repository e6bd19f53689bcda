"""Which ranks of an MPI job live, and how a rank's death is kept from MPI's launcher: for ``allreduce.py``."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from typing import TypeVar

import warpipe

LIMIT_SECONDS = 60.0
# How long a wait for another rank lasts before it asks whether a rank has died.
SLICE_SECONDS = 0.1
# The environment variable with the descriptor on which a child tells `Keeper` how its death is to be taken.
NOTICE = "MPI_EXAMPLE_NOTICE_FD"

T = TypeVar("T")


class RankLost(Exception):
    """A rank has died, or has left."""


class Ranks:
    """The ranks of this job as members of warpipe's domain: each is seen to live, to be stopped, to leave or to die."""

    def __init__(self, job: str, rank: int, size: int) -> None:
        self.job, self.rank, self.size = job, rank, size
        self.lost: dict[int, str] = {}
        self._member = warpipe.Member.join(self._prefix + str(rank), "MPI rank")
        self._watch = warpipe.Members.watch()

    @property
    def _prefix(self) -> str:
        return f"{self.job}/rank-"

    def say(self, text: str) -> None:
        # In one piece: the launcher mixes what the ranks write.
        print(f"rank {self.rank}: {text}\n", end="", flush=True)

    def look(self, timeout: float = 0.0) -> None:
        """Takes in what has happened to the other ranks, waiting up to ``timeout`` seconds for it.

        Raises ``RankLost`` for a death.
        """
        while change := self._watch.changes(timeout):
            timeout = 0.0
            if not change.member.name.startswith(self._prefix):
                continue
            rank, what = int(change.member.name.removeprefix(self._prefix)), change.what
            if what in ("died", "left"):
                self.lost[rank] = what
            if what in ("died", "stalled", "recovered"):
                self.say(f"rank {rank} (pid {change.member.pid}) has {what}")
            if what == "died":
                raise RankLost(rank)

    def patiently(self, rank: int, attempt: Callable[[], T]) -> T:
        """Repeats a short wait for ``rank`` until it succeeds, or a rank dies, or that one has left."""
        end = time.monotonic() + LIMIT_SECONDS
        while True:
            try:
                return attempt()
            except (warpipe.TimeoutError, warpipe.NotFoundError):
                if time.monotonic() > end:
                    raise
            self.look()
            if rank in self.lost:
                raise RankLost(rank)

    def until(self, condition: Callable[[], bool], what: str) -> None:
        """Takes in what happens to the other ranks until the condition holds."""
        end = time.monotonic() + LIMIT_SECONDS
        while not condition():
            assert time.monotonic() < end, what
            with contextlib.suppress(RankLost):
                self.look(SLICE_SECONDS / 10)

    def await_loss(self, members: list[int]) -> None:
        """Waits until the loss is known that has made a ring of these members fail."""
        self.until(lambda: any(rank in self.lost for rank in members), "a ring fails only with a rank")

    def close(self) -> None:
        """Leaves, for the others to see."""
        self._watch.close()
        self._member.close()


class Keeper:
    """A process that starts the rank as its child, and keeps the child's death from MPICH's launcher.

    The launcher kills all ranks when one is killed by a signal. ``-disable-auto-cleanup`` does not prevent that; with it
    the launcher only sends SIGUSR1 when a rank *exits* early. So this process exits when the child has been killed. Until
    the child has said ``survivable``, the others may wait for it within MPI for ever: then this process dies as it did.
    """

    @staticmethod
    def run() -> int:
        """Runs this program as a child; gives the exit code."""
        signal.signal(signal.SIGUSR1, signal.SIG_IGN)
        reader, writer = os.pipe()
        os.set_inheritable(writer, True)
        # The launcher's socket goes to the child, too.
        child = subprocess.Popen([sys.executable, *sys.argv], close_fds=False, env={**os.environ, NOTICE: str(writer)})
        os.close(writer)
        code = child.wait()
        with open(reader, "rb") as notices:
            said = notices.read()
        if code < 0 and b"survivable" not in said:
            if code != -signal.SIGKILL:
                signal.signal(-code, signal.SIG_DFL)
            os.kill(os.getpid(), -code)
        return code if code >= 0 else 0 if b"killed" in said else 128 - code

    @staticmethod
    def is_here() -> bool:
        """Whether this process is such a child."""
        return NOTICE in os.environ

    @staticmethod
    def tell(notice: str) -> None:
        """Says in the child how its death is to be taken from now on."""
        os.write(int(os.environ[NOTICE]), notice.encode() + b"\n")
