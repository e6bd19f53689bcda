"""Results of several values, by name."""

from __future__ import annotations

from typing import NamedTuple


class EndpointInfo(NamedTuple):
    """An endpoint of a domain: see ``Domain.endpoints``."""

    name: str
    alive: bool
    """False for files of a dead process."""
    pid: int | None
    """None where it could not be determined."""


class MemoryUse(NamedTuple):
    """Device memory of a publisher's or a queue's loans: see ``memory_in_use``."""

    allocated_nbytes: int
    """Allocated so far."""
    limit_nbytes: int
    """Its limit."""


for _one in (EndpointInfo, MemoryUse):
    _one.__module__ = "warpipe"
