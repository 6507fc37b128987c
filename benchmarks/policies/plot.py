"""Mean TTFT by load, a panel for each workload and deployment, as one SVG without scripts."""

import html
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from benchmarks.policies.cells import Cell

_PANEL_WIDTH, _PANEL_HEIGHT = 420, 280
_LEFT, _RIGHT, _TOP, _BOTTOM = 56, 24, 30, 34
_LEGEND_HEIGHT, _LEGEND_COLUMNS, _LEGEND_ROW = 24, 5, 18
_COLOURS = (
    "#111827", "#dc2626", "#059669", "#d97706", "#7c3aed", "#0891b2", "#db2777", "#65a30d", "#2563eb", "#92400e",
)  # fmt: skip
_STYLE = "text{font:11px sans-serif;fill:#374151}.g{stroke:#e5e7eb}.t{font-weight:bold}"

Means = Mapping[Cell, Mapping[str, Mapping[str, float]]]


@dataclass(frozen=True, slots=True)
class _Panel:
    """Loads across, the logarithm of seconds up; `low` and `high` are powers of ten."""

    left: float
    top: float
    loads: Sequence[int]
    low: int
    high: int

    def x(self, load: float) -> float:
        first, last = self.loads[0], self.loads[-1]
        part = (load - first) / (last - first) if last > first else 0.5
        return round(self.left + _LEFT + part * (_PANEL_WIDTH - _LEFT - _RIGHT), 1)

    def y(self, seconds: float) -> float:
        part = (math.log10(seconds) - self.low) / (self.high - self.low)
        return round(self.top + _PANEL_HEIGHT - _BOTTOM - part * (_PANEL_HEIGHT - _TOP - _BOTTOM), 1)


def draw(means: Means) -> str:
    """Draw the cells without trouble, panels side by side, two in a row."""
    groups: dict[tuple[str, str], dict[int, Mapping[str, Mapping[str, float]]]] = {}
    for cell, by_policy in means.items():
        if cell.trouble is None:
            groups.setdefault((cell.workload, cell.deployment), {})[cell.load] = by_policy
    policies = list(dict.fromkeys(policy for by_policy in means.values() for policy in by_policy))
    colours = {policy: _COLOURS[n % len(_COLOURS)] for n, policy in enumerate(policies)}
    parts = []
    for number, ((workload, deployment), by_load) in enumerate(groups.items()):
        place = number % 2 * _PANEL_WIDTH, number // 2 * _PANEL_HEIGHT
        parts += _draw_panel(f"{workload} on {deployment}: mean TTFT, s", place, by_load, colours)
    top = -(-len(groups) // 2) * _PANEL_HEIGHT
    parts += _draw_legend(colours, top)
    height = top + _LEGEND_HEIGHT + -(-len(policies) // _LEGEND_COLUMNS) * _LEGEND_ROW
    width = 2 * _PANEL_WIDTH
    body = "\n".join(parts)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}">\n'
        f'<style>{_STYLE}</style>\n<rect width="{width}" height="{height}" fill="#fff"/>\n{body}\n</svg>\n'
    )


def _draw_panel(
    title: str,
    place: tuple[float, float],
    by_load: Mapping[int, Mapping[str, Mapping[str, float]]],
    colours: Mapping[str, str],
) -> list[str]:
    left, top = place
    loads = sorted(by_load)
    seconds = [own["ttft_mean_s"] for by_policy in by_load.values() for own in by_policy.values()]
    low = math.floor(math.log10(min(seconds)))
    panel = _Panel(left, top, loads, low, max(math.ceil(math.log10(max(seconds))), low + 1))
    parts = [f'<text class="t" x="{left + _LEFT}" y="{top + 18}">{html.escape(title)}</text>']
    for power in range(panel.low, panel.high + 1):
        y = panel.y(10.0**power)
        parts.append(
            f'<line class="g" x1="{left + _LEFT}" x2="{left + _PANEL_WIDTH - _RIGHT}" y1="{y}" y2="{y}"/>'
        )
        parts.append(f'<text x="{left + _LEFT - 6}" y="{y + 4}" text-anchor="end">{10.0**power:g}</text>')
    parts += [
        f'<text x="{panel.x(load)}" y="{top + _PANEL_HEIGHT - _BOTTOM + 16}" text-anchor="middle">{load} %</text>'
        for load in loads
    ]
    for policy, colour in colours.items():
        points = [
            (panel.x(load), panel.y(by_load[load][policy]["ttft_mean_s"]))
            for load in loads
            if policy in by_load[load]
        ]
        line = " ".join(f"{x},{y}" for x, y in points)
        parts.append(
            f'<polyline fill="none" stroke="{colour}" stroke-width="1.5" points="{line}">'
            f"<title>{html.escape(policy)}</title></polyline>"
        )
        parts += [f'<circle cx="{x}" cy="{y}" r="2.5" fill="{colour}"/>' for x, y in points]
    return parts


def _draw_legend(colours: Mapping[str, str], top: float) -> list[str]:
    parts = []
    step = 2 * _PANEL_WIDTH // _LEGEND_COLUMNS
    for number, (policy, colour) in enumerate(colours.items()):
        x = number % _LEGEND_COLUMNS * step + 20
        y = top + 16 + number // _LEGEND_COLUMNS * _LEGEND_ROW
        parts.append(f'<circle cx="{x}" cy="{y - 4}" r="4" fill="{colour}"/>')
        parts.append(f'<text x="{x + 9}" y="{y}">{html.escape(policy)}</text>')
    return parts
