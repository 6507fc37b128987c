"""Share of prefill seconds saved by the size of the pool, a line for each policy, as one SVG without scripts."""

import math
import re
from collections.abc import Mapping

_WIDTH, _HEIGHT, _LEFT, _RIGHT, _TOP, _BOTTOM = 560, 340, 44, 96, 34, 36
_COLOURS = {"seconds": "#2563eb", "lru": "#111827", "lfu": "#059669", "arc": "#d97706", "s3-fifo": "#7c3aed", "offline": "#9ca3af"}  # fmt: skip
_KEY = re.compile(r"trace_([a-z0-9-]+)_saved_percent_(\d+)_blocks")
_STYLE = "text{font:11px sans-serif;fill:#374151}.g{stroke:#e5e7eb}.t{font-weight:bold}"
_LABEL_HEIGHT = 13
_STEP = 5


def draw(figures: Mapping[str, float]) -> str:
    """Draw the figures of the trace; an empty panel without any."""
    lines: dict[str, dict[int, float]] = {}
    for name, value in figures.items():
        match = _KEY.fullmatch(name)
        if match is not None:
            lines.setdefault(match[1], {})[int(match[2])] = value
    sizes = sorted({size for line in lines.values() for size in line})
    most = max((value for line in lines.values() for value in line.values()), default=0.0)
    top = _STEP * math.ceil(max(most, _STEP) / _STEP)

    def x(size: int) -> float:
        low, high = math.log(sizes[0]), math.log(sizes[-1])
        part = (math.log(size) - low) / (high - low) if high > low else 0.5
        return round(_LEFT + part * (_WIDTH - _LEFT - _RIGHT), 1)

    def y(value: float) -> float:
        return round(_HEIGHT - _BOTTOM - value / top * (_HEIGHT - _TOP - _BOTTOM), 1)

    parts = [f'<text class="t" x="{_LEFT}" y="18">prefill seconds saved, %, by blocks of 512 tokens</text>']
    for value in range(0, top + 1, _STEP):
        parts.append(f'<line class="g" x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{y(value)}" y2="{y(value)}"/>')
        parts.append(f'<text x="{_LEFT - 6}" y="{y(value) + 4}" text-anchor="end">{value}</text>')
    parts += [
        f'<text x="{x(size)}" y="{_HEIGHT - _BOTTOM + 18}" text-anchor="middle">{size:,}</text>'
        for size in sizes
    ]
    above = float(_HEIGHT)
    for policy, line in sorted(lines.items(), key=lambda item: item[1][max(item[1])]):
        colour = _COLOURS.get(policy, "#dc2626")
        points = " ".join(f"{x(size)},{y(line[size])}" for size in sorted(line))
        width = 2.5 if policy == "seconds" else 1.3
        dash = ' stroke-dasharray="4 3"' if policy == "offline" else ""
        parts.append(
            f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="{width}"{dash}/>'
        )
        above = min(y(line[max(line)]) + 4, above - _LABEL_HEIGHT)
        parts.append(
            f'<text x="{_WIDTH - _RIGHT + 6}" y="{round(above, 1)}" style="fill:{colour}">{policy}</text>'
        )
    body = "\n".join(parts)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" width="{_WIDTH}" height="{_HEIGHT}">\n'
        f'<style>{_STYLE}</style>\n<rect width="{_WIDTH}" height="{_HEIGHT}" fill="#fff"/>\n{body}\n</svg>\n'
    )
