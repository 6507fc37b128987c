"""A snapshot as plain text, for pipes and `--once`."""

from collections.abc import Iterator

from penstock.deploy.commands.watching.seen import Seen
from penstock.deploy.commands.watching.summary import alerts, figures, head
from penstock.deploy.commands.watching.tables import Table, tables

_ALERTS_MAX = 32
_BETWEEN = "  "


def plain(seen: Seen) -> Iterator[str]:
    """Yield the lines: head, alerts, figures, and each table that has rows."""
    yield head(seen)
    yield from (
        text if severity in {"fine", "info"} else f"{severity}: {text}"
        for severity, text in alerts(seen, _ALERTS_MAX)
    )
    yield from figures(seen).split("\n")
    for table in tables(seen):
        if table.rows:
            yield ""
            yield table.name
            yield from _lines(table)
            if table.name == "workers" and (more := seen.snapshot.num_workers - len(table.rows)) > 0:
                yield f"and {more} more workers"


def _lines(table: Table) -> Iterator[str]:
    lines = [tuple(name.removeprefix("#") for name in table.columns)]
    lines += [tuple(cell.text for cell in row.cells) for row in table.rows]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    for cells in lines:
        aligned = (
            cell.rjust(width) if name.startswith("#") else cell.ljust(width)
            for name, cell, width in zip(table.columns, cells, widths, strict=True)
        )
        yield _BETWEEN.join(aligned).rstrip()
