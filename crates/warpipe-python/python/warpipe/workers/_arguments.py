"""What ``Workers`` is given, checked before another process has to fail of it."""

from __future__ import annotations

import functools
import itertools
import multiprocessing
import os
import re
import sys
from collections.abc import Sequence
from multiprocessing.reduction import ForkingPickler
from typing import Any

from .._errors import ArgumentError

# Of the Workers of this process that were given no name.
_numbers = itertools.count(1)


def check(target: Any, warm: Any, count: int, standby: int, preload: Sequence[str], deaths_max: int | None) -> None:
    """Arguments that would fail in another process, or later, fail here."""
    current = multiprocessing.process.current_process()
    if getattr(current, "_inheriting", False):
        raise ArgumentError(
            "Workers are made while a process of them imports this program: put them under `if __name__ == '__main__':`"
        )
    if current.daemon:
        raise ArgumentError(
            "this process is a daemon of multiprocessing, which may have no children: make it with daemon=False"
        )
    if count < 1 or standby < 0:
        raise ArgumentError(f"count is {count} and standby {standby}: at least 1 and 0")
    if deaths_max is not None and deaths_max < 1:
        raise ArgumentError(f"deaths_max is {deaths_max}: at least 1, or None for no limit")
    if isinstance(preload, str) or not all(isinstance(name, str) for name in preload):
        raise ArgumentError("preload is a list of the names of modules")
    sent = b""
    for what, work in (("target", target), ("warm", warm)):
        if work is None and what == "warm":
            continue
        if isinstance(work, str):
            if not re.fullmatch(r"[\w.]+:[\w.]+", work):
                raise ArgumentError(f"{what} {work!r} is not of the form MODULE:FUNCTION")
            continue
        if not callable(work):
            raise ArgumentError(f"{what} is a function, or MODULE:FUNCTION, and not a {type(work).__name__}")
        try:
            sent += ForkingPickler.dumps(work)
        except Exception as error:
            raise ArgumentError(
                f"{what} cannot be sent to another process ({error}): define it at the top level of a module"
            ) from error
    _check_program(sent)


def _check_program(sent: bytes) -> None:
    """A process imports the program that its work is of, and one that says that it is a file."""
    main = sys.modules["__main__"]
    file = getattr(main, "__file__", None)
    if getattr(main, "__spec__", None) is None and (file == "<stdin>" or (file is None and b"__main__" in sent)):
        raise ArgumentError(
            "the processes import this program, and no file has it: put target and warm into a module in a file, and the "
            "program too if it comes from the standard input"
        )


def own_name(target: Any) -> str:
    """A name that no other Workers have: of the function, this process, and a number for the second and later ones."""
    if isinstance(target, functools.partial):
        target = target.func
    if not isinstance(target, str):
        target = getattr(target, "__name__", type(target).__name__)
    function = re.sub("[^a-zA-Z0-9_-]", "-", target.rpartition(":")[2]).strip("-")[:20]
    number = next(_numbers)
    return f"{function or 'workers'}.{os.getpid()}" + (f".{number}" if number > 1 else "")
