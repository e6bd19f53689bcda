"""The messages of ``multiprocessing`` that this process pickles and sends, and the processes that it starts: what is made
for a message that is not sent is taken back. While it is followed, six methods of ``multiprocessing`` are this module's."""

from __future__ import annotations

import functools
import os
import pickle
import sys
import threading
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from multiprocessing.queues import Queue, SimpleQueue
from multiprocessing.reduction import ForkingPickler
from typing import Any


class Message:
    """A message that a thread is in the middle of pickling or sending."""

    def __init__(self, pipe: Connection | None) -> None:
        self.pipe = pipe
        """The connection that it is written to, where that is known."""
        self.order: dict[int, Any] = {}
        """What its contents on each GPU are to be ordered behind, beside the thread's own stream."""
        self.take_back: list[tuple[Any, ...]] = []
        """Functions with their arguments: a function of Python that made one could be interrupted before it is here."""


_state = threading.local()
_usual: list[tuple[type, str, Any]] = []
# Told of each pipe that this process is about to close, or that nobody can read from.
pipe_ends: list[Callable[[Connection], object]] = []


def current() -> Message | None:
    """This thread's."""
    return getattr(_state, "message", None)


def _forget() -> None:
    """Of a forked child: the start of its process is in progress for its parent alone."""
    _state.message = None


os.register_at_fork(after_in_child=_forget)


def as_message(pipe: Connection | None, failures: type[BaseException], call: Callable[..., object], *given: Any) -> None:
    """``call(*given)`` pickles or sends a message to ``pipe``, or without one a part of the message in progress. After one of
    ``failures`` it is taken back. Not for ``with``: an interrupt may come where an ``__exit__`` begins."""
    outer = current()
    whole = outer if pipe is None else None
    inner = Message(pipe)
    if whole is not None:
        inner.pipe, inner.order = whole.pipe, whole.order
    try:
        _state.message = inner
        call(*given)
    except failures:
        _state.message = outer
        take_back(iter(inner.take_back))
        raise
    else:
        if whole is not None:
            whole.take_back += inner.take_back
    finally:
        _state.message = outer


def take_back(made: Iterator[tuple[Any, ...]]) -> None:
    """Takes back what was made for a message, all of it whatever fails."""
    for call, *given in made:
        try:
            call(*given)
        except BaseException:
            take_back(made)
            raise


class Ordered:
    """A message that another thread pickles, and what that is to be ordered behind."""

    def __init__(self, message: Any, order: dict[int, Any]) -> None:
        self.message, self.order = message, order

    def __reduce__(self) -> tuple[Any, ...]:
        pickled = current()
        if pickled is not None:
            pickled.order = self.order
        return same, (self.message,)


def same(found: Any) -> Any:
    """In messages: the argument."""
    return found


class Unopened:
    """In the place of what a ``Pool`` was sent and cannot open: each use raises the error.

    A ``Pool`` that unpickles takes an ``OSError`` for the end of its pipe, and ends at any other: either way the caller
    would wait for ever. So the error comes where the message is used, whose errors a ``Pool`` gives to the caller.
    """

    def __init__(self, error: Exception) -> None:
        self.__dict__["_error"] = error

    def _raise(self, *_given: Any, **_named: Any) -> Any:
        raise self.__dict__["_error"].with_traceback(None)

    __getattr__ = __setattr__ = __getitem__ = __setitem__ = __iter__ = __len__ = __bool__ = __call__ = __reduce_ex__ = _raise
    __array__ = __dlpack__ = __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __matmul__ = __rmatmul__ = _raise
    __truediv__ = __rtruediv__ = __neg__ = __eq__ = __lt__ = __le__ = __gt__ = __ge__ = _raise
    __hash__ = object.__hash__

    @classmethod
    def __torch_function__(cls, _function: Any, _types: Any, given: tuple[Any, ...] = (), _named: Any = None) -> Any:
        for one in given:
            if isinstance(one, cls):
                one._raise()
        return NotImplemented


def unopened(error: Exception) -> Unopened:
    """Raises the error of something that cannot be opened, unless a ``Pool`` unpickles it."""
    pool = sys.modules.get("multiprocessing.pool")
    if pool is None:
        raise error
    readers = {pool.worker.__code__, pool.Pool._handle_results.__code__}
    frame = sys._getframe(1)
    while frame is not None:
        if frame.f_code in readers:
            return Unopened(error)
        frame = frame.f_back  # type: ignore[assignment]
    raise error


def _dumping(_usual: Callable[..., Any]) -> Callable[..., Any]:
    def dump(pickler: ForkingPickler, found: Any) -> None:
        as_message(None, BaseException, pickle.Pickler.dump, pickler, found)

    return dump


def sending(usual: Callable[..., Any]) -> Callable[..., Any]:
    """A ``send`` of a connection, or of PyTorch's wrapper of one."""

    # Callers may name the argument, which has this name in ``multiprocessing``, as in the ``put`` below.
    def send(connection: Any, obj: Any) -> None:
        # An interrupt may come when all has been written.
        as_message(getattr(connection, "conn", connection), Exception, usual, connection, obj)

    return send


def _putting(usual: Callable[..., Any]) -> Callable[..., Any]:
    def put(queue: Any, obj: Any) -> None:
        as_message(getattr(queue._writer, "conn", queue._writer), Exception, usual, queue, obj)

    return put


def _feeding(usual: Callable[..., Any]) -> Callable[..., Any]:
    """The thread of a queue pickles each message, and sends it then."""

    def feed(buffer: Any, notempty: Any, send_bytes: Callable[[Any], Any], *rest: Any) -> None:
        pipe = getattr(send_bytes, "__self__", None)
        pickled = _state.message = Message(pipe if isinstance(pipe, Connection) else None)

        def send(found: Any) -> None:
            try:
                send_bytes(found)
            except Exception:
                take_back(iter(pickled.take_back))
                if pickled.pipe is not None:
                    _tell_of_its_end(pickled.pipe)
                raise
            finally:
                pickled.take_back.clear()

        usual(buffer, notempty, send, *map(_given_messages, rest))

    return feed


def _given_messages(found: Any) -> Any:
    """What a queue calls with a message that it could not pickle gets that as it was put."""
    if getattr(found, "__name__", None) != "_on_queue_feeder_error":
        return found

    def told(error: Any, message: Any) -> None:
        found(error, message.message if isinstance(message, Ordered) else message)

    return told


def _closing(usual: Callable[..., Any]) -> Callable[..., Any]:
    def close(connection: Connection, *given: Any) -> None:
        try:
            _tell_of_its_end(connection)
        except Exception:
            # At the interpreter's end this module may have been cleared.
            pass
        finally:
            # The descriptor is closed all the same, also after an interrupt: the connection forgets it now.
            usual(connection, *given)

    return close


def _tell_of_its_end(pipe: Connection) -> None:
    for tell in pipe_ends:
        tell(pipe)


def _starting(usual: Callable[..., Any]) -> Callable[..., Any]:
    def start(process: BaseProcess) -> None:
        # Its arguments are pickled before there is a process that could receive them.
        as_message(None, Exception, usual, process)

    return start


def replace(cls: type, name: str, method: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Has a class use ``method(usual)`` in the place of the usual method until ``leave``."""
    own = vars(cls).get(name)
    _usual.append((cls, name, own))
    made = functools.wraps(getattr(cls, name))(method(getattr(cls, name)))
    setattr(cls, name, staticmethod(made) if isinstance(own, staticmethod) else made)


def follow() -> None:
    """Follows the messages of this process."""
    replace(ForkingPickler, "dump", _dumping)
    replace(Connection, "send", sending)
    # Of ``close`` and of the end of a connection that nobody closed.
    replace(Connection, "_close", _closing)
    replace(SimpleQueue, "put", _putting)
    replace(Queue, "_feed", _feeding)
    replace(BaseProcess, "start", _starting)


def leave() -> None:
    """Gives all methods back. A message in progress ends as it began."""
    # A method may have been replaced twice.
    for cls, name, usual in reversed(_usual):
        if usual is None:
            # It has its base's again.
            delattr(cls, name)
        else:
            setattr(cls, name, usual)
    _usual.clear()
