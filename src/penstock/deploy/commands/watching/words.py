"""Figures and names in few characters, safe for a terminal."""

_KILO, _TENTH, _MINUTES_S = 1000, 0.0995, 120.0


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
