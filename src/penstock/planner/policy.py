"""What to do about a demand: decides and damps, and touches nothing."""

import math
from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet

from penstock.core.types.instances import Role
from penstock.planner.capacity import Capacity
from penstock.planner.config import PlannerConfig, kinds_of
from penstock.planner.damping import Damped, DamperConfig, Damping
from penstock.planner.decider import Decider, ScalingDecision, cheapest
from penstock.planner.demand import ExpectedDemand, SloTargets

Room = Mapping[Role, int | None]
"""Workers of each role that may be added now; None is no known limit. Roles that it does not name find none."""
_TINY = 1e-9
_SWITCH_AGAIN = 3.0
"""Cool-downs between two such changes: each moves every worker."""
_SWITCH = 0.85
"""Aggregated workers become disaggregated ones, and back, where these have at most this share of the cost."""


class Policy:
    """Gives equal answers to equal questions in the same order. One task owns it; the caller gives the times."""

    def __init__(self, config: PlannerConfig, slo: SloTargets, capacities: Sequence[Capacity]) -> None:
        """Check the settings.

        Args:
            config: bounds and times.
            slo: latency targets.
            capacities: as for `Planner`.

        Raises:
            ConfigError: the roles cannot be planned, a bound names none of them, or the budget pays no replica of each.
        """
        roles = {capacity.role for capacity in capacities}
        config.check_roles(roles)
        self._kinds = kinds_of(roles)
        self._config = config
        self._slo = slo
        self._capacities = tuple(capacities)
        least = 1 if len(self._kinds) == 1 else 0
        self._damping = Damping(
            {
                role: DamperConfig(
                    replicas_min=least * config.bounds(role)[0],
                    replicas_max=config.bounds(role)[1],
                    cool_down_s=config.cool_down_s,
                )
                for role in sorted(roles)
            }
        )
        self._kind: frozenset[Role] | None = None
        """The roles in use, of several kinds; the others' workers leave or change roles."""
        self._switched_s = -math.inf
        self._decided_by: tuple[dict[Role, float], list[Decider]] | None = None
        """Factors of step times, and the deciders with these factors."""
        self._deciders({})

    def decide(
        self,
        at_s: float,
        expected: ExpectedDemand,
        *,
        now: Mapping[Role, int],
        room: Room,
        factors: Mapping[Role, float],
    ) -> ScalingDecision:
        """Decide for each kind of deployment; another kind than the present one has to be clearly cheaper.

        Args:
            at_s: present time.
            expected: the demand to provide for.
            now: workers that count.
            room: workers that may be added.
            factors: measured over predicted step times; 1 for roles that it does not name.
        """
        most, gpus_max = self._most(now, room), self._gpus_max(now, room)
        found = [
            decider.decide(expected, now, most=most, gpus_max=gpus_max) for decider in self._deciders(factors)
        ]
        best = cheapest(found)
        if len(found) == 1:
            return best
        if self._kind is None:
            self._kind = max(self._kinds, key=lambda kind: sum(now.get(role, 0) for role in kind))
        present = found[self._kinds.index(self._kind)]
        saves = best.cost <= _SWITCH * present.cost or (present.shortfall and not best.shortfall)
        if best is present or not saves or at_s - self._switched_s < _SWITCH_AGAIN * self._config.cool_down_s:
            return present
        self._switched_s, self._kind = at_s, frozenset(best.target)
        return best

    def damp(
        self,
        at_s: float,
        decision: ScalingDecision,
        *,
        now: Mapping[Role, int],
        start_s: float,
        may_flip: Callable[[Role, Role], bool],
    ) -> Damped:
        """Give the workers to aim at.

        Args:
            at_s: present time.
            decision: what `decide` gave.
            now: workers that count.
            start_s: seconds until a worker that is added serves.
            may_flip: whether workers of the first role can take the second.
        """
        wanted = {capacity.role: 0 for capacity in self._capacities} | decision.target
        if len(self._kinds) > 1:
            wanted |= {
                role: max(count, self._config.bounds(role)[0]) for role, count in decision.target.items()
            }
        return self._affordable(
            now, self._damping.damp(at_s, now, wanted, start_s=start_s, may_flip=may_flip)
        )

    def _affordable(self, now: Mapping[Role, int], damped: Damped) -> Damped:
        """Add no worker that the budget does not pay beside those that are kept for their cool-down."""
        if self._config.budget is None:
            return damped
        target, why = dict(damped.target), list(damped.why)
        costs = {each.role: each.cost for each in self._capacities}
        over = sum(costs[role] * count for role, count in target.items()) - self._config.budget.amount
        for role in sorted(target, key=lambda role: now.get(role, 0) - target[role]):  # the most added first
            added = target[role] - now.get(role, 0)
            left_out = min(added, math.ceil(over / costs[role] - _TINY))
            if left_out > 0:
                target[role] -= left_out
                over -= left_out * costs[role]
                why.append(f"{role}: {left_out} fewer, as the budget pays no more beside those that are kept")
        return Damped(target, tuple(why))

    def _deciders(self, factors: Mapping[Role, float]) -> list[Decider]:
        """Give a decider of each kind of deployment, by step times as they are measured.

        Raises:
            ConfigError: the budget pays no replica of each role.
        """
        by = dict(factors)
        if self._decided_by is None or by != self._decided_by[0]:
            self._decided_by = by, [self._decider(kind, factors) for kind in self._kinds]
        return self._decided_by[1]

    def _decider(self, kind: AbstractSet[Role], factors: Mapping[Role, float]) -> Decider:
        own = [capacity for capacity in self._capacities if capacity.role in kind]
        whole = sum(capacity.cost * self._config.bounds(capacity.role)[1] for capacity in own)
        return Decider(
            capacities=tuple(capacity.slower(factors.get(capacity.role, 1.0)) for capacity in own),
            slo=self._slo,
            budget=self._config.budget.amount if self._config.budget else whole,
            hysteresis=self._config.act.hysteresis,
        )

    def _most(self, now: Mapping[Role, int], room: Room) -> dict[Role, int]:
        """Bound each role by its settings and by the room that there is."""
        total = sum(now.values())
        most = {}
        for capacity in self._capacities:
            bound = self._config.bounds(capacity.role)[1]
            free = room.get(capacity.role, 0)
            most[capacity.role] = bound if free is None else min(bound, total + free)
        return most

    def _gpus_max(self, now: Mapping[Role, int], room: Room) -> int | None:
        """Count the GPUs of the present workers and of those that still find room; None is no known limit."""
        free = [(room.get(capacity.role, 0), capacity.gpus) for capacity in self._capacities]
        known = [count * gpus for count, gpus in free if count is not None]
        if len(known) < len(free):
            return None
        taken = sum(now.get(capacity.role, 0) * capacity.gpus for capacity in self._capacities)
        return taken + max(known)
