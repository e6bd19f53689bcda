"""A worker's process: it warms up, waits for its place, and works. It ends with its supervisor, whatever it is doing."""

from __future__ import annotations

import contextlib
import fcntl
import importlib
import os
import re
import select
import signal
import sys
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any, NamedTuple, NoReturn

from .. import _warpipe
from . import _preload

# A process that was asked to end ends with this code, as a shell would say it.
TERMINATED = 128 + signal.SIGTERM
# A message to the supervisor must not fill the pipe.
_TEXT_MAX = 4096
# What the kernel keeps of a command's name.
_COMMAND_BYTES = 15

Work = Callable[..., Any] | str

_place: int | None = None


class Order(NamedTuple):
    """What a worker is told when it begins."""

    target: Work
    warm: Work | None
    preload: tuple[str, ...]
    name: str
    domain: str


def place() -> int | None:
    """The number of this worker's place, from 0; None before it works, and outside of a worker."""
    return _place


def run(order: Order, channel: Connection, lifeline: Connection) -> None:
    """The life of a worker. ``channel`` goes to the supervisor; ``lifeline`` is at its end when the supervisor is gone."""
    _die_with(lifeline)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, _terminate)
    # A child of this process must not keep its supervisor from seeing its end.
    os.register_at_fork(after_in_child=channel.close)
    channel.send(("began", _faults(order.preload)))
    try:
        _live(order, channel)
    except SystemExit:
        raise
    except BaseException as error:
        text = f"{type(error).__name__}: {error}"
        _say(channel, ("raised", text[:_TEXT_MAX]))
        raise
    _say(channel, ("returned", None))


def _live(order: Order, channel: Connection) -> None:
    global _place
    target = resolve(order.target)
    warmed: tuple[Any, ...] = ()
    with _shown_as(order, "standby"):
        if order.warm is not None:
            warmed = (resolve(order.warm)(),)
        channel.send(("ready", None))
        try:
            _place = channel.recv()
        except (EOFError, OSError):
            sys.exit(TERMINATED)
    with _shown_as(order, str(_place)):
        try:
            target(*warmed)
        except SystemExit as exit:
            if exit.code not in (None, 0):
                raise


def _die_with(lifeline: Connection) -> None:
    """Has the kernel kill this process when the supervisor is gone: no code of this process has to run for it."""
    fd = lifeline.fileno()
    fcntl.fcntl(fd, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(fd, fcntl.F_SETSIG, signal.SIGKILL)
    fcntl.fcntl(fd, fcntl.F_SETFL, fcntl.fcntl(fd, fcntl.F_GETFL) | os.O_ASYNC)
    # It may have gone before.
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    if poll.poll(0):
        os._exit(TERMINATED)


def _terminate(_number: int, _frame: object) -> NoReturn:
    sys.exit(TERMINATED)


def _faults(preload: tuple[str, ...]) -> dict[str, str]:
    """The modules that the fork server should have imported and has not, with the reasons."""
    found = _preload.report
    if found is None:
        reason = "this process's fork server ran before, or cannot import warpipe (see PYTHONPATH)"
        return dict.fromkeys(preload, reason)
    if found.faults:
        return found.faults
    missing = [name for name in preload if name not in found.imported]
    reason = "this process's fork server was started for other Workers: give the first ones all modules"
    return dict.fromkeys(missing, reason)


def resolve(work: Work) -> Callable[..., Any]:
    """The function of ``MODULE:FUNCTION``; a function as it is."""
    if not isinstance(work, str):
        return work
    module, _, path = work.partition(":")
    found: Any = importlib.import_module(module)
    for part in path.split("."):
        found = getattr(found, part)
    if not callable(found):
        raise TypeError(f"{work} is a {type(found).__name__} and cannot be called: name a function")
    return found  # type: ignore[no-any-return]


@contextlib.contextmanager
def _shown_as(order: Order, state: str) -> Any:
    """In ``warpipe ls`` and ``members`` by its member's name, in ``warpipe top``, ``top`` and ``ps`` by its command."""
    command = f"{re.sub('.*/', '', order.name)[: _COMMAND_BYTES - 1 - len(state)]}/{state}"
    with open("/proc/self/comm", "wb") as comm:
        comm.write(command.encode()[:_COMMAND_BYTES])
    pid = os.getpid()
    name = f"{order.name}/{state}/{pid}"
    member = _warpipe.Member.join(name, "standby" if state == "standby" else "worker", domain=order.domain)
    try:
        yield
    finally:
        # The work may return in a child that it forked, too.
        if os.getpid() == pid:
            member.close()


def _say(channel: Connection, message: tuple[str, str | None]) -> None:
    """The supervisor may be gone, or not want to know."""
    with contextlib.suppress(OSError):
        channel.send(message)
