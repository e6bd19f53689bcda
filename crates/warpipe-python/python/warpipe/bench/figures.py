"""What was measured, compared: for people, and for programs in the shape that ``warpipe-bench --out`` writes."""

from __future__ import annotations

import statistics
from typing import Any

from .arrays import DIRECT, NUMPY, PYTORCH
from .pair import Outcome
from .rust import Rust

# torch.multiprocessing over warpipe: at least this. Time-sliced contexts cost both two switches a
# round trip.
RATIO_WANTED = 10.0
RATIO_WANTED_TIME_SLICED = 1.25
# Microseconds that Python may add to the Rust library's round trip.
BESIDE_RUST_WANTED = 15.0


def quantiles(samples: list[int]) -> dict[str, int] | None:
    """The ranks of the sorted samples, in their unit; None of nothing."""
    ranked = sorted(samples)
    if not ranked:
        return None

    def at(permille: int) -> int:
        return ranked[max(1, -(-len(ranked) * permille // 1000)) - 1]

    return {"count": len(ranked), "p50": at(500), "p90": at(900), "p99": at(990), "max": ranked[-1]}


def size_name(size: int) -> str:
    for unit, name in ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")):
        if size % unit == 0:
            return f"{size // unit} {name}"
    return f"{size} B"


def record(outcome: Outcome) -> dict[str, Any]:
    """An outcome as it is reported."""
    measured = outcome.status == "measured"
    return {
        "contestant": outcome.contestant,
        "role": outcome.role,
        "kernel": outcome.kernel,
        "place": outcome.place,
        "bytes": outcome.bytes,
        "status": outcome.status,
        "reason": outcome.reason,
        "chained_us": statistics.median(outcome.chained_us) if measured else None,
        "chained_rounds_us": outcome.chained_us,
        "awaited_ns": quantiles(outcome.awaited_ns),
    }


def figures(records: list[dict[str, Any]], mode: str, rust: Rust) -> list[dict[str, Any]]:
    """Everything that was wanted, as far as both sides of it were measured."""
    made = []
    measured = [record for record in records if record["status"] == "measured"]
    for ours in (record for record in measured if record["role"] == "ours"):
        place, size = ours["place"], ours["bytes"]
        usual = [
            record
            for record in measured
            if (record["role"], record["place"], record["bytes"]) == ("usual", place, size)
        ]
        name = f"{size_name(size)}, {place}"
        for way in ("chained", "awaited"):
            if usual:
                # The fastest of its ways is the one to beat.
                best = min(usual, key=lambda record: microseconds(record, way))
                made.append(beside_usual(f"{name}, {way}: {best['contestant']} over warpipe", ours, best, way, mode))
            bare = rust.microseconds(place, size, way)
            if bare is not None:
                made.append(beside_rust(f"{name}, {way}: warpipe from Python beside Rust", ours, bare, way, mode))
    return made


def microseconds(record: dict[str, Any], way: str) -> float:
    """A round trip: the median of the rounds, or of those that were each waited for."""
    return float(record["chained_us"]) if way == "chained" else float(record["awaited_ns"]["p50"]) / 1e3


def beside_usual(
    name: str, ours: dict[str, Any], usual: dict[str, Any], way: str, mode: str
) -> dict[str, Any]:
    mine, theirs = microseconds(ours, way), microseconds(usual, way)
    wanted = None if mode == "host" else RATIO_WANTED
    if mode == "time-sliced" and ours["place"] == "one device":
        wanted = RATIO_WANTED_TIME_SLICED
    ratio = theirs / mine
    met = None if wanted is None else ratio >= wanted
    return _figure(name, mine, theirs, ratio, {"ratio_at_least": wanted} if wanted else "nothing", met)


def beside_rust(name: str, ours: dict[str, Any], bare: float, way: str, mode: str) -> dict[str, Any]:
    mine = microseconds(ours, way)
    wanted: Any = "nothing" if mode == "host" else {"beside_floor_at_most": BESIDE_RUST_WANTED}
    met = None if mode == "host" else mine - bare <= BESIDE_RUST_WANTED
    return _figure(name, mine, bare, mine / bare, wanted, met)


def _figure(
    name: str, ours: float, floor: float, ratio: float, wanted: dict[str, float | None] | str, met: bool | None
) -> dict[str, Any]:
    return {
        "bench": "python", "name": name, "unit": "us", "ours": ours, "floor": floor, "ratio": ratio,
        "wanted": wanted, "met": met,
    }  # fmt: skip


def table(records: list[dict[str, Any]]) -> str:
    """All contestants under each other, the fastest first, beside warpipe's ``loan``."""
    rows = [["place", "size", "contestant", "kernel", "us", "awaited p50", "p90", "p99", "/ warpipe", ""]]
    for place, size in sorted({(record["place"], record["bytes"]) for record in records}):
        here = [record for record in records if (record["place"], record["bytes"]) == (place, size)]
        ours = next((r for r in here if r["role"] == "ours" and r["status"] == "measured"), None)
        order = {"measured": 0, "failed": 1, "skipped": 2}
        for record in sorted(here, key=lambda record: (order[record["status"]], record["chained_us"] or 0.0)):
            rows.append([place, size_name(size), record["contestant"], record["kernel"], *_numbers(record, ours)])
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    left = (0, 1, 2, 3, 9)
    return "\n".join(
        "  ".join(
            cell.ljust(width) if column in left else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths))
        ).rstrip()
        for row in rows
    )


def legend(records: list[dict[str, Any]]) -> str:
    """What the kernels' names mean, of those that ran."""
    said = {
        DIRECT: "warpipe's own, launched by address",
        PYTORCH: "torch.add",
        NUMPY: "numpy.add",
    }
    ran = {record["kernel"] for record in records}
    parts = [f"{name}: {meaning}" for name, meaning in said.items() if any(name in kernel for kernel in ran)]
    if any(kernel.startswith("copy_") for kernel in ran):
        parts.append("copy_: on a copy of the other GPU's 4 KiB")
    return "kernels: " + "; ".join(parts)


def _numbers(record: dict[str, Any], ours: dict[str, Any] | None) -> list[str]:
    if record["status"] != "measured":
        return ["", "", "", "", "", f"{record['status']}: {record['reason']}"]
    spread = [f"{record['awaited_ns'][rank] / 1e3:.1f}" for rank in ("p50", "p90", "p99")]
    ratio = f"{record['chained_us'] / ours['chained_us']:.2f}" if ours else ""
    return [f"{record['chained_us']:.1f}", *spread, ratio, ""]


def verdicts(made: list[dict[str, Any]]) -> str:
    """What was wanted, and whether it is so."""
    lines = []
    for figure in made:
        wanted = figure["wanted"]
        if "ratio_at_least" in wanted:
            said = f"ratio {figure['ratio']:.2f}, wanted >= {wanted['ratio_at_least']}"
        else:
            said = f"{figure['ours'] - figure['floor']:+.1f} us"
            if wanted != "nothing":
                said += f", wanted <= {wanted['beside_floor_at_most']:+.1f} us"
            elif "beside Rust" not in figure["name"]:
                said = f"ratio {figure['ratio']:.2f}"
        met = {True: ": met", False: ": NOT MET", None: ""}[figure["met"]]
        lines.append(f"{figure['name']}: {figure['floor']:.1f} and {figure['ours']:.1f} us, {said}{met}")
    return "\n".join(lines)
