"""The round trips as a picture: microseconds over the tensor's size, a line for each contestant."""

from __future__ import annotations

import math
from typing import Any
from xml.sax.saxutils import escape

from .figures import size_name

WIDTH, CHART_HEIGHT = 760, 360
LEFT, RIGHT, TOP, BOTTOM = 70, 250, 40, 40
COLORS = ("#1f77b4", "#7fb3d9", "#d62728", "#ff9896", "#8c564b", "#9a9a9a", "#2ca02c", "#9467bd")


def svg(records: list[dict[str, Any]], title: str) -> str:
    """A chart for each place, under each other."""
    measured = [record for record in records if record["status"] == "measured"]
    places = sorted({record["place"] for record in measured})
    # One colour for a contestant everywhere.
    names = list(dict.fromkeys(record["contestant"] for record in measured))
    height = CHART_HEIGHT * max(1, len(places))
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height}" font-family="sans-serif" '
        f'font-size="12"><rect width="{WIDTH}" height="{height}" fill="white"/>'
    ]
    for row, place in enumerate(places):
        here = [record for record in measured if record["place"] == place]
        parts.append(f'<g transform="translate(0 {row * CHART_HEIGHT})">')
        parts += _chart(here, names, f"{title}, {place}")
        parts.append("</g>")
    return "\n".join([*parts, "</svg>", ""])


def _chart(records: list[dict[str, Any]], names: list[str], title: str) -> list[str]:
    sizes = sorted({record["bytes"] for record in records})
    values = [record["chained_us"] for record in records]
    low, high = math.floor(math.log10(min(values))), math.ceil(math.log10(max(values) * 1.0001))
    right, floor = WIDTH - RIGHT, CHART_HEIGHT - BOTTOM

    def x(size: int) -> float:
        return LEFT + (right - LEFT) * (sizes.index(size) + 0.5) / len(sizes)

    def y(value: float) -> float:
        return floor - (floor - TOP) * (math.log10(value) - low) / (high - low)

    parts = [f'<text x="{LEFT}" y="20" font-size="14">{escape(title)}: microseconds a round trip</text>']
    for decade in range(low, high + 1):
        at = y(10.0**decade)
        parts.append(f'<line x1="{LEFT}" x2="{right}" y1="{at:.1f}" y2="{at:.1f}" stroke="#dddddd"/>')
        parts.append(f'<text x="{LEFT - 8}" y="{at + 4:.1f}" text-anchor="end">{10.0**decade:g}</text>')
    for size in sizes:
        parts.append(f'<text x="{x(size):.1f}" y="{floor + 20}" text-anchor="middle">{size_name(size)}</text>')
    for number, name in enumerate(names):
        line = sorted((r["bytes"], r["chained_us"]) for r in records if r["contestant"] == name)
        if not line:
            continue
        color = COLORS[number % len(COLORS)]
        points = " ".join(f"{x(size):.1f},{y(value):.1f}" for size, value in line)
        parts.append(f'<polyline points="{points}" fill="none" stroke="{color}" stroke-width="2"/>')
        parts += [f'<circle cx="{x(s):.1f}" cy="{y(v):.1f}" r="3" fill="{color}"/>' for s, v in line]
        at = TOP + 18 * number
        parts.append(f'<line x1="{right + 20}" x2="{right + 36}" y1="{at}" y2="{at}" stroke="{color}" stroke-width="2"/>')
        parts.append(f'<text x="{right + 42}" y="{at + 4}">{escape(name)}</text>')
    return parts
