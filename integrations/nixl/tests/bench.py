"""What a transfer between two processes takes, beside its floor, a copy of the same bytes, and NIXL's own UCX.

    python bench.py [--gpus 2] [--mib 1024] [--pieces 64] [--scattered] [--rounds 30]

With --gpus 1 both processes use GPU 0, with --gpus 2 the other one GPU 1, and the floor is a copy by the driver between the
same GPUs; without, the memory is the host's, and the floor a copy by one thread. Each round does the copy, then a write and
a read of each backend, so that a slow moment of the machine counts for all; each first without a clock, since a GPU that
other processes have used takes a turn of its time slices to begin. --scattered: no piece continues the one before. Prints a
line of JSON for each operation: medians of the rounds, in microseconds.
"""

import argparse
import functools
import json
import logging
import os
import random
import statistics
import tempfile
import time

import numpy
from agents import Memory, Process, finish, new_agent

BACKENDS = ("WARPIPE", "UCX")
FIRST_ROUNDS = 3
FLOOR = "copy"


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
    if gpus == 0:
        there = numpy.zeros(count, numpy.uint8)
        copy = functools.partial(numpy.copyto, there, side.memory.array)
    else:
        cuda = side.memory.cuda
        there = cuda.allocate_on(gpus - 1, count)
        copy = functools.partial(cuda.copy, there, side.memory.address, count)

    def seconds():
        began = time.perf_counter()
        copy()
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
    ways = {FLOOR: bare_copy(sides[0], count, options.gpus)}
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
    median_us = {way: statistics.median(seconds) * 1e6 for way, seconds in took.items()}
    for operation in sides[0].handles:
        figure, ucx = (median_us[f"{backend} {operation}"] for backend in BACKENDS)
        report = {
            **vars(options),
            "operation": operation,
            "warpipe_us": round(figure, 1),
            "copy_us": round(median_us[FLOOR], 1),
            "ucx_us": round(ucx, 1),
            "warpipe_gb_per_s": round(count / figure / 1e3, 1),
            "copy_over_warpipe": round(median_us[FLOOR] / figure, 3),
            "ucx_over_warpipe": round(ucx / figure, 3),
        }
        print(json.dumps(report))


if __name__ == "__main__":
    main()
