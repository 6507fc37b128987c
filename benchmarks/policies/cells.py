"""Cells of workload, deployment, load and trouble, and how often each cell is run."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

from benchmarks.runner import DEPLOYMENTS, RECORDED, SYNTHETIC, Trouble
from penstock.core.errors import ConfigError

LOADS = (30, 60, 80, 95, 110)
"""In per cent of saturation."""
OVERLOAD = 110
HEADLINE = (SYNTHETIC, "70b-fp8", 80)

TROUBLES = {
    "slow-worker": Trouble(slowness=1.5),
    "fast-worker": Trouble(slowness=0.5),
    "late-loads": Trouble(load_delay_s=0.2),
}
TROUBLED_LOAD = 80
"""Cells with trouble have this load."""


@dataclass(frozen=True, slots=True)
class Cell:
    """One row of the comparison. `trouble` names one of `TROUBLES`; without one, engines are as the router expects."""

    workload: str
    deployment: str
    load: int
    trouble: str | None = None

    @property
    def name(self) -> str:
        name = f"{self.workload}/{self.deployment}/{self.load}"
        return name if self.trouble is None else f"{name}/{self.trouble}"

    @property
    def is_headline(self) -> bool:
        return (self.workload, self.deployment, self.load) == HEADLINE and self.trouble is None


@dataclass(frozen=True, slots=True)
class Effort:
    """Requests and seeds of a cell, and the tolerance of the search for saturation; None takes a guess instead.

    `saturation_rps`, by workload/deployment, is not searched.
    """

    requests: int
    headline_requests: int
    seeds: int
    headline_seeds: int
    tolerance: float | None
    saturation_rps: Mapping[str, float] = field(default_factory=dict)

    def of(self, cell: Cell) -> tuple[int, range]:
        """Give a cell's requests and its seeds."""
        if cell.is_headline:
            return self.headline_requests, range(1, self.headline_seeds + 1)
        return self.requests, range(1, self.seeds + 1)


def all_cells(*, with_recorded: bool) -> Iterator[Cell]:
    """Give every cell; cells of the recorded workload only if there is a trace."""
    for workload in (SYNTHETIC, RECORDED) if with_recorded else (SYNTHETIC,):
        for deployment in DEPLOYMENTS:
            for load in LOADS:
                yield Cell(workload, deployment, load)
            for trouble in TROUBLES:
                yield Cell(workload, deployment, TROUBLED_LOAD, trouble)


def select(cells: Sequence[Cell], patterns: Sequence[str]) -> list[Cell]:
    """Give the cells whose names match a pattern, such as `S/*/80`; all without patterns.

    Raises:
        ConfigError: a pattern matches nothing.
    """
    for pattern in patterns:
        if not any(fnmatchcase(cell.name, pattern) for cell in cells):
            names = ", ".join(cell.name for cell in cells)
            raise ConfigError(f"--cells: {pattern!r} matches none of {names}; workload M needs --trace")
    return [c for c in cells if not patterns or any(fnmatchcase(c.name, p) for p in patterns)]


def read_rates(text: str) -> dict[str, float]:
    """Read `S/8b-bf16=31.9,...`.

    Raises:
        ConfigError: it is something else.
    """
    known = {f"{workload}/{deployment}" for workload in (SYNTHETIC, RECORDED) for deployment in DEPLOYMENTS}
    found: dict[str, float] = {}
    for part in filter(None, text.split(",")):
        name, _, rate = part.partition("=")
        try:
            found[name] = float(rate)
        except ValueError:
            found[name] = 0.0
        if name not in known or not 0 < found[name] < math.inf:
            raise ConfigError(
                f"--saturation: {part!r}: expected NAME=RATE with a rate > 0 and one of {', '.join(sorted(known))}"
            )
    return found
