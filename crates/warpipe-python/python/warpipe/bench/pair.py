"""Two processes that a contestant is measured in. Whatever they do, the measurement ends: they are killed when they say
nothing for too long, and what was not measured is reported with its reason."""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import multiprocessing
import time
import traceback
from dataclasses import dataclass, field
from multiprocessing import connection
from multiprocessing.connection import Connection
from typing import Any, Iterator, Literal

from .arrays import HEAD, Arrays, Missing, arrays_of
from .contest import Contestant, Side, check, elements

# PyTorch's tensors are ordered by at most 1000 events of one storage's sending; a run stays below
# that.
TRIPS_MAX = 1000

# Seconds a process may take to import a framework, make a context and load its kernels.
START_SECONDS = 180.0
# Seconds that all round trips of one size may take.
SIZE_SECONDS = 120.0
END_SECONDS = 20.0
DEATH_SECONDS = 1.0


@dataclass(frozen=True)
class Plan:
    """How often: round trips that are not counted, and rounds of both ways of measuring."""

    warm_up: int = 40
    rounds: int = 5
    # Round trips of a round of which A's CPU waits for the last only.
    chained: int = 100
    # Round trips of a round of which A's CPU waits for each.
    awaited: int = 80

    @property
    def trips(self) -> int:
        return self.warm_up + self.rounds * (self.chained + self.awaited)


QUICK = Plan(warm_up=5, rounds=2, chained=10, awaited=10)


@dataclass
class Outcome:
    """What came of one contestant at one size."""

    contestant: str
    role: str
    place: str
    bytes: int
    status: Literal["measured", "failed", "skipped"]
    reason: str = ""
    # Microseconds a round trip, of each round.
    chained_us: list[float] = field(default_factory=list)
    # Nanoseconds of each round trip.
    awaited_ns: list[int] = field(default_factory=list)
    # Which kernel ran.
    kernel: str = ""


@dataclass(frozen=True)
class Place:
    """Where the two processes work."""

    name: str
    device: str
    other_device: str
    domain: str


def measure(contestant: type[Contestant], place: Place, sizes: list[int], plan: Plan) -> list[Outcome]:
    """Runs a contestant at all sizes, in as few pairs of processes as it survives."""
    assert plan.trips < TRIPS_MAX
    outcomes: list[Outcome] = []
    allowed = [size for size in sizes if contestant.bytes_max is None or size <= contestant.bytes_max]
    while len(outcomes) < len(allowed):
        outcomes += _Pair(contestant, place, allowed[len(outcomes) :], plan).run()
    return outcomes + [
        _outcome(contestant, place, size, "skipped", contestant.bytes_max_reason)
        for size in sizes
        if size not in allowed
    ]


def _outcome(
    contestant: type[Contestant],
    place: Place,
    size: int,
    status: Literal["measured", "failed", "skipped"],
    reason: str = "",
) -> Outcome:
    kernel = contestant.kernel_between(place.device, place.other_device)
    return Outcome(contestant.name, contestant.role, place.name, size, status, reason, kernel=kernel)


class _Pair:
    """Two fresh processes and what they say."""

    def __init__(self, contestant: type[Contestant], place: Place, sizes: list[int], plan: Plan) -> None:
        self.contestant, self.place, self.sizes = contestant, place, sizes
        spawn = multiprocessing.get_context("spawn")
        pipes = spawn.Pipe()
        queues = (spawn.Queue(), spawn.Queue())
        # Kept: the children open their semaphores by name.
        self.queues = queues
        self.has_started = False
        self.children: list[Any] = []
        self.controls: list[Connection] = []
        for number, device in enumerate((place.device, place.other_device)):
            ours, theirs = spawn.Pipe()
            other = (place.other_device, place.device)[number]
            side = Side(
                is_a=number == 0,
                device=device,
                other_device=other,
                domain=place.domain,
                limit=SIZE_SECONDS,
                pipe=pipes[number],
                inbox=queues[1 - number],
                outbox=queues[number],
            )
            child = spawn.Process(target=_play, args=(theirs, contestant, side, sizes, plan), daemon=True)
            child.start()
            # Only the child holds it now: its end is seen here.
            theirs.close()
            self.children.append(child)
            self.controls.append(ours)
        for pipe in pipes:
            pipe.close()

    def run(self) -> list[Outcome]:
        """At least one outcome: all sizes, or those up to the first that failed."""
        outcomes: list[Outcome] = []
        try:
            self.hear_both(START_SECONDS)
            self.has_started = True
            for size in self.sizes:
                (said, _) = self.hear_both(SIZE_SECONDS)
                outcome = self.outcome(size, "measured")
                outcome.chained_us, outcome.awaited_ns = said
                outcomes.append(outcome)
            self.hear_both(END_SECONDS)
        except Missing as missing:
            # It will not be there for the other sizes either.
            outcomes += [self.outcome(size, "skipped", str(missing)) for size in self.sizes[len(outcomes) :]]
        except _Failed as failed:
            missed = self.sizes[len(outcomes) :]
            if missed:
                # What cannot start at all need not be tried again for the other sizes.
                missed = missed[:1] if self.has_started else missed
                reason = "; ".join([str(failed), *self.deaths()])
                outcomes += [self.outcome(size, "failed", reason) for size in missed]
            else:
                outcomes[-1].status, outcomes[-1].reason = "failed", f"measured, but it did not end well: {failed}"
        finally:
            self.end(well=bool(outcomes) and outcomes[-1].status != "failed")
        return outcomes

    def outcome(self, size: int, status: Literal["measured", "failed", "skipped"], reason: str = "") -> Outcome:
        return _outcome(self.contestant, self.place, size, status, reason)

    def hear_both(self, limit: float) -> list[Any]:
        """What A and B say next. The first that says it cannot go on ends the pair."""
        said: dict[int, Any] = {}
        end = time.monotonic() + limit
        while len(said) < len(self.controls):
            open_ones = [control for number, control in enumerate(self.controls) if number not in said]
            ready = connection.wait(open_ones, max(0.0, end - time.monotonic()))
            if not ready:
                silent = " and ".join("AB"[number] for number in range(2) if number not in said)
                raise _Failed(f"{silent} said nothing for {limit:.0f} s")
            for control in ready:
                number = self.controls.index(control)  # type: ignore[arg-type]
                said[number] = self.hear(number)
        return [said[number] for number in range(2)]

    def hear(self, number: int) -> Any:
        try:
            kind, value = self.controls[number].recv()
        except (EOFError, OSError):
            # Its exit code says more.
            self.children[number].join(END_SECONDS)
            raise _Failed(f"{'AB'[number]} has gone") from None
        if kind == "missing":
            raise Missing(value)
        if kind == "failed":
            raise _Failed(f"{'AB'[number]}: {value}")
        return value

    def deaths(self) -> list[str]:
        """Which of the two died. What the other one says may only follow from that, and come a moment sooner."""
        ended = connection.wait([child.sentinel for child in self.children], DEATH_SECONDS)
        for child in self.children:
            if child.sentinel in ended:
                # A process closes its files, this one too, before it has an exit code.
                child.join(END_SECONDS)
        codes = [(name, child.exitcode) for name, child in zip("AB", self.children)]
        return [f"{name} ended with exit code {code}" for name, code in codes if code is not None]

    def end(self, well: bool) -> None:
        """Lets both end by themselves if all went well. None is left."""
        for control in self.controls:
            control.close()
        for child in self.children:
            if well:
                child.join(END_SECONDS)
            if child.is_alive():
                child.kill()
                child.join(END_SECONDS)
            child.close()


class _Failed(Exception):
    """The pair cannot go on."""


def _play(control: Connection, contestant: type[Contestant], side: Side, sizes: list[int], plan: Plan) -> None:
    """A child's whole life: says ``("ok", value)`` for its start, each size, and its end; or why it cannot go on."""
    faulthandler.enable()
    with _told(control):
        arrays = arrays_of(side.device)
        player = contestant(side, arrays)
        control.send(("ok", None))
        for size in sizes:
            player.open(elements(size))
            said = None
            if side.is_a:
                said = _Leader(player, arrays).play(plan)
            else:
                _answer(player, arrays, plan)
            player.close()
            # The other's streams may use this process's memory until it has come here.
            arrays.synchronize()
            side.meet()
            gc.collect()
            control.send(("ok", said))
        control.send(("ok", None))


@contextlib.contextmanager
def _told(control: Connection) -> Iterator[None]:
    """Passes an exception on, if the parent still listens: the second failure is not read any more."""
    last: tuple[str, str] | None = None
    try:
        yield
    except Missing as missing:
        last = ("missing", str(missing))
    except BaseException as error:
        where = traceback.extract_tb(error.__traceback__)[-1]
        place = f"{where.filename.rpartition('/')[2]}:{where.lineno}"
        last = ("failed", f"{type(error).__name__}: {error} ({place})")
    with contextlib.suppress(EOFError, OSError):
        if last:
            control.send(last)
        # Until the other has ended, too: this process's memory stays as long as somebody may look
        # at it.
        control.recv()


class _Leader:
    """A's part. The value grows by one in each kernel, so by two in each round trip."""

    def __init__(self, player: Contestant, arrays: Arrays) -> None:
        self.player, self.arrays = player, arrays
        # The head of the last tensor received. Nobody else keeps it: a contestant may lend a few
        # only.
        self.theirs: Any = arrays.zeros(HEAD)
        self.awaited_ns: list[int] = []

    def play(self, plan: Plan) -> tuple[list[float], list[int]]:
        chained_us: list[float] = []
        done = plan.warm_up
        self.chained(plan.warm_up)
        for _ in range(plan.rounds):
            chained_us.append(self.chained(plan.chained) / 1e3 / plan.chained)
            self.awaited(plan.awaited)
            done += plan.chained + plan.awaited
            check(self.arrays.values(self.theirs), 2 * done, "A")
        return chained_us, self.awaited_ns

    def chained(self, trips: int) -> int:
        """Round trips of which only the last is waited for. Returns the nanoseconds of all of them."""
        hand_over, receive = self.player.hand_over, self.player.receive
        theirs, self.theirs = self.theirs, None
        start = time.perf_counter_ns()
        for _ in range(trips):
            hand_over(theirs)
            theirs = None
            theirs = receive()
        self.arrays.synchronize()
        taken = time.perf_counter_ns() - start
        self.theirs = theirs
        return taken

    def awaited(self, trips: int) -> None:
        """Round trips that are each waited for."""
        hand_over, receive, synchronize = self.player.hand_over, self.player.receive, self.arrays.synchronize
        theirs, self.theirs = self.theirs, None
        for _ in range(trips):
            start = time.perf_counter_ns()
            hand_over(theirs)
            theirs = None
            theirs = receive()
            synchronize()
            self.awaited_ns.append(time.perf_counter_ns() - start)
        self.theirs = theirs


def _answer(player: Contestant, arrays: Arrays, plan: Plan) -> None:
    """B's part."""
    last = plan.trips
    for trip in range(1, last + 1):
        theirs = player.receive()
        player.hand_over(theirs)
        if trip == last:
            check(arrays.values(theirs), 2 * trip - 1, "B")
        theirs = None
