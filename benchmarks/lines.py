"""Lines in panels beside each other, as one SVG without scripts."""

import html
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

_WIDTH, _HEIGHT, _LEFT, _TOP, _BOTTOM = 560, 340, 44, 34, 36
_STYLE = "text{font:11px sans-serif;fill:#374151}.g{stroke:#e5e7eb}.t{font-weight:bold}"
_LABEL_HEIGHT, _LETTER_WIDTH, _LABEL_LEFT = 13, 6.2, 6
_GRID_MOST = 8


@dataclass(frozen=True)
class Look:
    """How a line is drawn; a level line is grey and dashed by its own."""

    colour: str
    width: float = 1.3
    dash: bool = False


@dataclass(frozen=True)
class Panel:
    """One diagram, whose horizontal axis is logarithmic.

    Attributes:
        lines: values by place on the horizontal axis, by the line's name.
        looks: of the lines, by name.
        level: where a level line is drawn, and its name.
    """

    title: str
    lines: Mapping[str, Mapping[float, float]]
    looks: Mapping[str, Look]
    level: tuple[float, str] | None = None


def draw(panels: Sequence[Panel]) -> str:
    """Draw panels in a row, each with its lines named at their right ends."""
    body, left = list[str](), 0.0
    for panel in panels:
        names = [*panel.lines, *([panel.level[1]] if panel.level is not None else [])]
        right = _LABEL_LEFT + 8 + _LETTER_WIDTH * max(map(len, names), default=0)
        body += _Diagram(panel, left + _LEFT, left + _WIDTH - right).parts()
        left += _WIDTH
    text = "\n".join(body)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {left:.0f} {_HEIGHT}" width="{left:.0f}" height="{_HEIGHT}">\n'
        f'<style>{_STYLE}</style>\n<rect width="{left:.0f}" height="{_HEIGHT}" fill="#fff"/>\n{text}\n</svg>\n'
    )


class _Diagram:
    def __init__(self, panel: Panel, left: float, right: float) -> None:
        self._panel, self._left, self._right = panel, left, right
        self._places = sorted({place for line in panel.lines.values() for place in line})
        values = [value for line in panel.lines.values() for value in line.values()]
        most = max([*values, 0.0 if panel.level is None else panel.level[0]], default=0.0)
        self._step = _round_step(most / _GRID_MOST)
        self._top = self._step * max(math.ceil(most / self._step - 1e-9), 1)

    def parts(self) -> list[str]:
        return [*self._grid(), *self._lines()]

    def _x(self, place: float) -> float:
        low, high = math.log(self._places[0]), math.log(self._places[-1])
        part = (math.log(place) - low) / (high - low) if high > low else 0.5
        return round(self._left + part * (self._right - self._left), 1)

    def _y(self, value: float) -> float:
        return round(_HEIGHT - _BOTTOM - value / self._top * (_HEIGHT - _TOP - _BOTTOM), 1)

    def _grid(self) -> list[str]:
        parts = [f'<text class="t" x="{self._left:g}" y="18">{html.escape(self._panel.title)}</text>']
        for number in range(round(self._top / self._step) + 1):
            value = number * self._step
            y = self._y(value)
            parts.append(f'<line class="g" x1="{self._left:g}" x2="{self._right:g}" y1="{y}" y2="{y}"/>')
            parts.append(
                f'<text x="{self._left - 6:g}" y="{round(y + 4, 1)}" text-anchor="end">{value:,.6g}</text>'
            )
        return parts + [
            f'<text x="{self._x(place)}" y="{_HEIGHT - _BOTTOM + 18}" text-anchor="middle">{place:,.6g}</text>'
            for place in self._places
        ]

    def _lines(self) -> list[str]:
        parts, ends = list[str](), list[tuple[float, str, str]]()
        if self._panel.level is not None:
            value, name = self._panel.level
            y = self._y(value)
            parts.append(
                f'<line x1="{self._left:g}" x2="{self._right:g}" y1="{y}" y2="{y}" stroke="#9ca3af" stroke-dasharray="4 3"/>'
            )
            ends.append((y, name, "#9ca3af"))
        for name, line in self._panel.lines.items():
            if not line:
                continue
            look = self._panel.looks[name]
            points = " ".join(f"{self._x(place)},{self._y(line[place])}" for place in sorted(line))
            dash = ' stroke-dasharray="4 3"' if look.dash else ""
            parts.append(
                f'<polyline points="{points}" fill="none" stroke="{look.colour}" stroke-width="{look.width}"{dash}/>'
            )
            ends.append((self._y(line[max(line)]), name, look.colour))
        above = float(_HEIGHT)
        for y, name, colour in sorted(ends, key=lambda end: -end[0]):
            above = min(y + 4, above - _LABEL_HEIGHT)
            parts.append(
                f'<text x="{self._right + _LABEL_LEFT:g}" y="{round(above, 1)}" style="fill:{colour}">{html.escape(name)}</text>'
            )
        return parts


def _round_step(least: float) -> float:
    """Give the first of 1, 2, 5, 10, ... (and their tenths) that is not less."""
    if least <= 0:
        return 1.0
    power = 10.0 ** math.floor(math.log10(least))
    return next(step * power for step in (1, 2, 5, 10) if step * power >= least * (1 - 1e-9))
