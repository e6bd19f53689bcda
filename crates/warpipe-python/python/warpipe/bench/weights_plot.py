"""A worker's restart until its first token as a picture: a bar for each way, in its parts."""

from __future__ import annotations

import statistics
from typing import Any
from xml.sax.saxutils import escape

WIDTH, LEFT, RIGHT, TOP = 760, 150, 70, 56
BAR, GAP = 34, 22
PARTS = {
    "import": ("imports", "#c7c7c7"),
    "context": ("CUDA context", "#9a9a9a"),
    "skeleton": ("module on meta", "#aec7e8"),
    "weights": ("weights", "#d62728"),
    "first token": ("first token", "#2ca02c"),
}
WAYS = {"attach": "warpipe", "pretrained": "from_pretrained"}


def parts(run: dict[str, Any]) -> dict[str, float]:
    """The phases of one run, those of warpipe's weights as one."""
    phases = dict(run["phases"])
    weights = sum(phases.pop(name) for name in ("device", "open", "attach") if name in phases)
    phases["weights"] = phases.get("weights", 0.0) + weights
    return phases


def svg(report: dict[str, Any], title: str) -> str:
    """Of the medians of all runs."""
    bars = {}
    for way in WAYS:
        runs = [parts(run) for run in report["workers"][way]]
        bars[way] = {name: statistics.median(run[name] for run in runs) for name in PARTS if name in runs[0]}
    longest = max(sum(bar.values()) for bar in bars.values())
    height = TOP + len(bars) * (BAR + GAP) + 34
    said = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height}" viewBox="0 0 {WIDTH} {height}" '
        'font-family="sans-serif" font-size="13">',
        f'<rect width="{WIDTH}" height="{height}" fill="white"/>',
        f'<text x="12" y="24" font-size="15">{escape(title)}</text>',
    ]
    for row, (way, bar) in enumerate(bars.items()):
        x, y = float(LEFT), TOP + row * (BAR + GAP)
        said.append(f'<text x="{LEFT - 10}" y="{y + BAR / 2 + 5}" text-anchor="end">{WAYS[way]}</text>')
        for name, ms in bar.items():
            length = ms / longest * (WIDTH - LEFT - RIGHT)
            label, color = PARTS[name]
            said.append(
                f'<rect x="{x:.1f}" y="{y}" width="{length:.1f}" height="{BAR}" fill="{color}">'
                f"<title>{label}: {ms:.0f} ms</title></rect>"
            )
            x += length
        said.append(f'<text x="{x + 8:.1f}" y="{y + BAR / 2 + 5}">{sum(bar.values()) / 1e3:.2f} s</text>')
    x, y = float(LEFT), height - 14
    for label, color in PARTS.values():
        said.append(f'<rect x="{x}" y="{y - 11}" width="12" height="12" fill="{color}"/>')
        said.append(f'<text x="{x + 17}" y="{y}">{label}</text>')
        x += 30 + 7.4 * len(label)
    return "\n".join([*said, "</svg>", ""])
