"""The page around charts: one HTML file that needs nothing else; style and script are in it."""

import html
from collections.abc import Iterable, Sequence
from pathlib import Path

from penstock.sim.charts import Chart

_HERE = Path(__file__).parent


def make_document(heading: str, body: str) -> str:
    """Write the page around `body`, which is HTML; `heading` is text."""
    title = html.escape(heading)
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{title}</title>'
        f'<meta name="viewport" content="width=device-width"><style>\n{_asset("page.css")}</style></head><body>'
        f"<h1>{title}</h1>{body}<script>\n{_asset('page.js')}</script></body></html>\n"
    )


def chart_grid(charts: Iterable[Chart]) -> str:
    """Put charts beside each other as the page's width allows."""
    return f'<div class="charts">{"".join(chart.to_svg() for chart in charts)}</div>'


def text_table(rows: Iterable[Sequence[str]]) -> str:
    """Make a table of text."""
    lines = ("".join(f"<td>{html.escape(cell)}</td>" for cell in row) for row in rows)
    return f'<div class="table words"><table>{"".join(f"<tr>{line}</tr>" for line in lines)}</table></div>'


def _asset(name: str) -> str:
    return (_HERE / name).read_text(encoding="utf-8")
