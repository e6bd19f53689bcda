"""What a receive raises beside warpipe's own errors."""

from __future__ import annotations

import ray.exceptions
import warpipe


class SourceGoneError(warpipe.PeerGoneError, ray.exceptions.RayError):
    """The process that made a tensor has ended, and its memory is not open here. Create the object again."""


class ReceiveAbortedError(warpipe.Error, ray.exceptions.RayError):
    """Ray has aborted a receive, since it took longer than ``RAY_rdt_fetch_fail_timeout_milliseconds``."""
