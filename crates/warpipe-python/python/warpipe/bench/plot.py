"""The round trips as a picture: microseconds over the tensor's size, a line for each contestant."""

from __future__ import annotations

import math
from typing import Any
from xml.sax.saxutils import escape

from .figures import size_name

WIDTH, CHART_HEIGHT = 920, 400
# Of the chart itself: room for the axis at the left, for the names at the right.
LEFT, RIGHT, TOP, BOTTOM = 80, 330, 50, 50
LINE_HEIGHT = 20
NAME_CHARACTERS = 44
COLORS = ("#1f77b4", "#7fb3d9", "#17becf", "#d62728", "#ff9896", "#e377c2", "#8c564b", "#9a9a9a", "#2ca02c", "#9467bd")


def svg(records: list[dict[str, Any]], title: str) -> str:
    """A chart for each place, under each other."""
    measured = [record for record in records if record["status"] == "measured"]
    places = sorted({record["place"] for record in measured})
    # One colour for a contestant everywhere.
    names = list(dict.fromkeys(record["contestant"] for record in measured))
    height = CHART_HEIGHT * max(1, len(places))
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height}" '
        f'viewBox="0 0 {WIDTH} {height}" font-family="sans-serif" font-size="12">'
        f'<rect width="{WIDTH}" height="{height}" fill="white"/>'
    ]
    for row, place in enumerate(places):
        here = [record for record in measured if record["place"] == place]
        parts.append(f'<g transform="translate(0 {row * CHART_HEIGHT})">')
        parts += _Chart(here, names).parts(f"{title}, {place}")
        parts.append("</g>")
    return "\n".join([*parts, "</svg>", ""])


class _Chart:
    """Both axes are logarithmic: the lower one by steps from size to size, as they were measured."""

    def __init__(self, records: list[dict[str, Any]], names: list[str]) -> None:
        self.names = names
        self.lines = {
            name: sorted((record["bytes"], record["chained_us"]) for record in records if record["contestant"] == name)
            for name in names
        }
        self.sizes = sorted({record["bytes"] for record in records})
        values = [record["chained_us"] for record in records]
        self.marks = _marks(min(values), max(values))
        self.right, self.floor = WIDTH - RIGHT, CHART_HEIGHT - BOTTOM

    def x(self, size: int) -> float:
        return LEFT + (self.right - LEFT) * (self.sizes.index(size) + 0.5) / len(self.sizes)

    def y(self, value: float) -> float:
        low, high = math.log10(self.marks[0]), math.log10(self.marks[-1])
        return self.floor - (self.floor - TOP) * (math.log10(value) - low) / (high - low)

    def parts(self, title: str) -> list[str]:
        return [f'<text x="16" y="24" font-size="14">{escape(title)}</text>', *self.axes(), *self.curves(), *self.key()]

    def axes(self) -> list[str]:
        middle = (TOP + self.floor) / 2
        parts = [
            f'<text transform="translate(20 {middle:.0f}) rotate(-90)" text-anchor="middle">'
            "microseconds a round trip (chained)</text>",
            f'<text x="{(LEFT + self.right) / 2:.0f}" y="{self.floor + 40}" text-anchor="middle">size of the tensor</text>',
        ]
        for mark in self.marks:
            at = self.y(mark)
            color = "#bbbbbb" if math.log10(mark).is_integer() else "#e8e8e8"
            parts.append(f'<line x1="{LEFT}" x2="{self.right}" y1="{at:.1f}" y2="{at:.1f}" stroke="{color}"/>')
            parts.append(f'<text x="{LEFT - 8}" y="{at + 4:.1f}" text-anchor="end">{_number(mark)}</text>')
        for size in self.sizes:
            said = size_name(size)
            parts.append(f'<text x="{self.x(size):.1f}" y="{self.floor + 20}" text-anchor="middle">{said}</text>')
        return parts

    def curves(self) -> list[str]:
        parts = []
        for number, name in enumerate(self.names):
            line, color = self.lines[name], COLORS[number % len(COLORS)]
            if not line:
                continue
            points = " ".join(f"{self.x(size):.1f},{self.y(value):.1f}" for size, value in line)
            parts.append(f'<polyline points="{points}" fill="none" stroke="{color}" stroke-width="2"/>')
            parts += [f'<circle cx="{self.x(s):.1f}" cy="{self.y(v):.1f}" r="3" fill="{color}"/>' for s, v in line]
        return parts

    def key(self) -> list[str]:
        """The names, the slowest first, as their lines lie at the right end."""
        parts = []
        here = [name for name in self.names if self.lines[name]]
        for row, name in enumerate(sorted(here, key=lambda name: self.lines[name][-1][::-1], reverse=True)):
            color, at = COLORS[self.names.index(name) % len(COLORS)], TOP + LINE_HEIGHT * row
            said = name if len(name) <= NAME_CHARACTERS else name[: NAME_CHARACTERS - 1] + "…"
            start, end = self.right + 20, self.right + 40
            parts.append(f'<line x1="{start}" x2="{end}" y1="{at}" y2="{at}" stroke="{color}" stroke-width="2"/>')
            parts.append(f'<circle cx="{(start + end) / 2:.0f}" cy="{at}" r="3" fill="{color}"/>')
            parts.append(f'<text x="{end + 8}" y="{at + 4}">{escape(said)}</text>')
        return parts


def _marks(lowest: float, highest: float) -> list[float]:
    """1, 2 and 5 of each decade, from one that is not above all values to one that is above them."""
    first, last = math.floor(math.log10(lowest)), math.floor(math.log10(highest)) + 1
    marks = [step * 10.0**decade for decade in range(first, last + 1) for step in (1, 2, 5)]
    low = max(index for index, mark in enumerate(marks) if mark <= lowest * (1 + 1e-9))
    high = min(index for index, mark in enumerate(marks) if mark > highest)
    return marks[low : high + 1]


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 1 else f"{value:g}"
