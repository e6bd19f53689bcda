"""What a transfer between two processes takes, beside a device copy of the same bytes and NIXL's own UCX.

    python bench.py [--gpus 2] [--mib 1024] [--pieces 64] [--scattered] [--rounds 30]

Without --gpus the memory is the host's. Each round does the copy, then a write and a read of each backend, so that a slow
moment of the machine counts for all; each first without a clock, since a GPU that other processes have used takes a turn of
its time slices to begin. --scattered: no piece continues the one before. Prints a line of JSON with the medians.
"""

import argparse
import json
import logging
import os
import random
import statistics
import tempfile
import time

from agents import Memory, Process, finish, new_agent

BACKENDS = ("WARPIPE", "UCX")
FIRST_ROUNDS = 3


class Side:
    """An agent of this process, and one of another that it transfers to and from."""

    def __init__(self, backend, count, pieces, gpus, scattered):
        self.backend, kind = backend, "DRAM" if gpus == 0 else "VRAM"
        gpu, other = (None, None) if gpus == 0 else (0, gpus - 1)
        self.target = Process("target", count, pieces, value=7, gpu=other, backend=backend)
        self.agent = new_agent("initiator", backend)
        self.memory = Memory(self.agent, count, pieces, value=1, gpu=gpu)
        name = self.agent.add_remote_agent(self.target.metadata)
        there = list(self.target.tuples)
        if scattered:
            random.Random(1).shuffle(there)
        remote = self.agent.get_xfer_descs(there, kind)
        local = self.memory.descriptors()
        self.handles = {
            operation: self.agent.initialize_xfer(operation, local, remote, name) for operation in ("WRITE", "READ")
        }

    def seconds(self, operation):
        handle, began = self.handles[operation], time.perf_counter()
        state = finish(self.agent, handle, self.agent.transfer(handle))
        took = time.perf_counter() - began
        assert state == "DONE", f"{self.backend} {operation}: {state}"
        return took

    def check(self):
        """The bytes are the target's, then this process's."""
        self.seconds("READ")
        assert self.memory.values() == [7]
        self.memory.fill(9)
        self.seconds("WRITE")
        assert self.target.ask("values") == [9]


def bare_copy(side, count, gpus):
    """The same bytes, between memory of this process."""
    cuda = side.memory.cuda
    there = cuda.allocate_on(gpus - 1, count)

    def seconds():
        began = time.perf_counter()
        cuda.copy(there, side.memory.address, count)
        return time.perf_counter() - began

    return seconds


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--gpus", type=int, choices=(0, 1, 2), default=0)
    parser.add_argument("--mib", type=int, default=1024)
    parser.add_argument("--pieces", type=int, default=64)
    parser.add_argument("--scattered", action="store_true")
    parser.add_argument("--rounds", type=int, default=30)
    options = parser.parse_args()
    logging.disable(logging.INFO)
    os.environ.setdefault("WARPIPE_DOMAIN", tempfile.mkdtemp(prefix="nixl-bench-"))
    count = options.mib << 20
    sides = [Side(backend, count, options.pieces, options.gpus, options.scattered) for backend in BACKENDS]
    ways = {}
    if options.gpus:
        ways["device copy"] = bare_copy(sides[0], count, options.gpus)
    for side in sides:
        side.check()
        for operation in side.handles:
            ways[f"{side.backend} {operation}"] = lambda side=side, operation=operation: side.seconds(operation)
    took = {way: [] for way in ways}
    for turn in range(FIRST_ROUNDS + options.rounds):
        for way, seconds in ways.items():
            seconds()
            one = seconds()
            if turn >= FIRST_ROUNDS:
                took[way].append(one)
    for side in sides:
        side.target.end()
    medians = {way: statistics.median(seconds) for way, seconds in took.items()}
    report = {
        "gpus": options.gpus,
        "mib": options.mib,
        "pieces": options.pieces,
        "scattered": options.scattered,
        "rounds": options.rounds,
        "median_us": {way: round(seconds * 1e6, 1) for way, seconds in medians.items()},
        "gb_per_s": {way: round(count / seconds / 1e9, 1) for way, seconds in medians.items()},
    }
    if options.gpus:
        floor = medians["device copy"]
        report["of_the_device_copy"] = {way: round(floor / seconds, 3) for way, seconds in medians.items()}
    print(json.dumps(report))


if __name__ == "__main__":
    main()
