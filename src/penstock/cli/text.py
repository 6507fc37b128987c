"""Figures, names and tables as text, safe for a terminal."""

from collections.abc import Collection, Iterator, Sequence

_BETWEEN = "  "
_MINUTE_S, _HOUR_S, _DAY_S = 60.0, 3600.0, 86400.0
_KILO, _TENTH, _MINUTES_S = 1000, 0.0995, 120.0


def columns(rows: Sequence[Sequence[str]], right: Collection[int] = ()) -> Iterator[str]:
    """Format rows of equal length as aligned columns, two spaces apart; columns whose number is in `right` end at the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = (
            cell.rjust(width) if number in right else cell.ljust(width)
            for number, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        yield _BETWEEN.join(cells).rstrip()


def age(seconds: float) -> str:
    """Format an age: 12 s, 3 min, 5 h, 2 d."""
    for unit, unit_s in (("d", _DAY_S), ("h", _HOUR_S), ("min", _MINUTE_S)):
        if seconds >= unit_s:
            return f"{seconds / unit_s:.0f} {unit}"
    return f"{seconds:.0f} s"


def seconds(value: float | None) -> str:
    """Format a duration: 3.4 ms, 52 ms, 1.20 s."""
    if value is None:
        return "-"
    if value < _TENTH / 10:
        return f"{value * _KILO:.1f} ms"
    if value < 1:
        return f"{value * _KILO:.0f} ms"
    return f"{value:.2f} s" if value < _MINUTES_S else f"{value / 60:.0f} min"


def printable(text: str) -> str:
    """Replace control characters, such as escape sequences in a name; line breaks and tabs stay."""
    if text.isprintable():
        return text
    return "".join(
        each if each.isprintable() or each in "\n\t" else "\N{REPLACEMENT CHARACTER}" for each in text
    )


def line(text: str) -> str:
    """Make one line without control characters."""
    return " ".join(printable(text).split())
