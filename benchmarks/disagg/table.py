"""Prints all sides as a table."""

from collections.abc import Sequence
from dataclasses import dataclass

from rich.console import Console
from rich.table import Table

from benchmarks.disagg.choice import Point

_COLUMNS = ("workers", "chunk", "ITL p99 ms", "p99.9", "longest", "TTFT p99 ms", "tokens/s", "")
_FILE_COLUMNS = 1000


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the table."""

    workers: str
    point: Point
    chunk: str = ""
    remark: str = ""


def print_table(rows: Sequence[Row]) -> None:
    """Print one line for each side."""
    table = Table(box=None)
    for number, column in enumerate(_COLUMNS):
        table.add_column(column, justify="right" if number else "left", no_wrap=not number)
    for row in rows:
        table.add_row(row.workers, row.chunk, *_numbers(row.point), row.remark)
    console = Console()
    if not console.is_terminal:
        console.width = _FILE_COLUMNS  # a file needs no line to be broken
    console.print(table)


def _numbers(point: Point) -> tuple[str, ...]:
    itl_ms = (point.itl_p99_ms, point.itl_p999_ms, point.itl_max_ms)
    return (
        *(f"{value:,.1f}" for value in itl_ms),
        f"{point.ttft_p99_ms:,.0f}",
        f"{point.output_tokens_per_s:,.0f}",
    )
