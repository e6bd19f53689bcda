"""What a wait's polls cost and bring: a round trip of small frames on the host, on one core and on two.

``python -m warpipe.bench.spin`` pins two processes to one core, then to two, and measures round trips with no poll, with
20 us, and with the default, which follows what pays. Each is measured in turns, so that what else the machine does falls
on all of them; of the rounds the best median counts.
"""

from __future__ import annotations

import multiprocessing
import os
import statistics
import tempfile
import time
from multiprocessing.connection import Connection

import warpipe

POLLS: dict[str, float | None] = {"none": 0.0, "20 us": 20e-6, "default": None}
ROUND_TRIPS = 3000
ROUNDS = 5


def echo(domain: str, core: int, spin: float | None, pipe: Connection) -> None:
    """Sends back what comes, until there is a frame without contents."""
    os.sched_setaffinity(0, {core})
    with warpipe.Publisher("back", domain=domain, device="host") as back:
        subscriber = warpipe.Subscriber("forth", domain=domain, device="host", spin=spin, wait=10)
        pipe.send("ready")
        back.wait_for_subscribers()
        for frame in subscriber:
            with frame:
                back.send(b"1")
                if frame.nbytes == 0:
                    return


def median_us(cores: tuple[int, int], spin: float | None) -> float:
    """The median of the round trips between two processes on these cores."""
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        domain = os.path.join(folder, "domain")
        ours, theirs = context.Pipe()
        with warpipe.Publisher("forth", domain=domain, device="host") as forth:
            child = context.Process(target=echo, args=(domain, cores[1], spin, theirs))
            child.start()
            ours.recv()
            os.sched_setaffinity(0, {cores[0]})
            subscriber = warpipe.Subscriber("back", domain=domain, device="host", spin=spin, wait=10)
            forth.wait_for_subscribers()
            times = []
            for _ in range(ROUND_TRIPS):
                begin = time.perf_counter_ns()
                forth.send(b"1")
                subscriber.receive().release()
                times.append(time.perf_counter_ns() - begin)
            forth.send(b"")
            subscriber.receive().release()
            subscriber.close()
            child.join()
    return statistics.median(times) / 1e3


def main() -> None:
    """Prints a line for each pair of cores."""
    able = sorted(os.sched_getaffinity(0))
    places = {"one core": (able[0], able[0])}
    if len(able) > 1:
        places["two cores"] = (able[0], able[1])
    for place, cores in places.items():
        found: dict[str, list[float]] = {name: [] for name in POLLS}
        for _ in range(ROUNDS):
            for name, spin in POLLS.items():
                found[name].append(median_us(cores, spin))
        best = {name: min(times) for name, times in found.items()}
        ratio = best["default"] / min(best["none"], best["20 us"])
        told = ", ".join(f"{name} {microseconds:.1f} us" for name, microseconds in best.items())
        print(f"{place}: {told}; the default is {ratio:.2f} x the better of the others")


if __name__ == "__main__":
    main()
