"""Reports of benches, and how their figures are written."""

import json
import math
from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
LINK = "../benchmarks/results"
"""From docs."""
NONE = "-"


@cache
def report(name: str) -> dict[str, Any]:
    """Give a report, of which nothing is there where it was never made."""
    path = RESULTS / f"{name}.json"
    if not path.exists():
        return {"figures": {}, "limits": {}, "samples": {}, "config": {}, "date": NONE}
    loaded: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return loaded


def figure(name: str, key: str, scale: float = 1.0) -> float | None:
    """Give a figure, or a limit, of a report; None where it has none of that name."""
    found = report(name)
    value = found["figures"].get(key, found["limits"].get(key))
    return None if value is None else scale * value


def text(value: float | None, form: str = ",.3g") -> str:
    """Write a number; `,.3g` is three digits, without an exponent."""
    if value is None or math.isnan(value):
        return NONE
    if form == ",.3g":
        digits = 2 - math.floor(math.log10(abs(value))) if value else 0
        return f"{round(value, digits):,.{max(digits, 0)}f}"
    return format(value, form)


def of(name: str, key: str, form: str = ",.3g", scale: float = 1.0) -> str:
    return text(figure(name, key, scale), form)


def several(name: str, keys: Iterable[str], form: str = ",.3g", scale: float = 1.0) -> str:
    return ", ".join(of(name, key, form, scale) for key in keys)


def ratio(one: float | None, other: float | None) -> float | None:
    return None if one is None or not other else one / other


def link(label: str, *names: str) -> str:
    first = names[0] if names else label
    return f"[{label}]({LINK}/{first}.json)"


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> Iterator[str]:
    yield f"| {' | '.join(head)} |"
    yield "|" + "---|" * len(head)
    for row in rows:
        yield f"| {' | '.join(row)} |"
