"""New versions of weights, as they are offered.

A thread of the watch waits for the keeper's notices, for those that poll its descriptor. It learns a version's number and
maps nothing, so a watch holds no memory: the version is opened when it is given out. With a callback the thread opens it.
The thread's waits are short, so that it ends soon after the watch, which it does not hold.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any, Self

from . import _warpipe
from ._errors import ArgumentError, ClosedError, Error
from ._loop import end_of
from ._members import changes_async

_Place = tuple[str, _warpipe.Device, _warpipe.Domain]

_LOOK_SECONDS = 1.0
# Of a thread that cannot wait for a version: the next look for one says why.
_FAILED = 1 << 64

_log = logging.getLogger("warpipe")


class _Board:
    """What the thread and the watch share: the newest number that the keeper has told, and the last that was given out."""

    def __init__(self, after: int) -> None:
        self.told = self.given = after
        self.given_by = 0
        # A condition's own ``with`` is of Python: a signal's handler that raises there would leave it locked.
        self.lock = threading.RLock()
        self.changed = threading.Condition(self.lock)
        self.bell = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)

    def __del__(self) -> None:
        os.close(self.bell)

    def tell(self, told: int) -> None:
        """Has the descriptor readable exactly while there is something to take."""
        with self.lock:
            self.told = told
            with contextlib.suppress(BlockingIOError):
                os.eventfd_write(self.bell, 1) if told > self.given else os.eventfd_read(self.bell)
            self.changed.notify_all()

    def give(self, version: int) -> bool:
        """Whether a version is the next to be given out: from now on it has been. A later one stays told."""
        with self.lock:
            is_next = version > self.given
            if is_next:
                self.given, self.given_by = version, threading.get_ident()
            self.tell(max(self.told % _FAILED, self.given))
        return is_next

    def find_none(self, told: int) -> None:
        """There was none for what had been told, or an error. What was told meanwhile stays."""
        with self.lock:
            if self.told == told:
                self.tell(self.given)

    def take_back(self, version: int, before: int) -> None:
        """Has a version that this thread was to give out be the next once more."""
        with self.lock:
            if (self.given, self.given_by) == (version, threading.get_ident()):
                self.given = before
                self.tell(version)


def _follow(board: _Board, place: _Place, watch: weakref.ref[Watch]) -> None:
    while (one := watch()) is not None and not one.closed:
        del one
        with board.lock:
            if not board.changed.wait_for(lambda: board.told != _FAILED, _LOOK_SECONDS):
                continue
            after = max(board.told, board.given)
        try:
            number = _warpipe._version_after(*place, after)
        except Error:
            number = _FAILED
        if number is not None:
            with board.lock:
                # Not if the number was taken back meanwhile: then the version is looked for again.
                board.tell(max(board.told, number))


def _call(board: _Board, place: _Place, watch: weakref.ref[Watch]) -> None:
    after, said = board.given, ""
    while True:
        weights = None
        try:
            weights = _warpipe._open_weights(*place, _LOOK_SECONDS, after, None, True)
        except Error as error:
            # No caller would get it. A later look may find a version.
            if str(error) != said:
                said = str(error)
                _log.exception("the watch of the weights %r has no version to call back with", place[0])
            with board.lock:
                board.changed.wait(_LOOK_SECONDS)
        one = watch()
        if one is None or one.closed or one._on is None:
            return
        if weights is not None:
            after = weights.version
            _warpipe._call(one._on, weights)
        del one, weights


class Watch(_warpipe._Bare):
    """New versions of weights, as they are offered: ``for weights in watch(name):``, ``async for``, or with a callback.

    ``warpipe.weights.watch`` makes it. Each version is given out as ``SharedWeights``: all of it. If several were
    published meanwhile, the newest one is, and the others are left out. A watch holds no memory.
    """

    _board: _Board
    _place: _Place
    _on: Callable[[_warpipe.SharedWeights], object] | None

    def __new__(
        cls,
        name: str,
        *,
        device: Any = None,
        domain: Any = None,
        after: int = 0,
        on: Callable[[_warpipe.SharedWeights], object] | None = None,
    ) -> Self:
        domain = domain if isinstance(domain, _warpipe.Domain) else _warpipe.Domain(domain)
        self = super().__new__(cls, name, after)
        self._board, self._place, self._on = _Board(self._after), (name, _warpipe.Device(device), domain), on
        work, shared = _follow if on is None else _call, (self._board, self._place, weakref.ref(self))
        threading.Thread(target=work, args=shared, name="warpipe-watch", daemon=True).start()
        return self

    def changes(self, timeout: float | None = 10.0) -> _warpipe.SharedWeights | None:
        """The next version, waited for at most ``timeout`` seconds (None: no limit), also while there is no keeper; None
        if there was none. An interrupted wait loses no version.

        Raises ``ArgumentError`` if this watch has a callback, which gets the versions; ``ClosedError``, and as ``open``.
        """
        timeout = _warpipe._seconds(timeout)
        self._check()
        if self._on is not None:
            raise ArgumentError("on is a callback, which gets the versions; allowed is a watch without `on`")
        board, end, left = self._board, end_of(timeout), timeout
        while True:
            weights: _warpipe.SharedWeights | None = None
            told, before = board.told, board.given
            try:
                weights = _warpipe._open_weights(*self._place, left, before, self, True)
                # Another thread may have taken it.
                is_next = weights is not None and board.give(weights.version)
            except Error:
                board.find_none(told)
                raise
            except BaseException:
                if weights is not None:
                    board.take_back(weights.version, before)
                raise
            # No signal's handler runs from here to the caller.
            if is_next:
                return weights
            if weights is None:
                board.find_none(told)
                if left is not None and left <= 0:
                    return None
            left = None if timeout is None else max(0.0, end - time.monotonic())

    async def changes_async(self, timeout: float | None = 10.0) -> _warpipe.SharedWeights | None:
        """Waits for the next version in the running event loop: ``changes`` for asyncio. Cancelling it loses none.

        Raises as ``changes``.
        """
        weights: _warpipe.SharedWeights | None = await changes_async(self, timeout)
        return weights

    def fileno(self) -> int:
        """A descriptor that is readable while ``changes`` has a version. Only poll it.

        Raises ``ClosedError``.
        """
        self._check()
        return self._board.bell

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> _warpipe.SharedWeights:
        """The next version, without a limit; the iteration ends when the watch is closed."""
        try:
            weights = self.changes(None)
        except Error:
            if self.closed:
                raise StopIteration from None
            raise
        assert weights is not None
        return weights

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> _warpipe.SharedWeights:
        """The same in the running event loop."""
        try:
            weights = await self.changes_async(None)
        except ClosedError:
            raise StopAsyncIteration from None
        assert weights is not None
        return weights


Watch.__module__ = "warpipe.weights"
