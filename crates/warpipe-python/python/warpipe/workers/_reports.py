"""What workers tell of themselves: processes, deaths, and errors with their reasons."""

from __future__ import annotations

import signal
from typing import Literal, NamedTuple, TypeAlias

from .._errors import Error

State: TypeAlias = Literal["starting", "standby", "working", "ending"]

# What ``multiprocessing`` gives for the end of a process without its fork server.
CODE_UNKNOWN = 255


class PreloadError(Error):
    """A module of ``preload`` that the fork server does not have, or that must not be preloaded. Attribute: ``faults``, the
    reasons by module."""

    __module__ = "warpipe.workers"
    faults: dict[str, str]


class WorkersFailedError(Error):
    """Workers died too often in a row, and all have been ended. Attribute: ``deaths``, the last ones."""

    __module__ = "warpipe.workers"
    error_kind = "limit_reached"
    deaths: list[Death]


class WorkerInfo(NamedTuple):
    """A worker's process: see ``Workers.processes``."""

    pid: int
    """Its process id."""
    state: State
    """``"starting"`` until ``warm`` has returned, ``"standby"``, ``"working"``, or ``"ending"``."""
    place: int | None
    """The number of the place that it works in; None before it has one."""


class Death(NamedTuple):
    """The end of a worker that had not finished: see ``Workers.deaths``."""

    pid: int
    """Its process id."""
    place: int | None
    """The place that it worked in; None if it had none."""
    state: State
    """Its state at its end."""
    exitcode: int | None
    """As ``multiprocessing`` gives it: a signal's number is negative; None where nobody knows."""
    reason: str
    """In words."""
    times: int
    """How many deaths there were in the same place, within the time that counts."""


def preload_error(faults: dict[str, str]) -> PreloadError:
    said = "; ".join(f"{name}: {reason}" for name, reason in faults.items())
    error = PreloadError(f"the fork server cannot be used with this preload: {said}")
    error.faults = faults
    return error


def not_started(error: BaseException, has_begun: bool) -> Error:
    if isinstance(error, (EOFError, ConnectionError)) and not has_begun:
        failed = PreloadError(
            "the fork server ended before it had forked: a module of preload ended it, or the imports took longer than "
            "preload_timeout. Its own words are on the standard error stream"
        )
        failed.faults = {}
        return failed
    if isinstance(error, ChildProcessError):
        why = "the fork server of multiprocessing is no child of this process, which was forked from one that has it"
        failure = WorkersFailedError(
            f"{why}, or ignores SIGCHLD: start this process with the method \"spawn\", or as a program"
        )
    else:
        failure = WorkersFailedError(f"workers cannot be started or watched: {type(error).__name__}: {error}")
    failure.deaths = []
    failure.__cause__ = error
    return failure


def ending(code: int) -> str:
    if code == CODE_UNKNOWN:
        return "ended with code 255, or with one that is lost because the fork server ended"
    if code >= 0:
        return f"ended with code {code}"
    try:
        return f"was killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"was killed by signal {-code}"
