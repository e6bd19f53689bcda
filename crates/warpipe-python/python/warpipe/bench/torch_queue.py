"""The command ``python -m warpipe.bench.torch_queue``: round trips of GPU tensors through queues of
``torch.multiprocessing``, with ``warpipe.torch.install()`` and as PyTorch sends them, for each of PyTorch's allocators, in
rounds that take turns; and receivers that are killed while they hold tensors. Needs PyTorch.

Memory, shares or descriptors that grow with the killed receivers are an error, as is a wrong byte; a figure is a result."""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import pathlib
import queue
import signal
import statistics
import sys
import tempfile
import time
from typing import Any

import warpipe

from . import figures
from .__main__ import heading, sharing
from .weights import Ended, Failed, Process, end

# Names of PyTorch's allocators, and what PYTORCH_CUDA_ALLOC_CONF says for each.
ALLOCATORS = {
    "segments": "expandable_segments:False",
    "expandable": "expandable_segments:True",
    "pool": "expandable_segments:False",
}
SIZES = {"cuda": [4 << 10, 64 << 20, 1 << 30], "host": [4 << 10, 64 << 20]}
QUICK_SIZES = [4 << 10, 1 << 20]
# With two GPUs the tensors lie on the first one, and the answers on this one.
FIRST, SECOND = "cuda:0", "cuda:1"
ROUNDS, QUICK_ROUNDS = 20, 2
TURNS, QUICK_TURNS = 20, 5
KILLS, AT_ONCE = 200, 8
QUICK_KILLS, QUICK_AT_ONCE = 4, 2
# A median beside PyTorch's own.
WANTED = 1.0
# Seconds without a line of a worker.
PATIENCE = 300.0
# Bytes of the device, beside the sender's, that may differ between two looks at it: of other processes' contexts.
DEVICE_SLACK = 64 << 20
# Open files that come and go: sockets of receivers that have just died.
FILES_SLACK = 8


def arguments(given: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m warpipe.bench.torch_queue", description=__doc__)
    parser.add_argument("--device", help="a GPU if there is one")
    parser.add_argument("--devices", type=int, choices=[1, 2], default=1, help="2: the answers lie on a second GPU")
    parser.add_argument("--quick", action="store_true", help="shows that everything runs, not how fast it is")
    parser.add_argument("--allocator", choices=list(ALLOCATORS), action="append", help="all if left out")
    parser.add_argument("--kills", type=int, help=f"receivers that are killed for each allocator ({KILLS})")
    parser.add_argument("--at-once", type=int, help=f"receivers that are killed at the same time ({AT_ONCE})")
    parser.add_argument("--shared-gpu", action="store_true", help="other processes allocate on the GPU: its memory in use is not compared")
    parser.add_argument("--mode", help="how processes share the GPU, for the report; found by itself if left out")
    parser.add_argument("--out", type=pathlib.Path, help="write everything to this file, as JSON")
    asked = parser.parse_args(given)
    if asked.kills is None:
        asked.kills = QUICK_KILLS if asked.quick else KILLS
    if asked.at_once is None:
        asked.at_once = QUICK_AT_ONCE if asked.quick else AT_ONCE
    if asked.devices == 2 and asked.device is not None:
        parser.error(f"two devices are {FIRST} and {SECOND}: leave out --device")
    if asked.kills < 0 or asked.at_once < 1:
        parser.error("--kills is a number from 0, --at-once one from 1")
    return asked


class Bench:
    def __init__(self, device: str, asked: argparse.Namespace, domain: pathlib.Path) -> None:
        self.device, self.asked, self.domain = device, asked, domain
        self.kind = "host" if device == "host" else "cuda"
        self.runs: list[dict[str, Any]] = []
        self.processes: list[Process] = []

    def run(self) -> None:
        allocators = ["host"] if self.kind == "host" else self.asked.allocator or list(ALLOCATORS)
        # PyTorch itself sends no memory of other allocators.
        kinds = [(way, allocator) for allocator in allocators for way in ("plain", "warpipe") if (way, allocator) != ("plain", "pool")]
        # All of them import PyTorch at the same time, and then each waits for its turn.
        self.processes = [self.start(*kind) for kind in kinds]
        for process in self.processes:
            process.hear("ready")
        self.runs = [
            {"way": way, "allocator": allocator, "status": "cut off", "trips": [], "kills": []} for way, allocator in kinds
        ]
        while [run for run in self.runs if run["status"] == "cut off"]:
            for process, run in zip(self.processes, self.runs, strict=True):
                if run["status"] == "cut off":
                    self.measure(process, run)

    def start(self, way: str, allocator: str) -> Process:
        quick = self.asked.quick
        sizes, rounds, turns = (QUICK_SIZES, QUICK_ROUNDS, QUICK_TURNS) if quick else (SIZES[self.kind], ROUNDS, TURNS)
        command = [
            sys.executable, "-m", "warpipe.bench.torch_queue_worker", way, allocator, "--device", self.device,
            "--domain", str(self.domain), "--sizes", *map(str, sizes), "--rounds", str(rounds), "--turns", str(turns),
            "--kills", str(self.asked.kills if way == "warpipe" else 0), "--at-once", str(self.asked.at_once),
        ]  # fmt: skip
        if self.asked.devices == 2:
            command += ["--answers", SECOND]
        settings = {"PYTORCH_CUDA_ALLOC_CONF": ALLOCATORS[allocator]} if allocator in ALLOCATORS else {}
        return Process(command, {**os.environ, **settings})

    def measure(self, process: Process, run: dict[str, Any]) -> None:
        """The next round of a process, or its last step, in which it has receivers killed."""
        try:
            process.begin()
            while (line := said(process))["event"] not in ("step", "done"):
                self.take(run, line)
            if line["event"] == "step":
                return
            run["status"] = "measured"
        except Failed as failed:
            run |= {"status": "failed", "reason": str(failed)}
        if process.child.poll() is None:
            process.kill()
        print(f"{run['allocator']}, {run['way']}: {run['status']} {run.get('reason', '')}".rstrip(), flush=True)

    def take(self, run: dict[str, Any], line: dict[str, Any]) -> None:
        event = line.pop("event")
        if event == "failed":
            raise Failed(line["reason"])
        if event == "trips":
            if not run["trips"] or run["trips"][-1]["bytes"] != line["bytes"]:
                run["trips"].append({"bytes": line["bytes"], "took": [], "rounds": []})
            trips = run["trips"][-1]
            trips["took"] += line["took"]
            trips["rounds"].append(statistics.median(line["took"]))
            trips["ns"] = figures.quantiles(trips["took"])
            return
        run[event].append(line)
        if len(run["kills"]) > 1:
            check_flat(run["kills"][0]["state"], line["state"], line["killed"], shared_gpu=self.asked.shared_gpu)

    def close(self) -> None:
        for process in self.processes:
            if process.child.poll() is None:
                process.kill()

    def figures(self) -> list[dict[str, Any]]:
        """warpipe's round trips beside PyTorch's own."""
        found = {(run["allocator"], trip["bytes"], run["way"]): trip for run in self.runs for trip in run["trips"]}
        made, place = [], "two devices" if self.asked.devices == 2 else "one device"
        for (allocator, nbytes, way), trip in found.items():
            # Memory of a pool has its like in PyTorch's segments.
            plain = found.get(("segments" if allocator == "pool" else allocator, nbytes, "plain"))
            if way == "warpipe" and plain:
                ours, floor = (one["ns"]["p50"] / 1e3 for one in (trip, plain))
                # Of rounds side by side.
                ratios = sorted(one / other for one, other in zip(trip["rounds"], plain["rounds"], strict=False))
                made.append({
                    "bench": "torch_queue", "name": f"{figures.size_name(nbytes)}, {allocator}, {place}: a round trip, beside PyTorch's",
                    "unit": "us", "ours": ours, "floor": floor, "ratio": ours / floor, "ratios": [ratios[len(ratios) // 10], ratios[-1 - len(ratios) // 10]],
                    "wanted": {"ratio_at_most": WANTED}, "met": ours / floor <= WANTED,
                })  # fmt: skip
        return made


def said(process: Process) -> dict[str, Any]:
    try:
        line = process.lines.get(timeout=PATIENCE)
    except queue.Empty:
        raise Failed(f"no line within {PATIENCE} s") from None
    if line is None:
        raise Failed(f"the process ended: exit code {process.child.wait()}")
    return line


def check_flat(first: dict[str, int], now: dict[str, int], killed: int, shared_gpu: bool = False) -> None:
    """Compares what is in use after some kills with what was after the first ones. The memory in use of a GPU is that of all
    processes, so with others it says nothing."""
    if shared_gpu:
        first, now = ({name: state[name] for name in state if name != "used"} for state in (first, now))
    slack = {"files": FILES_SLACK, "used": DEVICE_SLACK}
    grown = {name: (first[name], now[name]) for name in first if now[name] > first[name] + slack.get(name, 0)}
    kept = {name: now[name] for name in now if name.startswith("shared") and now[name]}
    if grown or kept:
        raise Failed(f"after {killed} killed receivers there is more in use: grown {grown}, still shared {kept}")


def main(given: list[str] | None = None) -> int:
    asked = arguments(given)
    if importlib.util.find_spec("torch") is None:
        print("this benchmark needs torch: pip install torch", file=sys.stderr)
        return 2
    signal.signal(signal.SIGTERM, end)
    device = warpipe.Device(FIRST if asked.devices == 2 else asked.device)
    mode = asked.mode or sharing(device.kind)
    print(f"device: {device.name} ({device.uuid}), {mode}: {device.why}", flush=True)
    if asked.quick:
        print("quick: this shows that everything runs; the figures mean little", flush=True)
    ended, started = None, time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        name = "host" if device.kind == "host" else f"cuda:{device.ordinal}"
        bench = Bench(name, asked, pathlib.Path(folder) / "domain")
        try:
            bench.run()
        except (Ended, Failed) as signalled:
            ended = str(signalled)
        finally:
            bench.close()
    made = bench.figures()
    for figure in made:
        told, (low, high) = f"{figure['ours']:.0f} us beside {figure['floor']:.0f} us", figure["ratios"]
        print(f"{figure['name']}: {told}, ratio {figure['ratio']:.2f}; of rounds {low:.2f} to {high:.2f}")
    # PyTorch's own way may fail; warpipe's is this benchmark's subject.
    failed = [run for run in bench.runs if run["status"] == "failed" and run["way"] == "warpipe"]
    for run in failed:
        print(f"FAILED: {run['allocator']}: {run['reason']}", flush=True)
    if asked.out:
        report = {**heading(device, mode, asked), "seconds": time.monotonic() - started}
        for trip in (trip for run in bench.runs for trip in run["trips"]):
            del trip["took"]
        report |= {"torch_queue": bench.runs, "ended": ended, "figures": made}
        asked.out.write_text(json.dumps(report, indent=1) + "\n")
    return 1 if failed or ended else 0


if __name__ == "__main__":
    sys.exit(main())
