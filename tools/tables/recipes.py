"""Recipes under one load, simulated."""

from collections.abc import Iterator

from benchmarks.simulated.recipes import RECIPES
from tables.read import NONE, figure, table


def simulated() -> Iterator[str]:
    def rows() -> Iterator[list[str]]:
        for recipe in RECIPES:
            goodput = figure("recipes", f"{recipe}_goodput_requests_per_s")
            yield [
                recipe,
                *(
                    f"{value:.{digits}f} ms"
                    if (value := figure("recipes", f"{recipe}_{key}")) is not None
                    else NONE
                    for key, digits in (("ttft_ms_p50", 0), ("ttft_ms_p99", 0), ("tpot_ms_p50", 1))
                ),
                NONE if goodput is None else f"{goodput:.1f} of 10 requests/s",
            ]

    return table(["recipe", "TTFT p50", "TTFT p99", "TPOT p50", "within its targets"], rows())


TABLES = {"recipes": simulated}
