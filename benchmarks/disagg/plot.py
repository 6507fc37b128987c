"""ITL p99, TTFT p99 and output tokens/s by chunk size, with the disaggregated side as a level line, as one SVG without scripts."""

import html
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

from benchmarks.disagg.choice import Point

_WIDTH, _HEIGHT = 300, 240
_LEFT, _RIGHT, _TOP, _BOTTOM = 52, 14, 34, 44
_DISAGGREGATED, _AGGREGATED = "#2563eb", "#9ca3af"
_STYLE = "text{font:11px sans-serif;fill:#374151}.g{stroke:#e5e7eb}.t{font-weight:bold}"
_ACROSS = "max_batch_tokens of 2 aggregated workers"
_PANELS = (
    ("itl_p99_ms", "streams' ITL p99, ms"),
    ("ttft_p99_ms", "prompts' TTFT p99, ms"),
    ("output_tokens_per_s", "output tokens/s"),
)


@dataclass(frozen=True, slots=True)
class _Panel:
    """Chunk sizes across, evenly; the logarithm of a figure up, from `low` to `high`, powers of two."""

    left: float
    count: int
    low: float
    high: float

    @classmethod
    def around(cls, left: float, values: Sequence[float], level: float) -> Self:
        known = [value for value in (*values, level) if value > 0] or [1.0]
        low, high = (math.floor(math.log2(value)) for value in (min(known), max(known)))
        return cls(left, len(values), 2.0**low, 2.0 ** (high + 1))

    @property
    def begin(self) -> float:
        return self.left + _LEFT

    @property
    def end(self) -> float:
        return self.left + _WIDTH - _RIGHT

    def x(self, index: int) -> float:
        part = index / (self.count - 1) if self.count > 1 else 0.5
        return round(self.begin + part * (self.end - self.begin), 1)

    def y(self, value: float) -> float:
        part = math.log2(max(value, self.low) / self.low) / math.log2(self.high / self.low)
        return round(_HEIGHT - _BOTTOM - part * (_HEIGHT - _TOP - _BOTTOM), 1)


def draw(disaggregated: Point, points: Sequence[Point], best: Point) -> str:
    """Draw three panels; a full dot marks the aggregated workers' best chunk size."""
    parts: list[str] = []
    for number, (field, title) in enumerate(_PANELS):
        values = [float(getattr(point, field)) for point in points]
        level = float(getattr(disaggregated, field))
        panel = _Panel.around(number * _WIDTH, values, level)
        parts += _frame(panel, title, [point.chunk for point in points])
        parts += _curve(panel, values, points.index(best))
        parts += _level(panel, level)
    width = len(_PANELS) * _WIDTH
    body = "\n".join(parts)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {_HEIGHT}" width="{width}" height="{_HEIGHT}">\n'
        f'<style>{_STYLE}</style>\n<rect width="{width}" height="{_HEIGHT}" fill="#fff"/>\n{body}\n</svg>\n'
    )


def _frame(panel: _Panel, title: str, chunks: Sequence[int]) -> list[str]:
    begin, end = panel.begin, panel.end
    parts = [f'<text class="t" x="{begin}" y="16">{html.escape(title)}</text>']
    tick = panel.low
    while tick <= panel.high:
        y = panel.y(tick)
        parts.append(f'<line class="g" x1="{begin}" x2="{end}" y1="{y}" y2="{y}"/>')
        parts.append(f'<text x="{begin - 6}" y="{y + 4}" text-anchor="end">{tick:g}</text>')
        tick *= 2
    for index, chunk in enumerate(chunks):
        parts.append(
            f'<text x="{panel.x(index)}" y="{_HEIGHT - _BOTTOM + 16}" text-anchor="middle">{chunk}</text>'
        )
    middle = (begin + end) / 2
    parts.append(f'<text x="{middle}" y="{_HEIGHT - 10}" text-anchor="middle">{_ACROSS}</text>')
    return parts


def _curve(panel: _Panel, values: Sequence[float], best: int) -> list[str]:
    places = [(panel.x(index), panel.y(value)) for index, value in enumerate(values)]
    line = " ".join(f"{x},{y}" for x, y in places)
    style = f'stroke="{_AGGREGATED}" stroke-width="2"'
    dots = [
        f'<circle cx="{x}" cy="{y}" r="4" fill="{_AGGREGATED if index == best else "#fff"}" {style}/>'
        for index, (x, y) in enumerate(places)
    ]
    return [f'<polyline points="{line}" fill="none" {style}/>', *dots]


def _level(panel: _Panel, value: float) -> list[str]:
    y = panel.y(value)
    return [
        f'<line x1="{panel.begin}" x2="{panel.end}" y1="{y}" y2="{y}" stroke="{_DISAGGREGATED}" stroke-width="2"/>',
        f'<text x="{panel.end}" y="{y - 5}" text-anchor="end">1 prefill, 1 decode</text>',
    ]
