"""How the workers of a simulated deployment changed, and what a planner decided."""

from collections import Counter
from dataclasses import dataclass, field
from itertools import pairwise
from typing import NamedTuple

from penstock.core.types.instances import Role
from penstock.planner.explain.record import DecisionRecord


class RoleCount(NamedTuple):
    """Workers of one role: those that serve, and all that hold devices, also as they start or drain."""

    ready: int = 0
    present: int = 0


@dataclass(slots=True)
class ScalingRecord:
    """Times are virtual seconds since the first request was due.

    counts:    workers by role, at each change
    worker_s:  seconds that workers held devices, by the role whose settings they have
    changes:   workers added, retired and flipped
    decisions: rounds that changed something; none without a planner
    rounds:    all rounds of the planner by what came of them
    """

    counts: list[tuple[float, dict[Role, RoleCount]]] = field(default_factory=list)
    worker_s: dict[Role, float] = field(default_factory=dict)
    changes: Counter[str] = field(default_factory=Counter)
    decisions: list[tuple[float, DecisionRecord]] = field(default_factory=list)
    rounds: Counter[str] = field(default_factory=Counter)

    @property
    def turns(self) -> int:
        """How often the number of workers that hold devices fell after it rose, or rose after it fell."""
        totals = [sum(count.present for count in counts.values()) for _, counts in self.counts]
        rises = [after > before for before, after in pairwise(totals) if after != before]
        return sum(one != other for one, other in pairwise(rises))

    def mean(self, role: Role, end_s: float) -> float:
        """Give the mean number of ready workers until `end_s`."""
        entries = [*self.counts, (end_s, {})]
        total = sum(
            counts.get(role, RoleCount()).ready * (until_s - at_s)
            for (at_s, counts), (until_s, _) in pairwise(entries)
        )
        return total / end_s if end_s > 0 else 0.0
