"""The same round trip without Python, as the program ``warpipe-bench`` measures it, in the same run."""

from __future__ import annotations

import json
import pathlib
import subprocess
import tempfile
from dataclasses import dataclass, field
from typing import Any

RUN_SECONDS = 300.0

_HANDOFF = "kernel -> kernel, {place}, sent"
_SIZE = "round trip of 1 GiB beside 4 KiB"


@dataclass
class Rust:
    """Its figures, or why there are none."""

    status: str = "skipped"
    reason: str = ""
    figures: list[dict[str, Any]] = field(default_factory=list)

    def microseconds(self, place: str, size: int, way: str) -> float | None:
        """A round trip of ``size`` bytes: 4 KiB in both places, 1 GiB in one."""
        if size == 4 << 10:
            name = _HANDOFF.format(place=place)
        elif size == 1 << 30 and place == "one device":
            name = _SIZE
        else:
            return None
        for figure in self.figures:
            if figure["name"] == name:
                return float(figure["ours"]) if way == "chained" else float(figure["ours_ns"]["p50"]) / 1e3
        return None


def measure(program: str | None, device: str, devices: int, quick: bool, seconds: float = RUN_SECONDS) -> Rust:
    """Runs its benchmarks ``handoff`` and, where there is time, ``size``."""
    if program is None:
        return Rust(reason="no program `warpipe-bench` was found; name it with --rust")
    made = Rust(status="measured")
    for what in ("handoff",) if quick else ("handoff", "size"):
        with tempfile.TemporaryDirectory() as folder:
            report = pathlib.Path(folder) / "report.json"
            command = [program, what, "--device", device, "--devices", str(devices), "--out", str(report)]
            try:
                subprocess.run(
                    [*command, "--quick"] if quick else command,
                    check=True, timeout=seconds, capture_output=True, text=True,
                )  # fmt: skip
                made.figures += json.loads(report.read_text())["figures"]
            except (OSError, subprocess.SubprocessError, ValueError, KeyError) as error:
                last = (getattr(error, "stderr", "") or "").strip().splitlines()[-1:]
                made.status, made.reason = "failed", ": ".join([f"bench {what}: {error}", *map(str, last)])
    return made
