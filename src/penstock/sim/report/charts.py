"""Line charts as SVG without external libraries, so that a report opens offline; a script adds the values under the pointer."""

import html
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

import numpy as np
from numpy.typing import NDArray

WIDTH, HEIGHT = 560, 250
COLOURS = 8
_COUNTED = ("requests", "workers")
"""Number of distinct line colours."""
_LEFT, _RIGHT, _TOP, _BOTTOM = 58, 16, 20, 30
_TICKS = 5
_LOG_TICKS_MAX = 7
_DOT_RADIUS = 3
_MINUTES_FROM_S, _HOURS_FROM_S, _DAYS_FROM_S = 300, 3 * 3600, 3 * 86_400
Points = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Line:
    """A line: one y per x of the chart; NaN is a gap."""

    name: str
    ys: Points
    colour: int = 0


@dataclass(frozen=True, slots=True)
class Band:
    """A filled area between two lines."""

    name: str
    low: Points
    high: Points


@dataclass(frozen=True, slots=True)
class Dots:
    """Unconnected points, in the colour of their line."""

    xs: Points
    ys: Points
    colour: int = 0


class XAxis(StrEnum):
    """The x axis: seconds from 0, seconds on a logarithmic axis, or numbers from 0."""

    TIME = "time"
    LOG_TIME = "log_time"
    PLAIN = "plain"


@dataclass(frozen=True, slots=True)
class Chart:
    """One figure.

    title:  heading
    note:   subject and unit
    xs:     increasing x values of the lines and bands, in the unit of `x_axis`
    unit:   unit of the lines; "%" formats fractions, "requests" and "workers" integers
    mark_s: x position of a target
    x_max, y_max: least ends of the axes
    """

    title: str
    note: str
    xs: Points
    lines: Sequence[Line]
    bands: Sequence[Band] = ()
    unit: str = ""
    dots: Sequence[Dots] = ()
    x_axis: XAxis = XAxis.TIME
    mark_s: float | None = None
    x_max: float = 0.0
    y_max: float = 0.0

    @property
    def highest(self) -> float:
        """Largest y of all lines and bands, at least `y_max`."""
        drawn = [line.ys for line in self.lines]
        drawn += [band.high for band in self.bands]
        drawn += [dots.ys for dots in self.dots]
        ys = np.concatenate([*drawn, [self.y_max]])
        return float(np.nanmax(ys))

    def to_svg(self) -> str:
        """Draw an HTML figure: caption, drawing, legend."""
        legend = "".join(
            f'<span class="{kind}{index}"><i></i>{html.escape(name)}</span>'
            for kind, index, name in self.names()
        )
        return (
            f'<figure data-chart="{html.escape(self._read_out(self._x_axis()))}">'
            f"<figcaption>{html.escape(self.title)} <small>{html.escape(self.note)}</small></figcaption>"
            f'{self.drawing()}<p class="legend">{legend}</p></figure>'
        )

    def drawing(self) -> str:
        """Draw axes, lines, bands and dots, without caption and legend."""
        x_axis = self._x_axis()
        y_axis = self._y_axis()
        label = html.escape(f"{self.title}, {self.note}")
        drawn = [
            f'<svg class="chart" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{label}">',
            *_grid(x_axis, y_axis),
            *(self._mark(x_axis)),
            *(_area(x_axis, y_axis, self.xs, band, number) for number, band in enumerate(self.bands)),
            *(_curve(x_axis, y_axis, self.xs, line) for line in self.lines),
            *(_circles(x_axis, y_axis, dots) for dots in self.dots),
            '<line class="cursor"/></svg>',
        ]
        return "".join(drawn)

    def names(self) -> list[tuple[str, int, str]]:
        """Give the legend: (CSS class, colour number, name)."""
        lines = [("c", line.colour, line.name) for line in self.lines]
        if len(lines) == 1 and not self.bands:
            return []  # the page names the only line
        return lines + [("b", number, band.name) for number, band in enumerate(self.bands)]

    def _x_axis(self) -> "_Axis":
        ends = [end for xs in (self.xs, *(dots.xs for dots in self.dots)) for end in (xs[:1], xs[-1:])]
        reached: list[float] = np.concatenate(ends).tolist()
        if self.mark_s is not None:
            reached.append(self.mark_s)
        highest = max([*reached, self.x_max])
        if self.x_axis is XAxis.LOG_TIME:
            return _log_axis([x for x in reached if x > 0])
        if self.x_axis is XAxis.PLAIN:
            ticks = _ticks(highest)
            return _Axis(0.0, ticks[-1], _ALONG, ticks, [_short(tick, ticks[-1]) for tick in ticks])
        return _time_axis(highest)

    def _y_axis(self) -> "_Axis":
        scale = 100.0 if self.unit == "%" else 1.0
        ticks = _ticks(self.highest * scale, is_whole=self.unit in _COUNTED)
        low_px, high_px = HEIGHT - _BOTTOM, _TOP
        labels = [_short(tick, ticks[-1]) + ("%" if self.unit == "%" else "") for tick in ticks]
        return _Axis(0.0, ticks[-1] / scale, (low_px, high_px), [tick / scale for tick in ticks], labels)

    def _mark(self, axis: "_Axis") -> list[str]:
        if self.mark_s is None:
            return []
        x = axis.px(self.mark_s)
        anchor = "end" if x > WIDTH - 90 else "start"
        at = x - 4 if anchor == "end" else x + 4
        return [
            f'<line class="mark" x1="{x}" x2="{x}" y1="{_TOP}" y2="{HEIGHT - _BOTTOM}"/>',
            f'<text class="mark" x="{at}" y="{_TOP - 6}" text-anchor="{anchor}">target {say_s(self.mark_s)}</text>',
        ]

    def _read_out(self, x_axis: "_Axis") -> str:
        """Give the data for the pointer's read-out, as JSON."""
        scale = 100.0 if self.unit == "%" else 1.0
        rows: list[tuple[str, str, Points]] = [(f"c{line.colour}", line.name, line.ys) for line in self.lines]
        for number, band in enumerate(self.bands):
            rows += [
                (f"b{number}", f"{band.name}, to", band.high),
                (f"b{number}", f"{band.name}, from", band.low),
            ]
        return json.dumps(
            {
                "x": [x_axis.px(x) for x in self.xs],
                "at": [f"{x:,.4g}" if self.x_axis is XAxis.PLAIN else say_s(x) for x in self.xs],
                "unit": self.unit,
                "top": _TOP,
                "bottom": HEIGHT - _BOTTOM,
                "rows": [[colour, name, [_rounded(y * scale) for y in ys]] for colour, name, ys in rows],
            },
            separators=(",", ":"),
        )


@dataclass(frozen=True, slots=True)
class _Axis:
    low: float
    high: float
    ends_px: tuple[float, float]
    ticks: list[float]
    labels: list[str]
    is_log: bool = False

    def px(self, value: float) -> float:
        if self.is_log:
            share = math.log(max(value, self.low) / self.low) / math.log(self.high / self.low)
        else:
            share = (value - self.low) / (self.high - self.low)
        start, end = self.ends_px
        return round(start + (end - start) * min(max(share, 0.0), 1.0), 1)


_ALONG = (_LEFT, WIDTH - _RIGHT)


def _time_axis(longest_s: float) -> _Axis:
    unit_s, unit = next(
        (pair for least_s, pair in _UNITS if longest_s >= least_s),
        (1.0, "s"),
    )
    ticks = _ticks(longest_s / unit_s)
    labels = [f"{_short(tick)} {unit}" if tick == ticks[-1] else _short(tick) for tick in ticks]
    high = max(longest_s, ticks[1] * unit_s) if longest_s > 0 else unit_s
    shown = [
        (tick * unit_s, label) for tick, label in zip(ticks, labels, strict=True) if tick * unit_s <= high
    ]
    shown[-1] = (shown[-1][0], f"{_short(shown[-1][0] / unit_s)} {unit}")
    return _Axis(0.0, high, _ALONG, [at for at, _ in shown], [label for _, label in shown])


_UNITS = (
    (_DAYS_FROM_S, (86_400.0, "d")),
    (_HOURS_FROM_S, (3600.0, "h")),
    (_MINUTES_FROM_S, (60.0, "min")),
)


def _log_axis(reached: list[float]) -> _Axis:
    low, high = min(reached, default=0.01), max(reached, default=1.0)
    if high < low * 2:
        low, high = low / 1.5, high * 1.5
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    for factors, stride in (((1, 2, 5), 1), ((1, 3), 1), ((1,), 1), ((1,), 2), ((1,), 4)):
        ticks = [
            f * 10.0**d
            for d in decades[::stride]
            for f in factors
            if low <= f * 10.0**d * 1.0001 <= high * 1.0002
        ]
        if len(ticks) <= _LOG_TICKS_MAX:
            break
    return _Axis(low, high, _ALONG, ticks, [say_s(tick) for tick in ticks], is_log=True)


def _grid(x_axis: _Axis, y_axis: _Axis) -> list[str]:
    drawn = []
    for tick, label in zip(y_axis.ticks, y_axis.labels, strict=True):
        y = y_axis.px(tick)
        drawn.append(f'<line class="grid" x1="{_LEFT}" x2="{WIDTH - _RIGHT}" y1="{y}" y2="{y}"/>')
        drawn.append(f'<text x="{_LEFT - 7}" y="{y + 4}" text-anchor="end">{label}</text>')
    bottom = HEIGHT - _BOTTOM
    for tick, label in zip(x_axis.ticks, x_axis.labels, strict=True):
        x = x_axis.px(tick)
        anchor = "end" if x > WIDTH - _RIGHT - 16 else "middle"
        drawn.append(f'<line class="grid" x1="{x}" x2="{x}" y1="{bottom}" y2="{bottom + 4}"/>')
        drawn.append(f'<text x="{x}" y="{bottom + 18}" text-anchor="{anchor}">{label}</text>')
    return drawn


def _curve(x_axis: _Axis, y_axis: _Axis, xs: Points, line: Line) -> str:
    path = "".join(
        ("M" if begins else "L") + f"{x_axis.px(x)},{y_axis.px(y)}" for begins, x, y in _pieces(xs, line.ys)
    )
    return f'<path class="line c{line.colour}" d="{path}"/>'


def _circles(x_axis: _Axis, y_axis: _Axis, dots: Dots) -> str:
    places = [(x_axis.px(x), y_axis.px(y)) for x, y in zip(dots.xs, dots.ys, strict=True)]
    circles = "".join(f'<circle cx="{x}" cy="{y}" r="{_DOT_RADIUS}"/>' for x, y in places)
    return f'<g class="dots c{dots.colour}">{circles}</g>'


def _area(x_axis: _Axis, y_axis: _Axis, xs: Points, band: Band, number: int) -> str:
    known = np.isfinite(band.low) & np.isfinite(band.high)
    there = [f"{x_axis.px(x)},{y_axis.px(y)}" for x, y in zip(xs[known], band.high[known], strict=True)]
    back = [
        f"{x_axis.px(x)},{y_axis.px(y)}" for x, y in zip(xs[known][::-1], band.low[known][::-1], strict=True)
    ]
    path = f"M{'L'.join(there + back)}Z" if there else ""
    return f'<path class="band b{number}" d="{path}"/>'


def _pieces(xs: Points, ys: Points) -> list[tuple[bool, float, float]]:
    """Give (starts a segment, x, y) of the points that are not NaN."""
    found = []
    is_gap = True
    for x, y in zip(xs.tolist(), ys.tolist(), strict=True):
        if math.isfinite(y):
            found.append((is_gap, x, y))
        is_gap = not math.isfinite(y)
    return found


def same_scale(charts: Sequence[Chart]) -> list[Chart]:
    """Set equal axes for charts of one quantity, for comparison."""
    x_max = max(float(chart.xs[-1]) if len(chart.xs) else 0.0 for chart in charts)
    y_max = max(chart.highest for chart in charts)
    return [replace(chart, x_max=x_max, y_max=y_max) for chart in charts]


def say_s(value: float) -> str:
    """Format seconds with a readable unit."""
    if 0 < value < 1e-3:
        return f"{value * 1e6:.3g} µs"
    if 0 < value < 1:
        return f"{value * 1e3:.3g} ms"
    for least_s, (unit_s, unit) in _UNITS:
        if value >= least_s:
            return f"{value / unit_s:.3g} {unit}"
    return f"{value:.3g} s"


def _ticks(highest: float, *, is_whole: bool = False) -> list[float]:
    """Give round tick values from 0 to at least `highest`."""
    if highest <= 0:
        return [0.0, 1.0]
    step = max(highest / _TICKS, 1.0 if is_whole else 0.0)
    power = 10.0 ** math.floor(math.log10(step))
    step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= step * 0.999)
    return [step * number for number in range(math.ceil(highest / step * 0.999) + 1)]


def _short(value: float, largest: float = 0.0) -> str:
    """Format a tick value; all ticks of an axis are formatted by its largest."""
    for least, size, letter in ((1e9, 1e9, "G"), (1e6, 1e6, "M"), (1e4, 1e3, "k")):
        if max(value, largest) >= least and value:
            return f"{value / size:.4g}{letter}"
    return f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"


def _rounded(value: float) -> float | None:
    return float(f"{value:.4g}") if math.isfinite(value) else None
