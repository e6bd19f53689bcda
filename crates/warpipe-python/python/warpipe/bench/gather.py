"""What it costs to gather a tensor with gaps, beside a plain copy of as many bytes and beside what frameworks have.

``python -m warpipe.bench.gather`` copies 64 MiB out of memory of twice that, as crops with rows of several lengths, mirrored
and transposed, with ``View.copy_from``. The floor is ``copy_from`` of 64 MiB without gaps (``cuMemcpyAsync``); PyTorch's and
CuPy's own copies of the same view, and on the host NumPy's, are measured in turns with it, where they are installed. *In two
dimensions* long rows go by the driver's copy of a box; the same rows *in four* always go by the kernel: where the two meet is
where the one should give way to the other.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import platform
import statistics
import time
from typing import Any, Callable

import warpipe

from .arrays import Missing, needed

ROWS = (16, 64, 128, 256, 512, 1024, 4096, 65536)
ROUNDS = 7
COPIES = 20
LIMIT_SECONDS = 60.0

Shape = tuple[int, ...]


class Lying:
    """A tensor in memory of warpipe's, as an array interface describes it."""

    def __init__(self, memory: warpipe.Memory, shape: Shape, strides: Shape, typestr: str = "|u1", first: int = 0) -> None:
        self.memory, self.shape, self.strides, self.typestr = memory, shape, strides, typestr
        name = "__array_interface__" if memory.device.kind == "host" else "__cuda_array_interface__"
        data = (memory.ptr + first, False)
        setattr(self, name, {"version": 3, "shape": shape, "strides": strides, "typestr": typestr, "data": data})


def cases(source: warpipe.Memory, nbytes: int) -> dict[str, Lying]:
    """Every tensor that is gathered: ``nbytes`` bytes out of twice as many."""
    found = {}
    for row in ROWS:
        count = nbytes // row
        found[f"rows of {row} B, in two dimensions"] = Lying(source, (count, row), (2 * row, 1))
        # As long rows as far apart, in 16 parts with a row more between them, so that no two
        # dimensions are one.
        part = count // 16 - 2
        if part > 1:
            plane = (part + 1) * 2 * row
            strides = (4 * plane + 2 * row, plane, 2 * row, 1)
            found[f"rows of {row} B, in four dimensions"] = Lying(source, (4, 4, part, row), strides)
    side = int((nbytes // 4) ** 0.5)
    found["transposed float32"] = Lying(source, (side, side), (4, 4 * side), "<f4")
    pixels = nbytes // 3 // 1024 * 1024
    found["mirrored uint8 channels"] = Lying(source, (pixels // 1024, 1024, 3), (3 * 1024, 3, -1), first=2)
    return found


def rivals(device: warpipe.Device) -> dict[str, Callable[[Lying, int], Callable[[], Any]]]:
    """Others' copies of such a tensor into a new one, and of which of them is waited for."""
    found: dict[str, Callable[[Lying, int], Callable[[], Any]]] = {}
    if device.kind == "host":
        numpy = needed("numpy")
        found["NumPy"] = lambda lying, _: (lambda: numpy.array(numpy.asarray(lying), order="C"))
        return found
    for name, make in (("torch", _torch), ("cupy", _cupy)):
        try:
            found[name] = make(device.ordinal)
        except Missing as missing:
            print(f"{name}: skipped: {missing}")
    return found


def _torch(ordinal: int) -> Callable[[Lying, int], Callable[[], Any]]:
    torch = needed("torch")
    if not torch.cuda.is_available():
        raise Missing("PyTorch finds no GPU here")

    def prepare(lying: Lying, stream: int) -> Callable[[], Any]:
        if min(lying.strides) < 0:
            raise Missing("PyTorch has no negative strides")
        view = torch.as_tensor(lying, device=f"cuda:{ordinal}")
        outer = torch.cuda.ExternalStream(stream)

        def copy() -> None:
            with torch.cuda.stream(outer):
                view.contiguous()

        return copy

    return prepare


def _cupy(ordinal: int) -> Callable[[Lying, int], Callable[[], Any]]:
    cupy = needed("cupy")

    def prepare(lying: Lying, stream: int) -> Callable[[], Any]:
        view = cupy.asarray(lying)
        outer = cupy.cuda.ExternalStream(stream)

        def copy() -> None:
            with outer:
                cupy.ascontiguousarray(view)

        return copy

    return prepare


def ours(lying: Lying, into: warpipe.View, stream: warpipe.Stream) -> Callable[[], Any]:
    return lambda: into.copy_from(lying, stream=stream)


def microseconds(copy: Callable[[], Any], stream: warpipe.Stream, copies: int) -> float:
    """One of ``copies`` that are enqueued behind each other and waited for once."""
    begin = time.perf_counter_ns()
    for _ in range(copies):
        copy()
    stream.synchronize(LIMIT_SECONDS)
    return (time.perf_counter_ns() - begin) / copies / 1e3


def measure(device: warpipe.Device, nbytes: int, rounds: int, copies: int) -> list[dict[str, Any]]:
    """A row for each tensor: our copy, the floor, the others', in microseconds: the median of the rounds."""
    source = warpipe.Memory.allocate(2 * nbytes, device=device)
    target = warpipe.Memory.allocate(nbytes, device=device)
    stream, others, rows = warpipe.Stream(device), rivals(device), []
    for name, lying in cases(source, nbytes).items():
        dtype = "float32" if lying.typestr == "<f4" else "uint8"
        into = target.view(lying.shape, dtype)
        plain = Lying(source, (into.nbytes,), (1,))
        whole = target.view((into.nbytes,), "uint8")
        ways: dict[str, Callable[[], Any]] = {
            "ours": ours(lying, into, stream),
            "floor": ours(plain, whole, stream),
        }
        for other, prepare in others.items():
            try:
                ways[other] = prepare(lying, stream.ptr)
            except Missing as missing:
                print(f"{name}, {other}: skipped: {missing}")
        taken: dict[str, list[float]] = {way: [] for way in ways}
        for number in range(rounds + 1):
            for way, copy in ways.items():
                found = microseconds(copy, stream, copies)
                if number > 0:
                    taken[way].append(found)
        us = {way: statistics.median(found) for way, found in taken.items()}
        rows.append({"name": name, "bytes": into.nbytes, "us": us, "ratio": us["ours"] / us["floor"]})
        rest = ", ".join(f"{way} {us[way]:.1f}" for way in others if way in us)
        told = f"{us['ours']:.1f} us, floor {us['floor']:.1f}, ratio {rows[-1]['ratio']:.2f}"
        print(f"{name} ({into.nbytes / (1 << 20):.1f} MiB): {told}{', ' + rest if rest else ''}", flush=True)
        into.release()
        whole.release()
    return rows


def main(given: list[str] | None = None) -> None:
    """Prints a line for each tensor."""
    parser = argparse.ArgumentParser(prog="python -m warpipe.bench.gather", description="Gathers tensors with gaps.")
    parser.add_argument("--device", help="where the tensors lie; a GPU if there is one")
    parser.add_argument("--quick", action="store_true", help="shows that everything runs, not how fast it is")
    parser.add_argument("--out", type=pathlib.Path, help="write everything to this file, as JSON")
    asked = parser.parse_args(given)
    device = warpipe.Device(asked.device)
    machine = f"{platform.machine()}, {len(os.sched_getaffinity(0))} CPUs, Python {platform.python_version()}"
    print(f"device: {device.name} ({device.uuid}); {machine}", flush=True)
    size, rounds, copies = (1 << 20, 1, 2) if asked.quick else (64 << 20, ROUNDS, COPIES)
    rows = measure(device, size, rounds, copies)
    if asked.out:
        heading = {"device": device.name, "device_id": device.uuid, "machine": machine, "time": int(time.time())}
        asked.out.write_text(json.dumps({**heading, "quick": asked.quick, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
