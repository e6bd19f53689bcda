"""Results of several values, by name."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple, TypeAlias

PeerState: TypeAlias = Literal["alive", "stalled", "leaving", "suspect", "dead", "unknown"]
What: TypeAlias = Literal["joined", "stalled", "recovered", "left", "died", "unknown"]


class EndpointInfo(NamedTuple):
    """An endpoint of a domain: see ``Domain.endpoints``."""

    name: str
    alive: bool
    """False for files of a dead process."""
    pid: int | None
    """None where it could not be determined."""
    foreign: str | None = None
    """What stands in the place of its files, if that is no endpoint's and keeps owners away: for example a symlink."""


class MemoryUse(NamedTuple):
    """Device memory of a publisher's or a queue's loans: see ``memory_in_use``."""

    allocated_nbytes: int
    """Allocated so far."""
    limit_nbytes: int
    """Its limit."""


@dataclass(frozen=True)
class MemoryInfo:
    """The description that an import of a memory descriptor needs: sent with it, pickled for example."""

    nbytes: int
    """The bytes that were requested."""
    mapped_nbytes: int
    """The whole allocation, as the driver maps it."""
    device: str
    """The device that it lies on: its ``Device.uuid``."""

    def __post_init__(self) -> None:
        for name in ("nbytes", "mapped_nbytes"):
            if not 0 <= getattr(self, name) < 1 << 64:
                raise OverflowError(f"argument '{name}': {getattr(self, name)} bytes are out of range")


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


class SubscriberInfo(NamedTuple):
    """A subscriber, as ``Publisher.subscribers`` shows it."""

    pid: int
    """Its process id."""
    uid: int
    """Its effective user id."""
    state: PeerState
    """``"alive"``, ``"stalled"``, ``"leaving"``, ``"suspect"`` or ``"dead"``."""
    silent_for: float
    """Seconds since its last sign of life."""
    in_flight: int
    """Frames that it has received and not released."""
    dropped: int
    """Frames that it did not get because of the policy."""


class PreviousPublisher(NamedTuple):
    """The publisher before the one that a subscriber follows now."""

    pid: int
    """Its process id. One process may publish a name again."""
    graceful: bool
    """Whether it closed gracefully; otherwise it died, or the link to it ended first."""


class Discontinuity(NamedTuple):
    """A break between a frame and the one received before it."""

    missing: int
    """How many frames of this publisher are missing between this one and the one received before it. 0 on the
    first frame of another publisher: its numbers begin anew, unless both are those of a bridge for one source, and
    the numbers go on."""
    previous: PreviousPublisher | None
    """The publisher of the earlier frames, when it is another one than this frame's, else None."""


class QueueState(NamedTuple):
    """The state of a queue, or of a client's requests: see ``Queue.state``."""

    workers: list[int]
    """Process ids of the workers, or servers, that can get jobs."""
    waiting: int
    """Jobs that no worker has leased."""
    leased: int
    """Jobs that workers hold."""
    finished: int
    """Jobs that are done or dead-lettered, with an outcome that was not taken."""

    def __hash__(self) -> int:
        return hash((tuple(self.workers), *self[1:]))


class MemberInfo(NamedTuple):
    """A member, as ``Members`` shows it."""

    name: str
    """The name that it joined under."""
    role: str
    """The role that it states; empty until it has answered."""
    pid: int
    """Its process id as the kernel reports it; 0 if this PID namespace does not have it."""
    uid: int
    """Its user id."""
    state: PeerState
    """``"alive"``, ``"stalled"``, ``"suspect"``; in a change also ``"leaving"`` and ``"dead"``."""
    silent_for: float
    """Seconds since its last heartbeat."""
    since_ns: int
    """When it joined, in nanoseconds of ``time.monotonic_ns()``. Untrusted: the member states it."""
    generation: bytes
    """Its incarnation: every join under the name has another one."""
    endpoints: list[str]
    """The endpoints that its process holds in the domain; for a dead member, those that were left: they are free,
    and removed next."""

    def __hash__(self) -> int:
        return hash((self.name, self.generation))


class Change(NamedTuple):
    """A change of a member."""

    what: What
    """``"joined"``, ``"stalled"``, ``"recovered"``, ``"left"`` or ``"died"``."""
    member: MemberInfo
    """The member."""


class PoolStats(NamedTuple):
    """The state of a pool. A block that both the owner and a peer hold counts in both."""

    regions: int
    """Regions allocated on the device."""
    total_nbytes: int
    """Their bytes."""
    limit_nbytes: int
    """The limit of their bytes."""
    in_use_nbytes: int
    """Bytes in the owner's blocks."""
    lent_nbytes: int
    """Bytes in blocks that peers hold."""
    waiting_nbytes: int
    """Bytes in released blocks that a stream is not past yet."""
    high_water_nbytes: int
    """The most bytes that were not free at once."""
    allocations: int
    """Blocks handed out so far."""
    waits: int
    """How many of them had to wait for others."""
    peers: int
    """Peers that are connected, or still hold a block."""


for _one in (
    Change,
    Discontinuity,
    EndpointInfo,
    MemberInfo,
    MemoryInfo,
    MemoryUse,
    PoolStats,
    PoolUsage,
    PreviousPublisher,
    QueueState,
    Quota,
    SubscriberInfo,
):
    _one.__module__ = "warpipe"
