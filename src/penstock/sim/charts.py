"""Charts of HTML pages: data and a description for uPlot, whose script is in the page, so that a report opens offline.

`uplot/` is uPlot 1.6.32 as published (MIT license). `page.js` makes uPlot's options of a chart's description.
"""

import html
import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

COLOURS = 8
"""Number of distinct line colours."""
_HERE = Path(__file__).parent
_UNITS = ((3 * 86_400, (86_400.0, "d")), (3 * 3600, (3600.0, "h")), (300, (60.0, "min")))
Points = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class ChartLine:
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
    lines: Sequence[ChartLine]
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

    def describe(self) -> dict[str, Any]:
        """Give what `page.js` draws, as JSON values.

        Lines, bands and dots are series over one axis, as uPlot takes them: a row is a point of the lines or one dot, and other
        series have no value there.
        """
        scale = 100.0 if self.unit == "%" else 1.0
        rows = np.concatenate([self.xs, *(dots.xs for dots in self.dots)])
        order = np.argsort(rows, kind="stable")

        def column(ys: Points, before: int) -> list[float | None]:
            values = np.full(len(rows), np.nan)
            values[before : before + len(ys)] = ys * scale
            return [_rounded(y) for y in values[order]]

        series = []
        for number, band in enumerate(self.bands):
            for edge, ys in (("to", band.high), ("from", band.low)):
                series.append(
                    {"kind": "band", "name": f"{band.name}, {edge}", "colour": number, "ys": column(ys, 0)}
                )
        series += [
            {"kind": "line", "name": line.name, "colour": line.colour, "ys": column(line.ys, 0)}
            for line in self.lines
        ]
        before = len(self.xs)
        for dots in self.dots:
            series.append({"kind": "dots", "name": "", "colour": dots.colour, "ys": column(dots.ys, before)})
            before += len(dots.xs)
        return {
            "xs": [float(f"{x:.6g}") for x in rows[order]],
            "series": series,
            "unit": self.unit,
            "x_axis": self.x_axis.value,
            "x_max": self.x_max,
            "y_max": _rounded(self.highest * scale),
            "mark_s": self.mark_s,
        }

    def to_html(self) -> str:
        """Make an HTML figure with the chart's description; the page's script draws it."""
        described = html.escape(json.dumps(self.describe(), separators=(",", ":")))
        return (
            f'<figure data-chart="{described}"><figcaption>{html.escape(self.title)}'
            f" <small>{html.escape(self.note)}</small></figcaption></figure>"
        )


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


def make_document(heading: str, body: str) -> str:
    """Make the page: `heading` is plain text, `body` is HTML."""
    title = html.escape(heading)
    style = _asset("uplot/uPlot.min.css") + _asset("page.css")
    library = _asset("uplot/uPlot.iife.min.js").split("*/", 1)[
        1
    ]  # the address in its head is no request, but looks like one
    notice = "uPlot 1.6.32, Copyright (c) 2022 Leon Sorokin, MIT license"
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{title}</title>'
        f'<meta name="viewport" content="width=device-width"><style>\n{style}</style></head><body>'
        f"<h1>{title}</h1>{body}<script>\n/* {notice} */{library}\n{_asset('page.js')}</script></body></html>\n"
    )


def chart_grid(charts: Iterable[Chart]) -> str:
    """Make a responsive grid of charts."""
    return f'<div class="charts">{"".join(chart.to_html() for chart in charts)}</div>'


def text_table(rows: Iterable[Sequence[str]]) -> str:
    """Make an HTML table of text cells."""
    lines = ("".join(f"<td>{html.escape(cell)}</td>" for cell in row) for row in rows)
    return f'<div class="table words"><table>{"".join(f"<tr>{line}</tr>" for line in lines)}</table></div>'


def _asset(name: str) -> str:
    return (_HERE / name).read_text(encoding="utf-8")


def _rounded(value: float) -> float | None:
    return float(f"{value:.4g}") if math.isfinite(value) else None
