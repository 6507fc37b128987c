"""Decides replicas by role: a slow floor from the forecast, under a fast reaction to the queue and the SLO error."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from penstock.core.errors import ConfigError
from penstock.core.types.instances import Role
from penstock.core.wire import Wire
from penstock.planner.capacity import Capacity
from penstock.planner.demand import ExpectedDemand, SloTargets


class RoleDecision(Wire, frozen=True):
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


class ScalingDecision(Wire, frozen=True):
    """One decision.

    Attributes:
        gpus: GPUs of all chosen replicas.
        shortfall: why the SLO is not expected to hold, with the bound and by how much; empty if it is.
        cost: of all chosen replicas, in the unit of the budget; GPUs without a budget.
    """

    expected: ExpectedDemand
    slo: SloTargets
    terms: tuple[RoleDecision, ...]
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


_TINY = 1e-9
_IDLE_PER_S = 1 / 600
"""At fewer requests nobody misses the SLO, and one replica will do."""
_STEP_MAX = 2.0
"""An SLO error at most doubles the replicas in one decision."""
_REPLICAS_MAX = 4096
_MEMORY_S = 60.0
"""A forecast rests on the requests of about so long."""
_DEVIATIONS = 3.0
"""Of a steady demand one forecast in seven hundred is so many deviations off: an hour has 360."""


_CHANCE_MAX = 0.25
"""Of rarer requests, workers would stay for ever."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Decider:
    """A deployment of given roles: one aggregated, or prefill and decode. Pure; decisions depend on the arguments only.

    capacities:     one of each role
    budget:         most that all workers may cost, in the unit of `Capacity.cost`: GPUs or dollars an hour
    drain_s:        seconds in which the queue shall be served, beside the arrivals; the time of a start if that is longer
    hysteresis:     scale-in only if the rest holds the SLO at the rate times 1 + hysteresis, or times what chance makes of a steady rate
    """

    capacities: tuple[Capacity, ...]
    slo: SloTargets
    budget: float
    drain_s: float = 30.0
    hysteresis: float = 0.05

    def __post_init__(self) -> None:
        """Check the settings; raises ConfigError."""
        for name in ("budget", "drain_s"):
            if not (math.isfinite(value := getattr(self, name)) and value > 0):
                raise ConfigError(f"planner: {name} is {value}: expected a number above 0")
        roles = {capacity.role for capacity in self.capacities}
        if len(roles) < len(self.capacities) or roles not in ({Role.AGGREGATED}, {Role.PREFILL, Role.DECODE}):
            raise ConfigError(
                f"planner: roles {sorted(roles)}: expected one aggregated, or one prefill and one decode"
            )
        if not (self.slo.ttft_s > 0 and self.slo.itl_s > 0 and 0 < self.slo.percentile < 100):
            raise ConfigError(f"planner: {self.slo}: expected targets above 0 and a percentile in 0 to 100")
        if not 0 <= self.hysteresis < math.inf:
            raise ConfigError(f"planner: hysteresis is {self.hysteresis}: expected a number of at least 0")
        needed = sum(capacity.cost for capacity in self.capacities)
        if self.budget < needed - _TINY:
            raise ConfigError(
                f"planner: the budget is {self.budget:g}, one replica of each role costs {needed:g}; raise it to that at least"
            )

    @property
    def roles(self) -> frozenset[Role]:
        return frozenset(capacity.role for capacity in self.capacities)

    def decide(
        self,
        expected: ExpectedDemand,
        now: Mapping[Role, int],
        *,
        most: Mapping[Role, int] | None = None,
        gpus_max: int | None = None,
    ) -> ScalingDecision:
        """Choose the fewest replicas that hold the SLO, never beyond the budget and the limits.

        Args:
            expected: demand at the band's upper edge, queue and present latencies.
            now: replicas that serve or start.
            most: most replicas of a role; of roles that it does not name as many as the rest allows.
            gpus_max: GPUs that there are; None is no known limit.
        """
        terms, missing = [], []
        for capacity in self.capacities:
            bound = self._most(capacity, most or {}, gpus_max)
            reason, term = self._term(capacity, expected, now.get(capacity.role, 0), bound)
            terms.append(term)
            missing += [reason] if reason else []
        costs = {capacity.role: capacity.cost for capacity in self.capacities}
        gpus = {capacity.role: float(capacity.gpus) for capacity in self.capacities}
        if (cost := _total(terms, costs)) > self.budget + _TINY:
            missing.append(f"{_counted(terms)} cost {cost:g}, the budget is {self.budget:g}")
            terms = _cut(terms, costs, self.budget, "the budget pays no more")
        if gpus_max is not None and (needed := _total(terms, gpus)) > gpus_max:
            missing.append(f"{_counted(terms)} need {needed:g} GPUs, there are {gpus_max}")
            terms = _cut(terms, gpus, gpus_max, "there are no more GPUs")
        return ScalingDecision(
            expected=expected,
            slo=self.slo,
            terms=tuple(terms),
            gpus=round(_total(terms, gpus)),
            shortfall="; ".join(missing),
            cost=_total(terms, costs),
        )

    def _most(self, capacity: Capacity, most: Mapping[Role, int], gpus_max: int | None) -> int:
        """Bound the replicas of one role, if every other role has one; at least 1."""
        others = [each for each in self.capacities if each is not capacity]
        left = self.budget - sum(each.cost for each in others)
        bounds = [int(left / capacity.cost + _TINY), most.get(capacity.role, _REPLICAS_MAX), _REPLICAS_MAX]
        if gpus_max is not None:
            bounds.append((gpus_max - sum(each.gpus for each in others)) // capacity.gpus)
        return max(1, min(bounds))

    def _term(
        self, capacity: Capacity, expected: ExpectedDemand, now: int, most: int
    ) -> tuple[str, RoleDecision]:
        """Choose the replicas of one role alone; the text says why they do not hold the SLO."""
        rate_per_s = expected.rate_of(capacity.role)
        is_idle = rate_per_s < _IDLE_PER_S and not expected.queued
        if not is_idle and (reason := capacity.unreachable(expected, self.slo)):
            if expected.is_scant(self.slo):
                return "", self._scant(capacity.role, expected, now, most)
            return reason, _at_most(capacity.role, now, most, reason)
        if is_idle:
            rate_per_s = 0.0
        floor = capacity.workers(rate_per_s, expected, self.slo, most)
        if floor is None:
            held = capacity.rate_per_s(most, expected, self.slo)
            reason = f"{capacity.role}: {most} replicas serve {held:.2f} of {rate_per_s:.2f} requests/s within the SLO"
            return reason, _at_most(capacity.role, now, most, reason)
        # Queued requests have their first token before them: where the roles are separate, prefill serves them.
        backlog = rate_per_s + expected.queued / max(self.drain_s, expected.start_s)
        drained = capacity.workers(backlog, expected, self.slo, most) or most
        # Others are on their way already, or not to be judged yet. Where warm ones are fewer than the floor, their latencies are
        # what was expected of so few.
        warm = expected.warm.get(capacity.role, now)
        error = self._error(capacity.role, expected) if warm >= floor else 0.0
        reaction = min(most, max(drained, math.ceil(warm * error)))
        margin = max(self.hysteresis, _chance(rate_per_s, expected))
        keep = capacity.workers(rate_per_s * (1 + margin), expected, self.slo, most) or most
        choice = max(floor, reaction, min(now, keep))
        why = self._why(capacity, expected, choice, floor, drained)
        return "", RoleDecision(
            role=capacity.role,
            now=now,
            floor=floor,
            reaction=reaction,
            keep=keep,
            choice=choice,
            why_not_fewer=why,
        )

    def _scant(self, role: Role, expected: ExpectedDemand, now: int, most: int) -> RoleDecision:
        """Keep what there is, and more where latencies are missed, while too few requests were seen to call the SLO out of reach."""
        missed = math.ceil(expected.warm.get(role, now) * self._error(role, expected))
        choice = min(most, max(1, now, missed))
        why = f"{role}: fewer requests were seen than the {self.slo.samples_min} that a percentile of {self.slo.percentile:g} needs"
        return RoleDecision(
            role=role, now=now, floor=1, reaction=choice, keep=choice, choice=choice, why_not_fewer=why
        )

    def _error(self, role: Role, expected: ExpectedDemand) -> float:
        """Give the ratio of workers that the worst latency asks for, above 1 and at most 2; 0 if all targets are met."""
        ratios = []
        # A decode worker computes short prompts too, and others wait at the router until it has a batch slot.
        ttft_s = expected.decode_ttft_s if role is Role.DECODE else expected.ttft_s
        if ttft_s is not None:
            ratios.append(ttft_s / self.slo.ttft_s)
        if role is not Role.PREFILL and expected.itl_s is not None:
            # Near a worker's capacity, ITL grows about as the square of its load.
            ratios.append(math.sqrt(expected.itl_s / self.slo.itl_s))
        worst = max(ratios, default=0.0)
        return min(worst, _STEP_MAX) if worst > 1 else 0.0

    def _why(
        self, capacity: Capacity, expected: ExpectedDemand, choice: int, floor: int, drained: int
    ) -> str:
        """Say what one replica fewer would break."""
        if choice == 1:
            return f"{capacity.role}: one replica is the fewest"
        held = capacity.rate_per_s(choice - 1, expected, self.slo)
        fewer = f"{capacity.role}: {choice - 1} would serve {held:.2f} requests/s within the SLO"
        if choice == floor:
            return fewer
        if choice == drained:
            return f"{fewer}, too few to serve the {expected.queued} queued within {self.drain_s:g} s"
        if self._error(capacity.role, expected):
            return f"{fewer}, but its SLO is missed now"
        return f"{fewer}, without a margin"


def _chance(rate_per_s: float, expected: ExpectedDemand) -> float:
    """Give the share by which a forecast of so many requests wavers by chance alone."""
    return min(_CHANCE_MAX, _DEVIATIONS * math.sqrt(expected.spread / max(1.0, rate_per_s * _MEMORY_S)))


def _counted(terms: Iterable[RoleDecision]) -> str:
    return " and ".join(f"{term.choice} {term.role}" for term in terms)


def _total(terms: Iterable[RoleDecision], sizes: Mapping[Role, float]) -> float:
    return sum(sizes[term.role] * term.choice for term in terms)


def _cut(
    terms: list[RoleDecision], sizes: Mapping[Role, float], limit: float, why: str
) -> list[RoleDecision]:
    """Reduce the roles' replicas in proportion until their sizes fit `limit`; each role keeps one replica."""
    ones = sum(sizes[term.role] for term in terms)
    share = max(0.0, limit - ones) / (_total(terms, sizes) - ones)
    ideal = {term.role: 1 + share * (term.choice - 1) for term in terms}
    counts = {role: int(count + _TINY) for role, count in ideal.items()}
    left = limit - sum(sizes[role] * count for role, count in counts.items())
    for role in sorted(ideal, key=lambda role: counts[role] - ideal[role]):  # the largest remainder first
        if counts[role] + _TINY < ideal[role] and sizes[role] <= left + _TINY:
            counts[role] += 1
            left -= sizes[role]
    return [_at_most(term.role, term.now, counts[term.role], f"{term.role}: {why}") for term in terms]


def cheapest(decisions: Iterable[ScalingDecision]) -> ScalingDecision:
    """Choose between aggregated and disaggregated: the lowest cost of those that hold the SLO, and of equal costs the first."""
    return min(decisions, key=lambda decision: (bool(decision.shortfall), decision.cost))


def _at_most(role: Role, now: int, most: int, why: str) -> RoleDecision:
    return RoleDecision(
        role=role, now=now, floor=most, reaction=most, keep=most, choice=most, why_not_fewer=why
    )
