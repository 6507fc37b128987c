"""The HTML page around charts: one file with its style and script."""

import html
from collections.abc import Iterable, Sequence
from pathlib import Path

from penstock.sim.report.charts import HEIGHT, WIDTH, Chart

_HERE = Path(__file__).parent


def make_document(heading: str, body: str) -> str:
    """Make the page: `heading` is plain text, `body` is HTML."""
    title = html.escape(heading)
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{title}</title>'
        f'<meta name="viewport" content="width=device-width"><style>\n{_asset("page.css")}</style></head><body>'
        f"<h1>{title}</h1>{body}<script>\n{_asset('page.js')}</script></body></html>\n"
    )


def chart_grid(charts: Iterable[Chart]) -> str:
    """Make a responsive grid of charts."""
    return f'<div class="charts">{"".join(chart.to_svg() for chart in charts)}</div>'


def make_picture(charts: Sequence[Chart], *, columns: int = 2) -> str:
    """Draw charts side by side as one SVG without scripts."""
    width, height = columns * _PANEL_WIDTH, -(-len(charts) // columns) * _PANEL_HEIGHT
    panels = "".join(
        f'<g transform="translate({number % columns * _PANEL_WIDTH},{number // columns * _PANEL_HEIGHT})">{_panel(chart)}</g>\n'
        for number, chart in enumerate(charts)
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}">\n'
        f'<style>{_PICTURE_STYLE}</style>\n<rect width="{width}" height="{height}" fill="#fff"/>\n{panels}</svg>\n'
    )


def _panel(chart: Chart) -> str:
    """Draw one chart with caption and legend."""
    names = "".join(
        f'<g class="{kind}{index}"><rect class="key" x="{_MARGIN + 180 * place}" y="{_LEGEND_TOP - 9}" width="10" height="10"/>'
        f'<text x="{_MARGIN + 180 * place + 15}" y="{_LEGEND_TOP}">{html.escape(name)}</text></g>'
        for place, (kind, index, name) in enumerate(chart.names())
    )
    return (
        f'<text class="title" x="{_MARGIN}" y="22">{html.escape(chart.title)}</text>'
        f'<text x="{_MARGIN}" y="38">{html.escape(chart.note)}</text>'
        f'<svg y="44" width="{WIDTH}" height="{HEIGHT}">{chart.drawing()}</svg>{names}'
    )


_MARGIN = 16
_LEGEND_TOP = HEIGHT + 60
_PANEL_WIDTH, _PANEL_HEIGHT = WIDTH + 20, HEIGHT + 76
_PICTURE_STYLE = (
    "text{font:11.5px sans-serif;fill:#5d6878}.title{font-weight:bold;font-size:13px;fill:#1c2430}"
    ".grid{stroke:#e3e7ed}.mark{stroke:#5d6878;stroke-dasharray:4 3}text.mark{stroke:none}.cursor{visibility:hidden}"
    ".line{fill:none;stroke-width:1.8}.c0 .key,.dots.c0{fill:#2563eb}.c1 .key,.dots.c1{fill:#d97706}"
    ".c2 .key,.dots.c2{fill:#059669}.c3 .key,.dots.c3{fill:#dc2626}"
    ".line.c0{stroke:#2563eb}.line.c1{stroke:#d97706}.line.c2{stroke:#059669}.line.c3{stroke:#dc2626}"
)


def text_table(rows: Iterable[Sequence[str]]) -> str:
    """Make an HTML table of text cells."""
    lines = ("".join(f"<td>{html.escape(cell)}</td>" for cell in row) for row in rows)
    return f'<div class="table words"><table>{"".join(f"<tr>{line}</tr>" for line in lines)}</table></div>'


def _asset(name: str) -> str:
    return (_HERE / name).read_text(encoding="utf-8")
