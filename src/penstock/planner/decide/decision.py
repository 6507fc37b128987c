"""What was decided, and why."""

from penstock.core.types.instances import Role
from penstock.core.wire import Wire
from penstock.planner.estimate.expected_demand import ExpectedDemand
from penstock.planner.estimate.slo import Slo


class RoleTerm(Wire, frozen=True):
    """How the replicas of one role came about.

    Attributes:
        now: replicas before.
        floor: replicas that hold the SLO at the forecast rate, within the limit.
        reaction: replicas that drain the queue in time and answer the present SLO error, within the limit.
        keep: fewest replicas that hold the SLO with the margin; scale-in stops there.
        choice: replicas wanted.
        why_not_fewer: what one replica fewer would break.
    """

    role: Role
    now: int
    floor: int
    reaction: int
    keep: int
    choice: int
    why_not_fewer: str


class Decision(Wire, frozen=True):
    """One decision.

    Attributes:
        gpus: GPUs of all chosen replicas.
        shortfall: why the SLO is not expected to hold, with the bound and by how much; empty if it is.
        cost: of all chosen replicas, in the unit of the budget; GPUs without a budget.
    """

    expected: ExpectedDemand
    slo: Slo
    terms: tuple[RoleTerm, ...]
    gpus: int
    shortfall: str = ""
    cost: float = 0.0

    @property
    def target(self) -> dict[Role, int]:
        """Replicas wanted of each role."""
        return {term.role: term.choice for term in self.terms}

    def explain(self) -> str:
        """Say the decision in one line."""
        choices = ", ".join(f"{term.role} {term.now} -> {term.choice}" for term in self.terms)
        asked = f"{self.expected.rate_per_s:.2f} requests/s, {self.expected.queued} queued"
        return f"{choices} ({self.gpus} GPUs) for {asked}: " + (
            self.shortfall or "; ".join(term.why_not_fewer for term in self.terms)
        )
