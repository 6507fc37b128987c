"""Charts as SVG and the page around them, drawn here so that a report needs neither scripts nor a network."""

import html
import math
from collections.abc import Sequence
from dataclasses import dataclass

WIDTH, HEIGHT = 560, 240
_LEFT, _RIGHT, _TOP, _BOTTOM = 58, 12, 12, 34
_COLOURS = ("#2563eb", "#dc2626", "#059669", "#d97706", "#7c3aed", "#0891b2", "#db2777", "#65a30d")
_TICKS = 5


_DOT_RADIUS = 2.6

_STYLE = """
:root{color-scheme:light dark;--fg:#1f2937;--bg:#fff;--line:#e5e7eb;--soft:#6b7280}
@media(prefers-color-scheme:dark){:root{--fg:#e5e7eb;--bg:#111827;--line:#374151;--soft:#9ca3af}}
body{font:15px/1.5 system-ui,sans-serif;color:var(--fg);background:var(--bg);max-width:1180px;margin:2rem auto;padding:0 1rem}
main{display:grid;grid-template-columns:repeat(auto-fit,minmax(460px,1fr));gap:1rem 2rem}
figure{margin:0}figcaption{font-weight:600}svg{width:100%}svg text{font-size:11px;fill:var(--soft)}
.grid{stroke:var(--line)}.mark{stroke:var(--soft);stroke-dasharray:4 3}polyline{stroke-width:1.5}
.legend{margin:0;font-size:12px;color:var(--soft)}.legend span{margin-right:1em}
.legend i{display:inline-block;width:10px;height:10px;margin-right:4px;border-radius:2px}
table{border-collapse:collapse;margin:1rem 0 2rem}td{padding:2px 16px 2px 0;border-bottom:1px solid var(--line)}
td+td{text-align:right;font-variant-numeric:tabular-nums}
"""


@dataclass(frozen=True, slots=True)
class Line:
    """Points from left to right, of a line's colour where they share its name; `dots` leaves them unconnected."""

    name: str
    xs: Sequence[float]
    ys: Sequence[float]
    dots: bool = False

    def to_svg(self, scale: "_Scale", colour: str) -> str:
        title = f"<title>{html.escape(self.name)}</title>"
        places = [(scale.x(x), scale.y(y)) for x, y in zip(self.xs, self.ys, strict=True)]
        if self.dots:
            circles = "".join(f'<circle cx="{x}" cy="{y}" r="{_DOT_RADIUS}"/>' for x, y in places)
            return f'<g fill="{colour}">{title}{circles}</g>'
        points = " ".join(f"{x},{y}" for x, y in places)
        return f'<polyline fill="none" stroke="{colour}" points="{points}">{title}</polyline>'


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
        names = list(dict.fromkeys(line.name for line in self.lines))
        colours = {name: _COLOURS[number % len(_COLOURS)] for number, name in enumerate(names)}
        parts += [line.to_svg(scale, colours[line.name]) for line in self.lines]
        parts.append("</svg>")
        legend = "".join(
            f'<span><i style="background:{colour}"></i>{html.escape(name)}</span>'
            for name, colour in colours.items()
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


def make_html(
    heading: str, charts: Sequence[Chart], tables: Sequence[tuple[str, Sequence[Sequence[str]]]]
) -> str:
    """Write a page that stands alone: the charts side by side, then tables of (heading, rows of cells)."""
    title = html.escape(heading)
    below = "".join(f"<h2>{html.escape(name)}</h2>{_table(rows)}" for name, rows in tables)
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{title}</title>'
        f'<meta name="viewport" content="width=device-width"><style>{_STYLE}</style></head><body>'
        f"<h1>{title}</h1><main>{''.join(chart.to_svg() for chart in charts)}</main>{below}</body></html>\n"
    )


def _table(rows: Sequence[Sequence[str]]) -> str:
    lines = ("".join(f"<td>{html.escape(cell)}</td>" for cell in row) for row in rows)
    return f"<table>{''.join(f'<tr>{line}</tr>' for line in lines)}</table>"
