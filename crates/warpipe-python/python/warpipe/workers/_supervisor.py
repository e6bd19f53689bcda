"""The supervisor of workers: starts them from a fork server, promotes standbys, replaces what died, ends them all."""

from __future__ import annotations

import atexit
import collections
import logging
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection, wait
from types import TracebackType
from typing import Any, Self

from .. import _warpipe
from .._errors import ArgumentError, ClosedError, Error, TimeoutError
from . import _preload, _worker
from ._arguments import check, own_name
from ._reports import CODE_UNKNOWN, Death, State, WorkerInfo, WorkersFailedError, ending, not_started, preload_error

_log = logging.getLogger("warpipe.workers")
# The first delay before a process is started anew, of the second death in a row on; it doubles.
_DELAY_SECONDS, _DELAY_SECONDS_MAX = 0.1, 10.0
_NEVER = float("inf")
# How long the kernel may take to end a process that it was told to kill.
_KILL_SECONDS = 30.0
# How long the main thread may not see a signal.
_LOOK_SECONDS = 0.1
_NAME_MAX = 40
# Standing in for a place: of a process that died before it had one.
_NO_PLACE = -1


class _Process:
    """A process and what the supervisor knows of it."""

    def __init__(self, process: Any, channel: Connection, lifeline: Connection, limit: float) -> None:
        self.process = process
        self.pid: int = process.pid
        self.channel = channel
        self.lifeline = lifeline
        self.state: State = "starting"
        self.place: int | None = None
        # When it has to be ready.
        self.end = time.monotonic() + limit
        self.has_begun = self.has_returned = self.has_ended = self.is_late = False
        self.said: str | None = None
        # What it was when its channel ended: from then on only its exit code is awaited.
        self.died_as: State | None = None
        # How many deaths its own makes, in its place, within the time that counts.
        self.count = 0
        try:
            self.pidfd: int | None = os.pidfd_open(self.pid)
        except ProcessLookupError:
            self.pidfd = None

    def signal(self, number: signal.Signals) -> None:
        """By the descriptor: the number may be another process's by now."""
        if self.pidfd is not None:
            try:
                signal.pidfd_send_signal(self.pidfd, number)
            except ProcessLookupError:
                pass

    def end_fd(self) -> int:
        """Readable at the next step of its end: when it has ended, and then when its exit code is there. Without a fork
        server there is none, and that is seen at once."""
        if self.pidfd is not None and not self.has_ended:
            return self.pidfd
        sentinel: int = self.process.sentinel
        return sentinel

    def info(self) -> WorkerInfo:
        return WorkerInfo(self.pid, self.state, self.place)

    def release(self) -> int:
        """Closes everything, and gives the exit code. Call it once its sentinel is ready."""
        self.process.join()
        code: int = self.process.exitcode
        self.process.close()
        self.channel.close()
        _close_lifeline(self.lifeline)
        if self.pidfd is not None:
            os.close(self.pidfd)
        return code


class Workers:
    """Processes that do the same work: ``count`` of them work, ``standby`` are ready to take a place at once.

    ``target``: the work, a function at the top level of a module, or ``"MODULE:FUNCTION"``. It is called without an
    argument, or with the result of ``warm``. A worker has finished when it returns; one that raises, exits with another
    code than 0, or is killed has died, and a standby takes its place. ``warm``: called in each process before it is ready:
    what takes time, as opening weights, a CUDA context and a first request. ``preload``: modules that the fork server of
    this process (``multiprocessing``'s) imports, so that workers have them from their first moment. They must not use CUDA
    or start threads while they are imported. The first ``Workers`` of a process decide what its fork server has.

    ``name``: shown in ``warpipe ls`` and ``top``; by default the function's and this process's id. ``domain``: where it is
    shown. ``deaths_max``: so many deaths in one place within ``deaths_within`` seconds, and all are ended (None: no limit
    and no delay); the second and later ones are replaced with a growing delay, up to 10 s, while standbys take over
    without one. ``start_delay``: seconds from a takeover to the start of the next standby, which would slow down the process
    that takes over. ``preload_timeout``: seconds that the imports may take together; ``warm_timeout``: seconds from a
    process's start until it is ready. ``grace``: seconds from SIGTERM, which raises ``SystemExit`` in a worker, to SIGKILL
    at the end.

    It returns when the fork server runs and the first process has begun. All processes end when this object is closed, this
    process ends, or it is killed. Deaths are reported by ``logging``, as ``"warpipe.workers"``.

    Raises ``PreloadError``, ``WorkersFailedError``, ``TimeoutError``, ``ArgumentError``, ``InvalidNameError``,
    ``NameTakenError``, ``DomainError``.
    """

    __module__ = "warpipe.workers"

    def __init__(
        self,
        target: Callable[..., Any] | str,
        *,
        count: int = 1,
        standby: int = 0,
        preload: Sequence[str] = (),
        warm: Callable[[], Any] | str | None = None,
        name: str | None = None,
        domain: Any = None,
        deaths_max: int | None = 5,
        deaths_within: float = 60.0,
        start_delay: float = 0.5,
        preload_timeout: float = 300.0,
        warm_timeout: float = 300.0,
        grace: float = 5.0,
    ) -> None:
        check(target, warm, count, standby, preload, deaths_max)
        # A domain that is not there yet is made here, once, and the processes are given its path.
        found = domain if isinstance(domain, _warpipe.Domain) else _warpipe.Domain(domain)
        self._name = name if name is not None else own_name(target)
        if len(self._name) > _NAME_MAX:
            raise ArgumentError(
                f"the name {self._name!r} of workers is longer than {_NAME_MAX} bytes: choose a shorter one"
            )
        self._order = _worker.Order(target, warm, tuple(preload), self._name, str(found.path))
        self._count, self._standby = count, standby
        self._deaths_max, self._deaths_within = deaths_max, deaths_within
        self._start_delay = start_delay
        self._preload_timeout, self._warm_timeout, self._grace = preload_timeout, warm_timeout, grace
        self._owner = os.getpid()
        # All below is used under this lock, and its waiters are woken after each change.
        self._changed = threading.Condition()
        self._processes: list[_Process] = []
        self._finished: set[int] = set()
        self._deaths: collections.deque[Death] = collections.deque(maxlen=1000)
        self._deaths_of: dict[int, collections.deque[float]] = {}
        self._may_start_at = self._standby_may_start_at = 0.0
        # Starts that failed, since the last one that did not.
        self._failures = 0
        self._has_begun = self._is_closing = self._is_closed = False
        self._kill_at = _NEVER
        self._failure: Error | None = None
        self._member = _warpipe.Member.join(self._name, "supervisor", domain=found)
        # Removes the files that dead workers leave in the domain.
        self._members = _warpipe.Members.watch(found, on=_nothing)
        self._bell = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        threads = [(self._watch, "watch"), (self._start_missing, "start")]
        self._threads = [
            threading.Thread(target=run, name=f"{self._name}-{what}", daemon=True) for run, what in threads
        ]
        atexit.register(self.close)
        for thread in self._threads:
            thread.start()
        try:
            self._until(lambda: self._has_begun, None, "a first process")
        except BaseException:
            self.close()
            raise

    @property
    def name(self) -> str:
        """The name that they are shown under."""
        return self._name

    @property
    def closed(self) -> bool:
        """Whether all processes have ended for good."""
        return self._is_closed or self._owner != os.getpid()

    @property
    def processes(self) -> list[WorkerInfo]:
        """The processes now: those that work first, by their places."""
        with self._changed:
            found = [process.info() for process in self._processes]
        return sorted(found, key=lambda info: (info.place is None, info.place, info.pid))

    @property
    def deaths(self) -> list[Death]:
        """The last thousand deaths, the oldest first."""
        with self._changed:
            return list(self._deaths)

    def wait_until_ready(self, timeout: float | None = 10.0) -> None:
        """Waits until every place that is not finished has a worker, and every standby is ready, at most ``timeout`` seconds
        (None: no limit).

        Raises ``TimeoutError``, ``WorkersFailedError``, ``ClosedError``.
        """

        def is_ready() -> bool:
            states = [process.state for process in self._processes]
            places = self._count - len(self._finished)
            return states.count("working") == places and (places == 0 or states.count("standby") == self._standby)

        self._until(is_ready, timeout, "the workers")

    def wait(self, timeout: float | None = None) -> None:
        """Waits until the work of all ``count`` places has returned, at most ``timeout`` seconds (None: no limit).

        Raises ``TimeoutError``, ``WorkersFailedError``, ``ClosedError``.
        """
        self._until(lambda: len(self._finished) == self._count, timeout, "the end of the work")

    def close(self) -> None:
        """Ends all processes: SIGTERM, and after ``grace`` seconds SIGKILL. Closing twice is no error."""
        if self._owner != os.getpid():
            return
        with self._changed:
            if self._is_closed:
                return
            if not self._is_closing:
                self._end_all()
            self._ring()
        watch, start = self._threads
        watch.join(self._grace + _KILL_SECONDS)
        # It may be held up by the imports of a fork server; what comes of that ends at once.
        start.join(0.5)
        with self._changed:
            if not self._is_closed and not watch.is_alive() and not start.is_alive():
                os.close(self._bell)
            self._is_closed = True
        self._members.close()
        self._member.close()
        atexit.unregister(self.close)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        self.close()
        if kind is None and self._failure is not None:
            raise self._failure

    def __repr__(self) -> str:
        return f"Workers({self._name!r}, count={self._count}, standby={self._standby})"

    def _until(self, is_so: Callable[[], bool], timeout: float | None, what: str) -> None:
        if self._owner != os.getpid():
            raise ClosedError("these Workers belong to another process, which forked this one: use them there")

        def is_over() -> bool:
            return self._failure is not None or self._is_closing or is_so()

        end = _NEVER if timeout is None else time.monotonic() + timeout
        with self._changed:
            while not is_over():
                left = end - time.monotonic()
                if left <= 0:
                    raise TimeoutError(
                        f"{what} of {self._name!r} did not come within {timeout} s: see Workers.deaths, or wait longer"
                    )
                # A signal that comes right before the interpreter blocks in a lock wakes nobody up.
                self._changed.wait(min(left, _LOOK_SECONDS))
            if self._failure is not None:
                raise self._failure
            if not is_so():
                raise ClosedError(f"the Workers {self._name!r} are closed")

    def _ring(self) -> None:
        os.eventfd_write(self._bell, 1)

    # The thread that starts processes. A fork server that imports, or has stopped, holds up this thread alone.

    def _start_missing(self) -> None:
        while True:
            with self._changed:
                while not self._is_closing and (delay := self._start_in()) > 0:
                    self._changed.wait(delay if delay < _NEVER else None)
                if self._is_closing:
                    return
            try:
                process = self._start()
            except Exception as error:
                with self._changed:
                    self._count_failure(error)
                self._ring()
                continue
            with self._changed:
                self._failures = 0
                if not self._is_closing:
                    self._processes.append(process)
                    self._ring()
                    continue
            # The other thread may have ended.
            process.signal(signal.SIGKILL)
            process.release()
            return

    def _count_failure(self, error: Exception) -> None:
        """A start that failed is tried again, but for the first one: no descriptor, no memory, no fork server."""
        self._failures += 1
        if not self._has_begun or (self._deaths_max is not None and self._failures >= self._deaths_max):
            self._fail(not_started(error, self._has_begun))
            return
        _log.warning("no process could be started: %s: %s: it is tried again", type(error).__name__, error)
        self._may_start_at = max(self._may_start_at, time.monotonic() + _delay(self._failures + 1))

    def _start_in(self) -> float:
        """Seconds until a process has to be started; ``_NEVER`` as long as none is missing."""
        # The place of a process that has said that its work returned is not taken again, though its code is still to come.
        returned = {process.place for process in self._processes if process.has_returned} - {None}
        places = self._count - len(self._finished | returned)
        living = sum(process.died_as is None and not process.has_returned for process in self._processes)
        if living >= (places + self._standby if places else 0):
            return _NEVER
        start_at = self._may_start_at if living < places else max(self._may_start_at, self._standby_may_start_at)
        return start_at - time.monotonic()

    def _start(self) -> _Process:
        context = multiprocessing.get_context("forkserver")
        ours, theirs = context.Pipe()
        their_lifeline, our_lifeline = context.Pipe(duplex=False)
        _open_lifelines.add(our_lifeline)
        try:
            arguments = (self._order, theirs, their_lifeline)
            process = context.Process(target=_worker.run, args=arguments, name=self._name)
            with _starting_one:
                context.set_forkserver_preload([_preload.__name__])
                os.environ[_preload.VARIABLE] = _preload.order(list(self._order.preload), self._preload_timeout)
                try:
                    process.start()
                finally:
                    os.environ.pop(_preload.VARIABLE, None)
        except BaseException:
            ours.close()
            _close_lifeline(our_lifeline)
            raise
        finally:
            theirs.close()
            their_lifeline.close()
        # `multiprocessing` looks at all processes that it knows whenever one is started. If two threads ask for one exit code,
        # one of them reads it and the other finds none.
        multiprocessing.process._children.discard(process)  # type: ignore[attr-defined]
        return _Process(process, ours, our_lifeline, self._warm_timeout)

    # The thread that watches them. Nothing that it does waits for a process.

    def _watch(self) -> None:
        try:
            self._watch_all()
        except BaseException as error:
            # A fault of this module: nothing is left that nothing watches.
            with self._changed:
                self._fail(not_started(error, True))
                for process in self._processes:
                    process.signal(signal.SIGKILL)
            raise

    def _watch_all(self) -> None:
        while True:
            with self._changed:
                living = {process.channel: process for process in self._processes if process.died_as is None}
                # A child of it that a library forked keeps its channel open.
                ending = {process.pidfd: process for process in living.values() if process.pidfd is not None}
                dying = {process.end_fd(): process for process in self._processes if process.died_as is not None}
                if self._is_closing and not self._processes:
                    return
                patience = self._patience()
            for ready in wait([self._bell, *living, *ending, *dying], patience):
                if ready == self._bell:
                    os.eventfd_read(self._bell)
                    continue
                with self._changed:
                    if ready in dying and ready == dying[ready].pidfd:
                        dying[ready].has_ended = True
                    elif ready in dying:
                        self._bury(dying[ready])
                    elif ready in ending:
                        self._listen_to_the_end(ending[ready])
                    else:
                        self._listen(living[ready])  # type: ignore[index]
                    self._promote()
                    self._changed.notify_all()
            with self._changed:
                self._end_late_ones()

    def _patience(self) -> float | None:
        ends = [process.end for process in self._processes if process.state == "starting" and not process.is_late]
        end = min([*ends, self._kill_at])
        return None if end == _NEVER else max(0.0, end - time.monotonic())

    def _listen(self, process: _Process) -> None:
        """Takes what a process says. The end of its channel is seen before its exit code, while the kernel still closes its
        files: its place is free from here on, and it is killed if it only closed the channel."""
        try:
            what, said = process.channel.recv()
        except (EOFError, OSError):
            self._lose(process)
            return
        if what == "began" and said:
            error = preload_error(said)
            if not self._has_begun:
                self._fail(error)
            # A new fork server's: those that the last one has made go on.
            process.said = f"found that {error}"
            process.signal(signal.SIGKILL)
        elif what == "began":
            process.has_begun = self._has_begun = True
        elif what == "ready":
            process.state = "standby"
        elif what == "raised":
            process.said = f"raised {said}"
        elif what == "returned":
            process.has_returned = True

    def _listen_to_the_end(self, process: _Process) -> None:
        """Takes what is left of what a process has said that has ended."""
        while process.died_as is None and process.channel.poll():
            self._listen(process)
        self._lose(process)

    def _lose(self, process: _Process) -> None:
        if process.died_as is not None:
            return
        process.signal(signal.SIGKILL)
        process.died_as, process.state = process.state, "ending"
        if not (process.has_returned and process.place is not None):
            self._count_death(process)

    def _promote(self) -> None:
        """Gives free places to standbys, the longest ready first."""
        if self._is_closing:
            return
        working = {process.place for process in self._processes if process.died_as is None}
        # A process that has said that its work returned is not replaced.
        working |= {process.place for process in self._processes if process.has_returned}
        for place in range(self._count):
            standby = next((process for process in self._processes if process.state == "standby"), None)
            if place in working or place in self._finished or standby is None:
                continue
            standby.state, standby.place = "working", place
            if place in self._deaths_of:
                self._standby_may_start_at = time.monotonic() + self._start_delay
            try:
                standby.channel.send(place)
            except OSError:
                # Its end is seen on the channel next, as the end of a worker in this place.
                pass

    def _count_death(self, process: _Process) -> None:
        """Delays the next start from the second death in a row on. One too many prevents it: when its exit code is there, all
        are ended."""
        now = time.monotonic()
        recent = self._deaths_of.setdefault(_NO_PLACE if process.place is None else process.place, collections.deque())
        recent.append(now)
        while recent[0] < now - self._deaths_within:
            recent.popleft()
        process.count = len(recent)
        if self._deaths_max is None or process.count == 1:
            return
        self._may_start_at = max(
            self._may_start_at, _NEVER if self._is_too_often(process) else now + _delay(process.count)
        )

    def _is_too_often(self, process: _Process) -> bool:
        """Whether this death ends all. Standbys that cannot be started are no reason to end workers that work."""
        others_work = process.place is None and any(one.state == "working" for one in self._processes)
        return self._deaths_max is not None and process.count >= self._deaths_max and not others_work

    def _bury(self, process: _Process) -> None:
        """The process has ended, and its exit code is there."""
        is_too_often = self._is_too_often(process)
        code = process.release()
        self._processes.remove(process)
        if process.has_returned and process.place is not None:
            self._finished.add(process.place)
            if code != 0:
                _log.warning(
                    "worker %s of %s (process %d) had finished, then %s",
                    process.place,
                    self._name,
                    process.pid,
                    ending(code),
                )
            if len(self._finished) == self._count:
                self._end_all()
        elif not self._is_closing:
            state, known = process.died_as or "ending", code if code != CODE_UNKNOWN else None
            death = Death(process.pid, process.place, state, known, _reason(process, code), process.count)
            self._deaths.append(death)
            _log.warning("%s", self._told(death))
            if is_too_often:
                self._fail(self._too_often(death))
            elif self._may_start_at == _NEVER:
                # The workers that stood against it have ended meanwhile, or begun.
                self._may_start_at = time.monotonic() + _DELAY_SECONDS_MAX

    def _told(self, death: Death) -> str:
        what = "a standby" if death.place is None else f"worker {death.place}"
        within = f"death {death.times} within {self._deaths_within:g} s"
        limit = "" if self._deaths_max is None else f", all are ended at {self._deaths_max}"
        if self._deaths_max is not None and death.times >= self._deaths_max and death.place is None:
            limit += " unless others work: the workers go on, and it is tried again"
        return f"{what} of {self._name} (process {death.pid}) {death.reason}: {within}{limit}"

    def _too_often(self, death: Death) -> WorkersFailedError:
        place = "before it had a place" if death.place is None else f"in place {death.place}"
        error = WorkersFailedError(
            f"workers of {self._name!r} died {death.times} times within {self._deaths_within:g} s {place}, and all have been "
            f"ended; the last one {death.reason}. Mend that (its own words are on the standard error stream), or raise deaths_max"
        )
        error.deaths = [known for known in self._deaths if known.place == death.place][-death.times :]
        return error

    def _fail(self, error: Error) -> None:
        if self._failure is None and not self._is_closing:
            self._failure = error
            _log.error("%s", error)
            self._end_all()

    def _end_all(self) -> None:
        self._is_closing = True
        self._kill_at = time.monotonic() + self._grace
        for process in self._processes:
            # A process that has not begun has no handler for it yet.
            process.signal(signal.SIGTERM if process.has_begun else signal.SIGKILL)
        self._changed.notify_all()

    def _end_late_ones(self) -> None:
        now = time.monotonic()
        for process in self._processes:
            if process.state == "starting" and now >= process.end and not process.is_late:
                process.is_late = True
                process.signal(signal.SIGKILL)
        if now >= self._kill_at:
            self._kill_at = _NEVER
            for process in self._processes:
                process.signal(signal.SIGKILL)


# One at a time: the order of a fork server goes by the environment.
_starting_one = threading.Lock()
# The ends of lifelines that processes of this supervisor hang on: a forked child of it must not keep them alive.
_open_lifelines: set[Connection] = set()


def _close_lifeline(lifeline: Connection) -> None:
    _open_lifelines.discard(lifeline)
    lifeline.close()


def _close_lifelines_of_parent() -> None:
    for lifeline in _open_lifelines:
        lifeline.close()
    _open_lifelines.clear()


os.register_at_fork(after_in_child=_close_lifelines_of_parent)


def _nothing(_change: object) -> None:
    pass


def _delay(deaths: int) -> float:
    """Seconds until a process is started after so many deaths in a row."""
    return min(_DELAY_SECONDS * 2.0 ** min(deaths - 2, 32), _DELAY_SECONDS_MAX)


def _reason(process: _Process, code: int) -> str:
    if process.is_late:
        return "was not ready within warm_timeout, and was killed"
    if process.said is not None:
        return process.said
    if not process.has_begun:
        return f"{ending(code)} before it had begun: its program could not be imported there (is it under `if __name__ == '__main__':`?)"
    doing = {"starting": "while it warmed up", "standby": "as a standby"}.get(process.died_as or "", "while it worked")
    return f"{ending(code)} {doing}"
