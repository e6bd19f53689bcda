"""A trainer gives its weights to two engines after every step: one copy on the device, which both engines read.

    python trainer_to_engines.py [--syncs 1000] [--device host] [--domain DIR]

The keeper runs in a process of its own. The trainer publishes a version after each step; each engine follows, checks that
it has all of one version and none of another, and lets the previous one go. No process may hold more memory or
descriptors at the end than at the beginning.
"""

import argparse
import multiprocessing
import os
import tempfile
import time
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

import warpipe
from warpipe import weights

ENGINES, ROWS, COLUMNS = 2, 256, 1024
LIMIT_SECONDS = 60.0
NAME = "policy"
# The version in use, and the next one.
VERSIONS_AT_ONCE = 2
# Descriptors that a process opens once, after its first version, and that another thread is about to close.
DESCRIPTORS_MORE = 16


def state_at(step: int, device: warpipe.Device) -> dict[str, Any]:
    """The weights after a step: every element says which one. The last layer is tied to the first."""
    make: Any = np
    options = {}
    if device.kind == "cuda":
        import torch

        make, options = torch, {"device": f"cuda:{device.ordinal}"}
    embed = make.full((ROWS, COLUMNS), step, dtype=make.float32, **options)
    return {"embed": embed, "norm": make.full((COLUMNS,), -step, dtype=make.float32, **options), "head": embed}


def held(device: warpipe.Device, limit: int) -> tuple[int, int]:
    """The bytes that this process has mapped, and its open descriptors. A thread of the library unmaps a version after its
    last user: this waits until it has."""
    end = time.monotonic() + LIMIT_SECONDS
    while device.bytes_held > limit:
        assert time.monotonic() < end, f"old versions are freed: {device.bytes_held} bytes are mapped, wanted {limit}"
        time.sleep(0.001)
    return device.bytes_held, len(os.listdir("/proc/self/fd"))


def keep(pipe: Connection, domain: str) -> None:
    """The keeper: until the trainer has finished."""
    with weights.keep(NAME, domain=domain):
        pipe.send("ready")
        pipe.recv()


def engine(pipe: Connection, domain: str, name: str | None, syncs: int) -> None:
    """Follows the versions, and says for each what this process holds."""
    device = warpipe.Device(name)
    with weights.watch(NAME, device=device, domain=domain) as watch:
        version = limit = 0
        while version < syncs:
            with next(watch) as shared:
                version = shared.version
                # Nothing but the first version is mapped when it comes.
                limit = limit or VERSIONS_AT_ONCE * device.bytes_held
                for key, expected in (("embed", version), ("norm", -version), ("head", version)):
                    found = shared[key].numpy()
                    assert (found == expected).all(), f"{key} is of another version than {version}"
                del found
                assert shared.offset("embed") == shared.offset("head"), "tied weights lie there once"
                pipe.send((version, *held(device, limit)))
        pipe.recv()


def train(engines: list[Connection], domain: str, name: str | None, syncs: int) -> list[list[tuple[int, int]]]:
    """Publishes a version after each step, and gives what each process held at each of them."""
    device = warpipe.Device(name)
    seen: list[list[tuple[int, int]]] = [[] for _ in range(ENGINES + 1)]
    for step in range(1, syncs + 1):
        with weights.publish(NAME, state_at(step, device), device=device, domain=domain, wait=LIMIT_SECONDS) as published:
            assert published.version == step, "versions are numbered one after the other"
        for number, pipe in enumerate(engines):
            assert pipe.poll(LIMIT_SECONDS), f"engine {number} is silent at version {step}"
            version, *what = pipe.recv()
            assert version == step, "an engine that keeps up misses no version"
            seen[number].append((what[0], what[1]))
        seen[ENGINES].append(held(device, VERSIONS_AT_ONCE * seen[0][0][0]))
    return seen


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--syncs", type=int, default=1000)
    parser.add_argument("--device", default=None, help="host, cuda or cuda:N; the first GPU by default, else the host")
    parser.add_argument("--domain", default=None, help="the directory of names; a temporary one by default")
    options = parser.parse_args(arguments)
    print(f"device: {warpipe.Device(options.device)} ({warpipe.Device(options.device).why})")
    # CUDA does not survive a fork: processes are spawned.
    spawn = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        domain = options.domain or folder
        works = [(keep, (domain,))] + [(engine, (domain, options.device, options.syncs))] * ENGINES
        processes, pipes = [], []
        for work, given in works:
            ours, theirs = spawn.Pipe()
            processes.append(spawn.Process(target=work, args=(theirs, *given), daemon=True))
            processes[-1].start()
            theirs.close()
            pipes.append(ours)
        assert pipes[0].poll(LIMIT_SECONDS), "the keeper is silent"
        pipes[0].recv()
        seen = train(pipes[1:], domain, options.device, options.syncs)
        for pipe in pipes:
            pipe.send("end")
        for process in processes:
            process.join(LIMIT_SECONDS)
    assert [process.exitcode for process in processes] == [0] * len(processes), "all processes end well"
    quarter = max(1, options.syncs // 4)
    for process_seen in seen:
        # A thread of the library closes those of earlier versions: some are open at any moment, and none for long.
        first, last = (min(it[1] for it in part) for part in (process_seen[:quarter], process_seen[-quarter:]))
        assert last <= first + DESCRIPTORS_MORE, f"no descriptor is left open: {first} at first, then at least {last}"
    print(f"trainer: {options.syncs} versions to {ENGINES} engines, at most {max(w[0] for w in seen[0])} bytes mapped in one")


if __name__ == "__main__":
    main()
