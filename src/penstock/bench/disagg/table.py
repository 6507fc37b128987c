"""Both sides as a table for people."""

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from penstock.bench.disagg.choice import Point

_COLUMNS = ("workers", "chunk", "ITL p99 ms", "TTFT p99 ms", "tokens/s", "")


def print_table(alone: Point, apart: Point, strict: Point, points: Sequence[Point], best: Point) -> None:
    """Print a line a side; the aggregated workers' best chunk size is marked. `alone` had no prompts, of `strict` no token may be late."""
    table = Table(box=None)
    for number, column in enumerate(_COLUMNS):
        table.add_column(column, justify="right" if number else "left")
    table.add_row("1 prefill, 1 decode", "", *_numbers(apart))
    table.add_row("the same, none late", "", *_numbers(strict), "")
    table.add_row("the same, no prompts", "", *_numbers(alone), "limit")
    for point in points:
        table.add_row("2 aggregated", str(point.chunk), *_numbers(point), "best" if point is best else "")
    Console().print(table)


def _numbers(point: Point) -> tuple[str, str, str]:
    return f"{point.itl_p99_ms:,.1f}", f"{point.ttft_p99_ms:,.0f}", f"{point.output_tokens_per_s:,.0f}"
