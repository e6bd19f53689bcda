"""Worker processes from a preloaded fork server, with standbys that are warmed up, and take over at once.

>>> import warpipe.workers
>>> def serve() -> None: ...
>>> with warpipe.workers.Workers(serve, count=2, standby=1, preload=["torch"]) as workers:   # doctest: +SKIP
...     workers.wait()

The same from a shell: ``python -m warpipe.workers MODULE:FUNCTION --count 2 --standby 1 --preload torch``.
"""

from __future__ import annotations

from ._reports import Death, PreloadError, WorkerInfo, WorkersFailedError
from ._supervisor import Workers
from ._worker import place

for _one in (Death, WorkerInfo):
    _one.__module__ = "warpipe.workers"
place.__module__ = "warpipe.workers"

__all__ = ["Death", "PreloadError", "WorkerInfo", "Workers", "WorkersFailedError", "place"]
