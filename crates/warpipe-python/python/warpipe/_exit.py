"""The end of the program calls the native half, which closes open endpoints and waits for callbacks."""

from __future__ import annotations

import atexit
import importlib
import os
import sys
from typing import Any

from . import _warpipe

# The processes that have registered it with ``atexit``, and as a finalizer of ``multiprocessing``.
_registered = _finalized = 0


def prepare() -> None:
    """Before an endpoint is opened: ``atexit`` runs in the process that ends."""
    global _registered
    if _registered != os.getpid():
        atexit.unregister(_warpipe._end)
        atexit.register(_warpipe._end)
        _registered = os.getpid()
    _prepare_child()


def _prepare_child() -> None:
    """A child of ``multiprocessing`` may end without ``atexit``, and runs finalizers of its own. It becomes such a child,
    and forgets earlier registrations, only after it has imported its parent's program: see ``_begin``."""
    global _finalized
    process = sys.modules.get("multiprocessing.process")
    if process is None or _finalized == os.getpid() or process.parent_process() is None:
        return
    # After everything else that ends there.
    importlib.import_module("multiprocessing.util").Finalize(None, _warpipe._end, exitpriority=-1000)
    _finalized = os.getpid()


def _begin(_end: Any) -> None:
    """``multiprocessing`` calls this in a new child before its work: endpoints that the program opened while it was
    imported are to be closed, too."""
    if _warpipe._has_open():
        _prepare_child()


def _complete() -> None:
    prepare()
    util: Any = sys.modules.get("multiprocessing.util")
    if util is not None:
        util.register_after_fork(_warpipe._end, _begin)


_complete()
