"""Callbacks of futures: one thread for all of them, which sleeps on the queues' descriptors."""

from __future__ import annotations

import logging
import os
import select
import threading
import time
import weakref
from collections.abc import Callable
from concurrent.futures import CancelledError
from typing import Any, TypeAlias

from . import _warpipe
from ._errors import Error
from ._queue import outcome_of, step

_Future: TypeAlias = _warpipe._Future
_Callback: TypeAlias = Callable[[Any], object]

# Every change rings: this is for what no ring tells.
_PATIENCE_SECONDS = 1.0

_log = logging.getLogger("warpipe")


class _Callbacks:
    """The callbacks of futures that are not done. The thread ends when there are none."""

    def __init__(self) -> None:
        self._process = os.getpid()
        # A signal handler may come in while its own thread holds it.
        self._lock = threading.RLock()
        self._waiting: dict[_Future, list[_Callback]] = {}
        self._thread: threading.Thread | None = None
        self._wake = -1

    def add(self, future: _Future, callback: _Callback) -> None:
        with self._lock:
            if not future.done():
                # First: a callback is not entered that no thread will call.
                self._rouse()
                self._waiting.setdefault(future, []).append(callback)
                return
        # Those that were added before it come before it.
        self.run(future)
        self._call(future, [callback])

    def run(self, future: _Future) -> None:
        """Runs the callbacks of a future that is done, in the order in which they were added."""
        with self._lock:
            callbacks = self._waiting.pop(future, [])
        self._call(future, callbacks)

    def _call(self, future: _Future, callbacks: list[_Callback]) -> None:
        # A callback may fork: the others are its parent's.
        while callbacks and self._is_here():
            if not _warpipe._run(lambda: self._call_first(future, callbacks)):
                # The program ends, and waits for none that has not begun.
                return

    def _call_first(self, future: _Future, callbacks: list[_Callback]) -> bool:
        callback = callbacks.pop(0)
        try:
            callback(future)
        except Exception:
            _log.exception("a callback of %r raised", future)
        except BaseException:
            # Ctrl-C, or an exit, ends what this thread does. The thread of callbacks has the rest.
            if callbacks and self._is_here():
                with self._lock:
                    self._waiting[future] = callbacks + self._waiting.get(future, [])
                    self._rouse()
            raise
        return True

    def _is_here(self) -> bool:
        return self._process == os.getpid()

    def _rouse(self) -> None:
        if self._thread is not None and self._thread.is_alive():
            os.eventfd_write(self._wake, 1)
            return
        wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        thread = threading.Thread(target=self._work, args=(wake,), name="warpipe-callbacks", daemon=True)
        try:
            thread.start()
        except BaseException:
            os.close(wake)
            raise
        self._thread, self._wake = thread, wake

    def _work(self, wake: int) -> None:
        poller = select.poll()
        poller.register(wake, select.POLLIN)
        watches: dict[int, _warpipe._Watch] = {}
        while self._step(poller, watches):
            for descriptor, _ in poller.poll(self._patience() * 1000):
                if descriptor == wake:
                    os.eventfd_read(wake)
                for watch in watches.values():
                    if watch.fileno() == descriptor:
                        watch.quiet()
        os.close(wake)

    def _patience(self) -> float:
        with self._lock:
            deadlines = [future.deadline_ns for future in self._waiting if isinstance(future, _warpipe.Pending)]
        left = (min(deadlines) - time.monotonic_ns()) / 1e9 if deadlines else _PATIENCE_SECONDS
        return max(0.001, min(left, _PATIENCE_SECONDS))

    def _step(self, poller: select.poll, watches: dict[int, _warpipe._Watch]) -> bool:
        """Runs what is due, behind the descriptors that ring for the rest; False when none is left."""
        if not self._is_here():
            return False
        with self._lock:
            futures = list(self._waiting)
            if not futures:
                self._thread, self._wake = None, -1
                return False
        numbers = {future._queue for future in futures}
        for number in watches.keys() - numbers:
            poller.unregister(watches.pop(number).fileno())
        for future in futures:
            if future._queue not in watches:
                try:
                    watch = future._watch()
                except Error:
                    # Its queue is closed, so it is done.
                    continue
                watches[future._queue] = watch
                poller.register(watch.fileno(), select.POLLIN)
        for future in futures:
            if self._is_here() and future.done():
                try:
                    self.run(future)
                except BaseException:
                    _log.exception("a callback of %r raised", future)
        return self._is_here()


_callbacks = _Callbacks()


def _reset() -> None:
    # The child has no such thread. What the parent waits for stays with it, untouched.
    global _callbacks, _waited, _waited_lock
    _inherited.append((_callbacks, _waited, _waited_lock))
    _callbacks = _Callbacks()
    # Another thread of the parent may have held the lock at the fork.
    _waited, _waited_lock = weakref.WeakKeyDictionary(), threading.RLock()


_inherited: list[Any] = []
os.register_at_fork(after_in_child=_reset)


def add(future: _Future, callback: _Callback) -> None:
    """Calls ``callback(future)`` once the future is done."""
    _callbacks.add(future, callback)


def run(future: _Future) -> None:
    """Runs the callbacks of a future that this thread has cancelled."""
    _callbacks.run(future)


class _Waited:
    """What ``concurrent.futures`` keeps in a future that it waits for, of one of ours."""

    def __init__(self) -> None:
        self.condition = threading.Condition()
        self.waiters: list[Any] = []
        self.state = "PENDING"

    def finish(self, future: _Future) -> None:
        with self.condition:
            is_cancelled = future.cancelled()
            self.state = "CANCELLED_AND_NOTIFIED" if is_cancelled else "FINISHED"
            for waiter in self.waiters:
                if is_cancelled:
                    waiter.add_cancelled(future)
                elif _has_failed(future):
                    waiter.add_exception(future)
                else:
                    waiter.add_result(future)


def _has_failed(future: _Future) -> bool:
    try:
        return future.exception(0) is not None
    except Error:
        # Its queue is closed.
        return True


_waited: weakref.WeakKeyDictionary[_Future, _Waited] = weakref.WeakKeyDictionary()
_waited_lock = threading.RLock()


def _waited_of(future: _Future) -> _Waited:
    with _waited_lock:
        waited = _waited.get(future)
    if waited is not None:
        return waited
    # Not known before it is told of the end: this may fail, or be interrupted.
    made = _Waited()
    add(future, made.finish)
    with _waited_lock:
        return _waited.setdefault(future, made)


def _mimic() -> None:
    """Has ``concurrent.futures.wait``, ``as_completed`` and ``asyncio.wrap_future`` take our futures: they ask
    for three attributes of a ``Future``."""
    future: Any = _warpipe._Future
    future._condition = property(lambda one: _waited_of(one).condition)
    future._waiters = property(lambda one: _waited_of(one).waiters)
    future._state = property(lambda one: _waited_of(one).state)


_mimic()


def result(self: _Future, timeout: float | None = None) -> _warpipe.JobResult:
    """Waits for the result, at most ``timeout`` seconds (None: no limit; a request has its deadline). Its data is
    complete. Each call gives the same object.

    Raises ``TimeoutError``, after which it may be called again; ``DeadLetteredError`` when all attempts failed,
    ``RejectedError``; ``concurrent.futures.CancelledError``; ``DeadlinePassedError`` (a TimeoutError) of a request;
    ``NoSuchJobError`` when ``Queue.results`` gave the outcome; ``QueueClosedError`` when the queue or client was closed.
    ``await`` raises the same: an ``asyncio.CancelledError`` is of the task that awaits.
    """
    outcome = self._outcome(timeout)
    if isinstance(outcome, BaseException):
        try:
            raise outcome
        finally:
            # Its traceback has this frame, and the future has it.
            del outcome, self
    if outcome is None:
        raise CancelledError
    return outcome


def exception(self: _Future, timeout: float | None = None) -> BaseException | None:
    """Waits as ``result``, and gives the exception that it raises; None if there is a result.

    Raises ``TimeoutError``, ``concurrent.futures.CancelledError``.
    """
    outcome = self._outcome(timeout)
    if outcome is None:
        raise CancelledError
    return outcome if isinstance(outcome, BaseException) else None


def add_done_callback(self: _Future, fn: _Callback) -> None:
    """Calls ``fn(self)`` once it is done, in the order in which callbacks were added: on the package's thread
    ``warpipe-callbacks``, or on the thread that cancels it, or, if it is done already, at once on this thread. An
    exception of a callback is logged (logger ``warpipe``) and stops no other. The object is kept until then.
    """
    # In a forked child that is an error.
    self.running()
    add(self, fn)


def cancel(self: _Future) -> bool:
    """Cancels it: no worker, or server, gets it any more, and the answer of one that has it is discarded. Returns
    whether it is cancelled: False if it was done before.
    """
    by_this = self._call_off()
    if by_this:
        run(self)
    return by_this is not None


def poll(self: _Future) -> _warpipe.JobResult | None:
    """The result if it has come, else None."""
    return self.result() if self.done() else None


def send(self: _Future, value: None, /) -> Any:
    """One step of the asyncio task that wraps this object: see ``asyncio.create_task``."""
    return step(self, "send", value)


def throw(self: _Future, *error: Any) -> Any:
    """Ends a step of that task with an error, as a cancellation does."""
    return step(self, "throw", *error)


def close(self: _Future) -> None:
    """Ends the wait of that task; the job, or the request, itself goes on."""
    step(self, "close")


def _complete() -> None:
    """Gives the native class these methods. With those of a coroutine a future is one to ``asyncio.create_task``."""
    future: Any = _warpipe._Future
    for method in (result, exception, add_done_callback, cancel, send, throw, close):
        setattr(future, method.__name__, method)
    future._poll, future.__await__ = poll, lambda self: outcome_of(self).__await__()


_complete()
