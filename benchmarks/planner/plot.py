"""Demand, workers by role and attainment over time, a row for each run, as one SVG without scripts."""

import html
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

_WIDTH, _ROW, _TITLE, _PLOT = 900, 148, 18, 92
_LEFT, _GAP, _RIGHT = 44, 62, 14
_PANEL = (_WIDTH - _LEFT - 2 * _GAP - _RIGHT) // 3
_COLOURS = {"aggregated": "#2563eb", "prefill": "#d97706", "decode": "#059669"}
_DEMAND, _TOKENS, _ORACLE, _GOOD = "#111827", "#9ca3af", "#9ca3af", "#7c3aed"
_STYLE = "text{font:11px sans-serif;fill:#374151}.g{stroke:#e5e7eb}.t{font-weight:bold}"
_WORST = 0.8
"""Lowest attainment that is drawn; less is drawn here."""


@dataclass(frozen=True, slots=True)
class Row:
    """One run of a strategy.

    series: values over time by name, as `timeline` makes them
    oracle: workers of the oracle of each role over time
    hours:  length of the run
    """

    title: str
    hours: float
    series: Mapping[str, Sequence[float]]
    oracle: Mapping[str, Sequence[float]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class _Panel:
    left: int
    top: int
    count: int
    low: float
    high: float

    def x(self, at: float) -> float:
        return round(self.left + at / max(1, self.count) * _PANEL, 1)

    def y(self, value: float) -> float:
        part = (min(max(value, self.low), self.high) - self.low) / (self.high - self.low)
        return round(self.top + _PLOT * (1 - part), 1)

    def steps(self, values: Sequence[float], colour: str, dash: str = "") -> str:
        """Draw values that hold for a bin each; equal ones in a row take no points."""
        path, last = [f"M{self.x(0)} {self.y(values[0])}"], values[0]
        for at, value in enumerate(values):
            if value != last:
                path.append(f"H{self.x(at)}V{self.y(value)}")
                last = value
        path.append(f"H{self.x(len(values))}")
        return f'<path d="{"".join(path)}" fill="none" stroke="{colour}" stroke-width="1.3"{dash}/>'

    def frame(self, title: str, labels: Mapping[float, str]) -> list[str]:
        found = [f'<text x="{self.left}" y="{self.top - 5}">{title}</text>']
        for value, label in labels.items():
            y = self.y(value)
            found.append(f'<line class="g" x1="{self.left}" x2="{self.left + _PANEL}" y1="{y}" y2="{y}"/>')
            found.append(f'<text x="{self.left - 4}" y="{y + 4}" text-anchor="end">{label}</text>')
        return found


def draw(rows: Sequence[Row]) -> str:
    """Draw runs one below another."""
    parts: list[str] = []
    for number, row in enumerate(rows):
        parts += _draw_row(row, number * _ROW)
    height = len(rows) * _ROW + 4
    body = "\n".join(parts)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" width="{_WIDTH}" height="{height}">\n'
        f'<style>{_STYLE}</style>\n<rect width="{_WIDTH}" height="{height}" fill="#fff"/>\n{body}\n</svg>\n'
    )


def _draw_row(row: Row, top: int) -> list[str]:
    series = row.series
    lefts = [_LEFT + number * (_PANEL + _GAP) for number in range(3)]
    roles = [role for role in _COLOURS if any(series.get(f"workers_{role}", ()))]
    parts = [f'<text class="t" x="{_LEFT}" y="{top + 14}">{html.escape(row.title)}</text>']
    inside = top + _TITLE + 16

    rates, tokens = series["requests_per_s"], series["input_tokens_per_s"]
    panel = _Panel(lefts[0], inside, len(rates), 0.0, max(1e-9, 1.05 * max(rates)))
    most = max(rates)
    parts += panel.frame(
        f'requests/s, <tspan style="fill:{_TOKENS}">prompt tokens/s to {max(tokens):,.0f}</tspan>',
        {0.0: "0", most: f"{most:.3g}"},
    )
    scale = most / max(1e-9, *tokens)
    parts.append(panel.steps([value * scale for value in tokens], _TOKENS))
    parts.append(panel.steps(rates, _DEMAND))

    workers = {role: series[f"workers_{role}"] for role in roles}
    total = [sum(each) for each in zip(*row.oracle.values(), strict=True)] if row.oracle else []
    most = max(max(values) for values in (*workers.values(), *([total] if total else [])))
    panel = _Panel(lefts[1], inside, len(rates), 0.0, 1.05 * most)
    names = ", ".join(f'<tspan style="fill:{_COLOURS[role]}">{role}</tspan>' for role in roles)
    if total:
        names += f', <tspan style="fill:{_ORACLE}">oracle, all</tspan>'
    parts += panel.frame(f"workers: {names}", {0.0: "0", float(most): f"{most:.0f}"})
    if total:
        parts.append(panel.steps(total, _ORACLE, ' stroke-dasharray="3 2"'))
    parts += [panel.steps(values, _COLOURS[role]) for role, values in workers.items()]

    panel = _Panel(lefts[2], inside, len(rates), _WORST, 1.0)
    labels = {value: f"{100 * value:.0f} %" for value in (_WORST, 0.9, 1.0)}
    parts += panel.frame("within both targets, worst minute", labels)
    parts.append(panel.steps(series["attainment"], _GOOD))
    for left in lefts:
        for hour, anchor in ((0.0, "start"), (row.hours, "end")):
            x = round(left + hour / row.hours * _PANEL, 1)
            parts.append(
                f'<text x="{x}" y="{inside + _PLOT + 13}" text-anchor="{anchor}">{hour:.2g} h</text>'
            )
    return parts
