"""Streams beside long prompts: what the two sides of `python -m benchmarks disagg` have."""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from tables.read import figure, link, report, table, text


class _Run(NamedTuple):
    file: str
    said: str


RUNS = (
    _Run("disagg", "latest run"),
    _Run("disagg_second", "other prompts"),
    _Run("disagg_third", "third"),
    _Run("disagg_strict", "earlier"),
    _Run("disagg_own_cores", "earlier still"),
    _Run("disagg_even", "prompts come evenly"),
    _Run("disagg_long_prompts", "4,150 to 4,550 tokens, 80 % busy"),
)


class Side(NamedTuple):
    """One comparison: the disaggregated side and the best chunk of two aggregated workers."""

    ratio: float | None
    tokens_ratio: float | None
    chunk: int | None
    disaggregated: tuple[float | None, ...]
    aggregated: tuple[float | None, ...]
    """ITL p99, p99.9 and longest stall in ms, TTFT p99 in s."""


def side(run: _Run) -> Side:
    """Read one run; reports with a second side, of which some tokens might be late, name this one `strict`."""
    end = "" if figure(run.file, "chunk_aggregated_strict") is None else "_strict"
    chunk = figure(run.file, f"chunk_aggregated{end}")
    if chunk is None:
        return Side(None, None, None, (None,) * 4, (None,) * 4)
    return Side(
        figure(run.file, f"itl_p99_ratio{end}"),
        figure(run.file, f"output_tokens_ratio{end}"),
        round(chunk),
        _seen(run.file, f"disaggregated{end}"),
        _seen(run.file, f"aggregated_c{chunk:.0f}"),
    )


def _seen(file: str, name: str) -> tuple[float | None, ...]:
    """Give what a side saw; of a chunk whose tail an older report does not tell, by its samples."""
    itl_s = report(file)["samples"].get(f"itl_s_{name}", ())
    told = [figure(file, f"itl_{what}_ms_{name}") for what in ("p99", "p999", "max")]
    if len(itl_s):
        told = [
            np.percentile(itl_s, percentile) * 1e3 if value is None else value
            for value, percentile in zip(told, (99, 99.9, 100), strict=True)
        ]
    return (*told, figure(file, f"ttft_p99_ms_{name}", 1e-3))


def comparisons() -> Iterator[str]:
    """Each run."""

    def rows() -> Iterator[list[str]]:
        for run in RUNS:
            found = side(run)
            pairs = zip(found.disaggregated, found.aggregated, strict=True)
            yield [
                link(run.said, run.file),
                f"**{text(found.ratio, '.2f')}**",
                *(f"{text(ours)}, {text(theirs)}" for ours, theirs in pairs),
                text(found.chunk, ",d") if found.chunk else "-",
                text(found.tokens_ratio, ".2f"),
            ]

    head = [
        "run", "ITL p99 times as low", "ITL p99, ms: disaggregated, aggregated", "p99.9", "longest stall",
        "TTFT p99, s", "aggregated chunk", "output tokens",
    ]  # fmt: skip
    return table(head, rows())


TABLES = {"disagg": comparisons}
