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


class Quota(NamedTuple):
    """The most that one user may have of a pool at once: see ``Pool.create``. None is no limit."""

    nbytes: int | None = None
    """Bytes in blocks, each rounded up to a multiple of 512."""
    blocks: int | None = None
    """The number of blocks."""


class PoolUsage(NamedTuple):
    """The part of a pool that one user has: see ``Pool.usage``."""

    nbytes: int
    """Bytes in blocks that are not free."""
    blocks: int
    """The number of these blocks."""
    region_nbytes: int
    """Bytes of the user's regions."""
    quota: Quota
    """The user's quota."""


for _one in (EndpointInfo, MemoryUse, Quota, PoolUsage):
    _one.__module__ = "warpipe"
