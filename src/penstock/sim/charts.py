"""Line charts as SVG, drawn here so that a report needs neither scripts nor a network."""

import html
import math
from collections.abc import Sequence
from dataclasses import dataclass

WIDTH, HEIGHT = 560, 240
_LEFT, _RIGHT, _TOP, _BOTTOM = 58, 12, 12, 34
_COLOURS = ("#2563eb", "#dc2626", "#059669", "#d97706", "#7c3aed", "#0891b2", "#db2777", "#65a30d")
_TICKS = 5


@dataclass(frozen=True, slots=True)
class Line:
    """Points from left to right."""

    name: str
    xs: Sequence[float]
    ys: Sequence[float]


@dataclass(frozen=True, slots=True)
class Chart:
    """What one figure shows. `mark_x` draws a vertical line, as for a target."""

    title: str
    x_label: str
    lines: Sequence[Line]
    y_max: float | None = None
    mark_x: float | None = None

    def to_svg(self) -> str:
        """Draw it."""
        xs = [x for line in self.lines for x in line.xs]
        ys = [y for line in self.lines for y in line.ys]
        x_ticks = _ticks(max([*xs, self.mark_x or 0.0], default=0.0))
        y_ticks = _ticks(self.y_max if self.y_max is not None else max(ys, default=0.0))
        scale = _Scale(x_ticks[-1], y_ticks[-1])
        parts = [
            f'<svg class="chart" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{html.escape(self.title)}">'
        ]
        for tick in y_ticks:
            y = scale.y(tick)
            parts.append(f'<line class="grid" x1="{_LEFT}" x2="{WIDTH - _RIGHT}" y1="{y}" y2="{y}"/>')
            parts.append(f'<text x="{_LEFT - 6}" y="{y + 4}" text-anchor="end">{_short(tick)}</text>')
        parts += [
            f'<text x="{scale.x(tick)}" y="{HEIGHT - _BOTTOM + 16}" text-anchor="middle">{_short(tick)}</text>'
            for tick in x_ticks
        ]
        parts.append(
            f'<text x="{WIDTH - _RIGHT}" y="{HEIGHT - 4}" text-anchor="end">{html.escape(self.x_label)}</text>'
        )
        if self.mark_x is not None:
            x = scale.x(self.mark_x)
            parts.append(f'<line class="mark" x1="{x}" x2="{x}" y1="{_TOP}" y2="{HEIGHT - _BOTTOM}"/>')
        for number, line in enumerate(self.lines):
            points = " ".join(f"{scale.x(x)},{scale.y(y)}" for x, y in zip(line.xs, line.ys, strict=True))
            colour = _COLOURS[number % len(_COLOURS)]
            parts.append(
                f'<polyline fill="none" stroke="{colour}" points="{points}"><title>{html.escape(line.name)}</title></polyline>'
            )
        parts.append("</svg>")
        legend = "".join(
            f'<span><i style="background:{_COLOURS[number % len(_COLOURS)]}"></i>{html.escape(line.name)}</span>'
            for number, line in enumerate(self.lines)
        )
        return f'<figure><figcaption>{html.escape(self.title)}</figcaption>{"".join(parts)}<p class="legend">{legend}</p></figure>'


@dataclass(frozen=True, slots=True)
class _Scale:
    x_max: float
    y_max: float

    def x(self, value: float) -> float:
        return round(_LEFT + (WIDTH - _LEFT - _RIGHT) * min(value / self.x_max, 1.0), 1)

    def y(self, value: float) -> float:
        return round(HEIGHT - _BOTTOM - (HEIGHT - _TOP - _BOTTOM) * min(value / self.y_max, 1.0), 1)


def _ticks(highest: float) -> list[float]:
    """Give round numbers from 0 to at least `highest`."""
    if highest <= 0:
        return [0.0, 1.0]
    step = highest / _TICKS
    power = 10 ** math.floor(math.log10(step))
    step = next(power * factor for factor in (1, 2, 2.5, 5, 10) if power * factor >= step * 0.999)
    return [step * number for number in range(math.ceil(highest / step * 0.999) + 1)]


def _short(value: float) -> str:
    return f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"
