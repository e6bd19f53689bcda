"""The command ``python -m warpipe.bench``. A figure that was wanted and is not met is a result and no error; a contestant
that fails is one."""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import pathlib
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from importlib import metadata
from typing import Any

import warpipe

from . import calls, figures, ours, pair, plot, rivals, rust

SIZES = {"cuda": [4 << 10, 1 << 20, 64 << 20, 1 << 30], "host": [4 << 10, 1 << 20, 64 << 20]}
QUICK_SIZES = [4 << 10, 1 << 20]


def arguments(given: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m warpipe.bench", description="A round trip between two processes.")
    parser.add_argument("--device", choices=["cuda", "host"], help="where the tensors lie; a GPU if there is one")
    parser.add_argument("--devices", type=int, choices=[1, 2], default=1, help="2: also between two GPUs")
    parser.add_argument("--place", choices=["one", "two"], help="on one device, or between two, alone")
    parser.add_argument("--quick", action="store_true", help="shows that everything runs, not how fast it is")
    parser.add_argument("--mode", help="how processes share the GPU, for the report; found by itself if left out")
    parser.add_argument("--rust", help="the program `warpipe-bench`; its round trip is measured beside")
    parser.add_argument("--out", type=pathlib.Path, help="write everything to this file, as JSON")
    parser.add_argument("--svg", type=pathlib.Path, help="draw the round trips into this file")
    return parser.parse_args(given)


def main(given: list[str] | None = None) -> int:
    asked = arguments(given)
    device = warpipe.Device(asked.device)
    kind = device.kind
    if asked.place == "two" and asked.devices == 1:
        print("between two devices: say --devices 2 as well", file=sys.stderr)
        return 2
    if kind == "host" and asked.devices == 2:
        print(f"two devices need two GPUs; the device is the host ({device.why})", file=sys.stderr)
        return 2
    mode = asked.mode or sharing(kind)
    print(f"device: {device.name} ({device.uuid}), {mode}: {device.why}", flush=True)
    if asked.quick:
        print("quick: this shows that everything runs; the figures mean little", flush=True)
    records = measure(kind, asked.devices, asked.quick, asked.place)
    with tempfile.TemporaryDirectory() as folder:
        first = "cuda:0" if kind == "cuda" else "host"
        each = calls.measure(first, os.path.join(folder, "domain"), 50 if asked.quick else 1000)
    bare = rust.measure(asked.rust or shutil.which("warpipe-bench"), kind, asked.devices, asked.quick)
    print(f"Rust: {bare.status} {bare.reason}".rstrip())
    made = figures.figures(records, mode, bare)
    print(f"\n{figures.table(records)}\n{figures.legend(records)}\n\n{figures.verdicts(made)}\n\n{calls.line(each)}")
    if asked.out:
        report = heading(device, mode, asked)
        report |= {"contestants": records, "rust": dataclasses.asdict(bare), "calls": each, "figures": made}
        asked.out.write_text(json.dumps(report, indent=1) + "\n")
    if asked.svg:
        asked.svg.write_text(plot.svg(records, device.name if kind == "host" else f"{device.name}, {mode}"))
    failed = sum(found["status"] == "failed" for found in [*records, each, {"status": bare.status}])
    is_measured = any(record["role"] == "ours" and record["status"] == "measured" for record in records)
    print(f"\n{len(records)} of contestants, {failed} failed" + ("" if is_measured else ", and none of warpipe"))
    return 1 if failed or not is_measured else 0


def measure(kind: str, devices: int, quick: bool, only: str | None = None) -> list[dict[str, Any]]:
    """All contestants in all places, or in one."""
    contestants = ours.ON_GPUS + rivals.ON_GPUS if kind == "cuda" else ours.ON_HOST + rivals.ON_HOST
    first = "cuda:0" if kind == "cuda" else "host"
    places = [("one device", first)] + ([("two devices", "cuda:1")] if devices == 2 else [])
    places = [place for place in places if only is None or place[0].startswith(only)]
    sizes, plan = (QUICK_SIZES, pair.QUICK) if quick else (SIZES[kind], pair.Plan())
    records = []
    for name, other in places:
        for contestant in contestants:
            with tempfile.TemporaryDirectory() as folder:
                place = pair.Place(name, first, other, os.path.join(folder, "domain"))
                outcomes = pair.measure(contestant, place, sizes, plan)
            records += [figures.record(outcome) for outcome in outcomes]
            said = sorted({f"{outcome.status} {outcome.reason}".rstrip() for outcome in outcomes})
            print(f"{name}, {contestant.name}: {'; '.join(said)}", flush=True)
    return records


def sharing(kind: str) -> str:
    """How the processes share the GPU."""
    if kind == "host":
        return "host"
    try:
        asked = subprocess.run(
            ["nvidia-cuda-mps-control"], input="get_server_list\n", capture_output=True, text=True, timeout=20
        )
    except (OSError, subprocess.SubprocessError):
        return "time-sliced"
    return "mps" if asked.returncode == 0 else "time-sliced"


def heading(device: warpipe.Device, mode: str, asked: argparse.Namespace) -> dict[str, Any]:
    return {
        "version": warpipe.__version__,
        "time": int(time.time()),
        "device": device.name,
        "device_id": device.uuid,
        "why": device.why,
        "mode": mode,
        "devices": asked.devices,
        "quick": asked.quick,
        "cpus": len(os.sched_getaffinity(0)),
        "python": platform.python_version(),
        "packages": {name: version_of(name) for name in ("torch", "numpy", "cuda-core", "cuda-bindings")},
    }


def version_of(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


if __name__ == "__main__":
    sys.exit(main())
