"""GB/s by backend, a panel for each direction and shape, as one SVG without scripts."""

import html

from benchmarks.transfer.contenders import OPS
from benchmarks.transfer.shapes import SHAPES
from penstock.bench.report import BenchReport

_WIDTH, _NAME_WIDTH, _VALUE_WIDTH = 400, 90, 44
_ROW, _TITLE = 18, 30
_COLOURS = {"nixl": "#9ca3af", "nixl_tcp": "#9ca3af", "memcpy": "#d1d5db", "fio": "#d1d5db"}
_OURS = "#2563eb"
_STYLE = "text{font:11px sans-serif;fill:#374151}.t{font-weight:bold}"


def draw(report: BenchReport) -> str:
    """Draw bars: ours, those of peers and the limits."""
    panels = [(op.value, shape.name) for shape in SHAPES for op in OPS]
    rows = {panel: _rows(report, *panel) for panel in panels}
    height_of = [
        _TITLE + _ROW * max(len(rows[panels[2 * line]]), len(rows[panels[2 * line + 1]])) + 12
        for line in range(len(SHAPES))
    ]
    parts: list[str] = []
    for number, panel in enumerate(panels):
        left, top = number % 2 * _WIDTH, sum(height_of[: number // 2])
        parts += _panel(f"{panel[0]} {panel[1]}, GB/s", left, top, rows[panel])
    width, height = 2 * _WIDTH, sum(height_of)
    body = "\n".join(parts)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}">\n'
        f'<style>{_STYLE}</style>\n<rect width="{width}" height="{height}" fill="#fff"/>\n{body}\n</svg>\n'
    )


def _rows(report: BenchReport, op: str, shape: str) -> list[tuple[str, float]]:
    middle, end = f"_{op}_{shape}", "_gb_per_s"
    rows = [
        (name.removesuffix(middle + end), value)
        for name, value in report.figures.items()
        if name.endswith(middle + end)
    ]
    memcpy = report.limits.get(f"memcpy_{shape}{end}")
    fio = report.limits.get(f"fio_{op}{'' if shape == '128x1MiB' else '_' + shape.partition('x')[2]}{end}")
    return [
        *rows,
        *((name, value) for name, value in (("memcpy", memcpy), ("fio", fio)) if value is not None),
    ]


def _panel(title: str, left: float, top: float, rows: list[tuple[str, float]]) -> list[str]:
    most = max((value for _, value in rows), default=1.0)
    space = _WIDTH - _NAME_WIDTH - _VALUE_WIDTH
    parts = [f'<text class="t" x="{left + _NAME_WIDTH}" y="{top + 18}">{html.escape(title)}</text>']
    for number, (name, value) in enumerate(rows):
        y = top + _TITLE + number * _ROW
        width = round(value / most * space, 1)
        colour = _COLOURS.get(name, _OURS)
        parts.append(
            f'<text x="{left + _NAME_WIDTH - 6}" y="{y + 10}" text-anchor="end">{html.escape(name)}</text>'
        )
        parts.append(f'<rect x="{left + _NAME_WIDTH}" y="{y}" width="{width}" height="12" fill="{colour}"/>')
        parts.append(f'<text x="{left + _NAME_WIDTH + width + 4}" y="{y + 10}">{value:.3g}</text>')
    return parts
