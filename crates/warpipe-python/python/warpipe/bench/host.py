"""The command ``python -m warpipe.bench.host``: a round trip of 4 KiB of host memory between two processes, by warpipe,
iceoryx2 and pyzmq, with both processes on one core and on two.

All copy the bytes in, and out into a ``bytes``. They take turns in the same two processes, so that what else the machine
does falls on all of them; the medians of the rounds are compared. iceoryx2 polls or sleeps, and the faster way counts.
warpipe is measured as it comes, and with fixed polls, which shows what the default's choice is worth. iceoryx2 and pyzmq
are left out where they are not installed."""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import importlib
import json
import multiprocessing
import os
import pathlib
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any, Protocol

import warpipe

from .__main__ import heading

NBYTES = 4096
TRIPS, ROUNDS = 2000, 7
QUICK_TRIPS, QUICK_ROUNDS = 50, 2
# Seconds: only a hang takes so long.
PATIENCE = 30
# Beside each of the others.
WANTED = 1.0
OURS = "warpipe"
# The ways of each other library; the fastest counts.
OTHERS = {"iceoryx2": ["iceoryx2, polling", "iceoryx2, asleep"], "pyzmq": ["pyzmq"]}


class Ends(Protocol):
    """One process's ends of a library: to the other process, and from it."""

    def connect(self) -> None: ...
    def send(self, data: bytes) -> None: ...
    def receive(self) -> bytes: ...
    def close(self) -> None: ...


class Warpipe:
    def __init__(self, folder: str, out: str, back: str, spin: float | None) -> None:
        self.domain, self.back, self.spin = os.path.join(folder, f"domain-{spin}"), back, spin
        self.publisher = warpipe.Publisher(out, domain=self.domain, device="host")

    def connect(self) -> None:
        options: dict[str, Any] = {"domain": self.domain, "device": "host", "spin": self.spin, "timeout": PATIENCE}
        self.subscriber = warpipe.Subscriber(self.back, wait=PATIENCE, **options)
        self.publisher.wait_for_subscribers()

    def send(self, data: bytes) -> None:
        self.publisher.send(data)

    def receive(self) -> bytes:
        with self.subscriber.receive() as frame:
            return bytes(frame)

    def close(self) -> None:
        self.subscriber.close()
        self.publisher.close()


class Iceoryx2:
    def __init__(self, folder: str, out: str, back: str, is_polling: bool) -> None:
        self.library = library = importlib.import_module("iceoryx2")
        library.set_log_level(library.LogLevel.Error)
        self.node = library.NodeBuilder.new().create(library.ServiceType.Ipc)
        # Its names are the machine's.
        self.prefix, self.is_polling = f"{folder}/{is_polling}", is_polling
        publisher = self.items(out).publisher_builder().initial_max_slice_len(NBYTES)
        self.publisher, self.back = publisher.create(), back
        self.notifier = None if is_polling else self.events(out).notifier_builder().create()

    def items(self, name: str) -> Any:
        payload = self.library.Slice[ctypes.c_uint8]
        builder = self.node.service_builder(self.library.ServiceName.new(f"{self.prefix}/{name}"))
        return builder.publish_subscribe(payload).open_or_create()

    def events(self, name: str) -> Any:
        return self.node.service_builder(self.library.ServiceName.new(f"{self.prefix}/{name}")).event().open_or_create()

    def connect(self) -> None:
        self.subscriber = self.items(self.back).subscriber_builder().create()
        self.listener = None if self.is_polling else self.events(self.back).listener_builder().create()
        self.patience = self.library.Duration.from_secs(PATIENCE)

    def send(self, data: bytes) -> None:
        loan = self.publisher.loan_slice_uninit(len(data))
        ctypes.memmove(loan.payload_ptr, data, len(data))
        loan.assume_init().send()
        if self.notifier is not None:
            self.notifier.notify()

    def receive(self) -> bytes:
        while (sample := self.subscriber.receive()) is None:
            if self.listener is None:
                # The other process may be on this core.
                os.sched_yield()
            else:
                self.listener.timed_wait(self.patience)
        data = ctypes.string_at(sample.payload_ptr, NBYTES)
        sample.delete()
        return data

    def close(self) -> None:
        for end in (self.subscriber, self.publisher, self.listener, self.notifier):
            if end is not None:
                end.delete()


class Zmq:
    def __init__(self, folder: str, out: str, back: str) -> None:
        self.library = importlib.import_module("zmq")
        self.context, self.folder, self.back = self.library.Context(), folder, back
        self.out = self.socket("PUSH")
        self.out.bind(f"ipc://{folder}/zmq-{out}")

    def socket(self, kind: str) -> Any:
        socket = self.context.socket(getattr(self.library, kind))
        socket.setsockopt(self.library.LINGER, 0)
        socket.setsockopt(self.library.RCVTIMEO, PATIENCE * 1000)
        socket.setsockopt(self.library.SNDTIMEO, PATIENCE * 1000)
        return socket

    def connect(self) -> None:
        self.inbox = self.socket("PULL")
        self.inbox.connect(f"ipc://{self.folder}/zmq-{self.back}")

    def send(self, data: bytes) -> None:
        self.out.send(data)

    def receive(self) -> bytes:
        data: bytes = self.inbox.recv()
        return data

    def close(self) -> None:
        self.context.destroy()


MADE: dict[str, Callable[[str, str, str], Ends]] = {
    OURS: lambda folder, out, back: Warpipe(folder, out, back, None),
    "warpipe, no poll": lambda folder, out, back: Warpipe(folder, out, back, 0.0),
    "warpipe, polls of 20 us": lambda folder, out, back: Warpipe(folder, out, back, 20e-6),
    "iceoryx2, polling": lambda folder, out, back: Iceoryx2(folder, out, back, True),
    "iceoryx2, asleep": lambda folder, out, back: Iceoryx2(folder, out, back, False),
    "pyzmq": Zmq,
}


def made(folder: str, out: str, back: str, both: Connection) -> dict[str, Ends]:
    """All ends of libraries that both processes have, connected."""
    ends: dict[str, Ends] = {}
    for name, make in MADE.items():
        with contextlib.suppress(ImportError):
            ends[name] = make(folder, out, back)
    both.send(list(ends))
    there = both.recv()
    for name in set(ends) - set(there):
        del ends[name]
    for end in ends.values():
        end.connect()
    # Those of the other process are connected, too.
    both.send("connected")
    both.recv()
    return ends


def answer(folder: str, core: int, both: Connection) -> None:
    """Sends back what comes."""
    os.sched_setaffinity(0, {core})
    ends = made(folder, "back", "forth", both)
    while (asked := both.recv()) is not None:
        name, trips = asked
        end = ends[name]
        for _ in range(trips):
            end.send(end.receive())
    for end in ends.values():
        end.close()


def ask(folder: str, core: int, both: Connection, result: Connection, trips: int, rounds: int) -> None:
    """Measures the round trips: for each name the median of each round, in microseconds."""
    os.sched_setaffinity(0, {core})
    ends = made(folder, "forth", "back", both)
    medians: dict[str, list[float]] = {name: [] for name in ends}
    data = bytes(range(256)) * (NBYTES // 256)
    # The first round warms up.
    for number in range(rounds + 1):
        for name, end in ends.items():
            both.send((name, trips))
            times = []
            for _ in range(trips):
                begin = time.perf_counter_ns()
                end.send(data)
                came = end.receive()
                times.append(time.perf_counter_ns() - begin)
                if came != data:
                    raise RuntimeError(f"{name}: other bytes came back")
            if number > 0:
                medians[name].append(statistics.median(times) / 1e3)
    both.send(None)
    for end in ends.values():
        end.close()
    result.send(medians)


def measure(cores: tuple[int, int], trips: int, rounds: int) -> dict[str, list[float]]:
    """The medians of two processes on these cores."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    result, sink = context.Pipe(duplex=False)
    with tempfile.TemporaryDirectory() as folder:
        processes = [
            context.Process(target=ask, args=(folder, cores[0], ours, sink, trips, rounds), daemon=True),
            context.Process(target=answer, args=(folder, cores[1], theirs), daemon=True),
        ]
        for process in processes:
            process.start()
        for end in (ours, theirs, sink):
            end.close()
        try:
            found: dict[str, list[float]] = result.recv()
        except EOFError:
            raise RuntimeError("a process of the benchmark ended; its words are above") from None
        for process in processes:
            process.join()
    return found


def figures(place: str, found: dict[str, list[float]]) -> list[dict[str, Any]]:
    """warpipe beside the fastest way of each other library."""
    middle = {name: statistics.median(rounds) for name, rounds in found.items()}
    made = []
    for other, ways in OTHERS.items():
        measured = [way for way in ways if way in middle]
        if not measured:
            continue
        fastest = min(measured, key=lambda way: middle[way])
        ratio = middle[OURS] / middle[fastest]
        made.append({
            "bench": "python host", "name": f"round trip of 4 KiB, {place}, beside {other}", "unit": "us",
            "ours": middle[OURS], "floor": middle[fastest], "ratio": ratio, "wanted": {"ratio_at_most": WANTED},
            "met": ratio <= WANTED, "ours_rounds": found[OURS], "floor_rounds": found[fastest], "note": fastest,
        })  # fmt: skip
    return made


def places() -> dict[str, tuple[int, int]]:
    able = sorted(os.sched_getaffinity(0))
    places = {f"both on core {able[0]}": (able[0], able[0])}
    if len(able) > 1:
        places[f"cores {able[0]} and {able[-1]}"] = (able[0], able[-1])
    return places


def main(given: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m warpipe.bench.host", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="shows that everything runs, not how fast it is")
    parser.add_argument("--out", type=pathlib.Path, help="write everything to this file, as JSON")
    asked = parser.parse_args(given)
    trips, rounds = (QUICK_TRIPS, QUICK_ROUNDS) if asked.quick else (TRIPS, ROUNDS)
    all_figures, all_medians = [], {}
    for place, cores in places().items():
        all_medians[place] = found = measure(cores, trips, rounds)
        told = ", ".join(f"{name} {statistics.median(medians):.1f} us" for name, medians in found.items())
        print(f"{place}: {told}", flush=True)
        all_figures += figures(place, found)
    lacking = [other for other, ways in OTHERS.items() if not any(way in found for way in ways)]
    for missing in lacking:
        print(f"left out: {missing} is not installed; pip install {missing}")
    for figure in all_figures:
        met = "met" if figure["met"] else "NOT MET"
        print(f"{figure['name']}: ratio {figure['ratio']:.2f}, wanted at most {WANTED:.2f}, {met}")
    if asked.out:
        asked.devices = 1
        device = warpipe.Device("host")
        report = {**heading(device, "host", asked), "medians_us": all_medians, "not_installed": lacking}
        report["figures"] = all_figures
        asked.out.write_text(json.dumps(report, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
