"""Imported by a fork server before it forks: imports the modules that workers are to find there, and checks after each of
them that a fork is still allowed. ``multiprocessing`` would not say that an import failed."""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import importlib
import json
import os
import signal
import sys
import threading
import time
import warnings
from collections.abc import Iterator
from typing import NamedTuple

# How a supervisor hands its order to the fork server that it starts.
VARIABLE = "_WARPIPE_WORKERS_PRELOAD"
# CUDA_ERROR_NOT_INITIALIZED of ``cuDeviceGetCount``.
_NOT_INITIALIZED = 3
_PR_SET_PDEATHSIG = 1
# How long the end of a thread may take. A module that leaves one costs this time.
_THREAD_ENDS_SECONDS = 1.0


class Report(NamedTuple):
    """The preloaded modules of a fork server, which its children inherit."""

    imported: frozenset[str]
    faults: dict[str, str]
    """By module, in words."""


def order(modules: list[str], limit_seconds: float) -> str:
    """The text for ``VARIABLE``. The fork server searches modules where this process does."""
    here = os.getcwd()
    path = [entry or here for entry in sys.path]
    return json.dumps({"modules": modules, "path": path, "limit_seconds": limit_seconds, "supervisor": os.getpid()})


def _preload() -> Report | None:
    """Does what the supervisor has ordered; None if this process is no fork server of ``warpipe.workers``."""
    text = os.environ.pop(VARIABLE, None)
    if text is None or not any("multiprocessing.forkserver" in argument for argument in sys.orig_argv):
        # A process that was started at the same moment inherits an order that is not for it.
        return None
    given = json.loads(text)
    sys.path[:] = given["path"]
    imported: set[str] = set()
    faults: dict[str, str] = {}
    # Ctrl-C ends the supervisor, and with it this process.
    on_interrupt = signal.signal(signal.SIGINT, signal.SIG_IGN)
    # While it imports it does not look for the end of its supervisor. The thread that started it waits for it meanwhile.
    _end_with_parent(True)
    if os.getppid() != given["supervisor"]:
        os._exit(1)
    end = time.monotonic() + given["limit_seconds"]
    lost = 0
    for name in given["modules"]:
        try:
            with _limited(end - time.monotonic()):
                importlib.import_module(name)
        except BaseException as error:  # A module may even exit.
            faults[name] = f"it cannot be imported: {type(error).__name__}: {error}"
            continue
        broken = _broken_rule()
        if broken is not None:
            # The next modules would be blamed for it, too.
            faults[name] = broken
            break
        left = _native_threads()
        if left > lost:
            # Whether the library needs it in a child is known to the library alone. transformers leaves one.
            said = f"preload {name!r} has started {left - lost} native threads, which no worker has"
            warnings.warn(f"{said}; if its library hangs in a worker, have warm() import it", RuntimeWarning, stacklevel=1)
        lost = left
        imported.add(name)
    _end_with_parent(False)
    signal.signal(signal.SIGINT, on_interrupt)
    return Report(frozenset(imported), faults)


def _end_with_parent(is_so: bool) -> None:
    """Whether the kernel kills this process when the thread that started it ends."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL if is_so else 0, 0, 0, 0)


@contextlib.contextmanager
def _limited(seconds: float) -> Iterator[None]:
    """An import that hangs ends this process, and its traceback says where: nothing else could end it."""
    with contextlib.suppress(ValueError, OSError, RuntimeError):  # Without a standard error stream there is no limit.
        faulthandler.dump_traceback_later(max(seconds, 0.001), exit=True)
    try:
        yield
    finally:
        # Its thread must not be taken for one of the module's.
        faulthandler.cancel_dump_traceback_later()


def _broken_rule() -> str | None:
    """The reason, in words, why this process must not be forked any more."""
    if _is_cuda_initialised():
        return "it has initialised CUDA, which does not survive a fork: have warm() or the target do that"
    threads = [thread.name for thread in threading.enumerate() if thread is not threading.main_thread()]
    if threads:
        return f"it has started the thread {threads[0]!r}, which a forked process does not have: have warm() do that"
    return None


def _is_cuda_initialised() -> bool:
    """Whether this process has called ``cuInit``, by any library."""
    try:
        driver = ctypes.CDLL("libcuda.so.1", mode=os.RTLD_NOLOAD | os.RTLD_NOW)
    except OSError:
        return False
    count = ctypes.c_int()
    return bool(driver.cuDeviceGetCount(ctypes.byref(count)) != _NOT_INITIALIZED)


def _native_threads() -> int:
    """How many threads beside this one outlast a fork in the parent. A library that knows of forks ends its own before
    one and starts them anew later: OpenBLAS, which NumPy brings, does."""
    if len(os.listdir("/proc/self/task")) == 1:
        return 0
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        child = os.fork()
    if child == 0:
        os._exit(0)
    os.waitpid(child, 0)
    # A thread that has ended, as that of the limit above, is listed until the kernel is done with it.
    end = time.monotonic() + _THREAD_ENDS_SECONDS
    while (left := len(os.listdir("/proc/self/task")) - 1) and time.monotonic() < end:
        time.sleep(0.001)
    return left


report = _preload()
