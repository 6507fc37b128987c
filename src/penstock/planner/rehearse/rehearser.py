"""Refuses a scale-in that a simulation of the next minutes says would break the SLO."""

import asyncio
import random
from collections.abc import Mapping, Sequence

import msgspec

from penstock.core.types.instances import Role
from penstock.core.wire import Wire
from penstock.planner.decide.capacity import Capacity
from penstock.planner.estimate.expected_demand import ExpectedDemand
from penstock.planner.estimate.slo import Slo
from penstock.planner.observe.observation import Observation
from penstock.planner.rehearse.recent_demand import RecentDemand
from penstock.planner.rehearse.rehearsal import Rehearsed, rehearse

_SEED = 1


class Checked(Wire, frozen=True):
    """What rehearsals made of a scale-in.

    Attributes:
        trials: the simulations of this round; none where the last round's answer still holds.
        kept: workers of each role that stay at least; empty where nothing was refused.
        why: in words; empty without a refusal.
    """

    trials: tuple[Rehearsed, ...] = ()
    kept: dict[Role, int] = msgspec.field(default_factory=dict)
    why: str = ""


class Rehearser:
    """Checks scale-ins of one deployment, in a thread: the event loop goes on. One task owns it."""

    def __init__(self, seconds: float, slo: Slo, capacities: Sequence[Capacity], *, again_s: float) -> None:
        """Know no requests yet.

        Args:
            seconds: how much of the recent demand is simulated.
            slo: latency targets.
            capacities: the latency model of each role's workers, uncorrected.
            again_s: a refusal holds for so long.
        """
        self._slo = slo
        self._capacities = tuple(capacities)
        self._again_s = again_s
        self._recent = RecentDemand(seconds)
        self._refused_until_s = 0.0
        self._refused = Checked()

    def take(self, seen: Observation, seconds: float) -> None:
        """Take the observation of the last `seconds`."""
        self._recent.take(seen, seconds)

    async def check(
        self,
        now: Mapping[Role, int],
        target: Mapping[Role, int],
        expected: ExpectedDemand,
        factors: Mapping[Role, float],
    ) -> Checked:
        """Simulate the workers of a target that takes some away; where they miss the SLO, fewer are taken away, or none.

        A target is refused only if it makes more requests late than the present workers do in the same simulation, so a model
        that is too slow refuses nothing. Nothing is refused before the recent demand was seen for its whole time.
        """
        if sum(target.values()) >= sum(now.values()) or not self._recent.is_whole:
            return Checked()
        now_s = asyncio.get_running_loop().time()
        if now_s < self._refused_until_s:
            return Checked(kept=self._refused.kept, why=self._refused.why)
        capacities = [capacity.slower(factors.get(capacity.role, 1.0)) for capacity in self._capacities]
        checked = await asyncio.to_thread(self._check, dict(now), dict(target), expected, capacities)
        if checked.why:
            self._refused, self._refused_until_s = checked, now_s + self._again_s
        return checked

    def _check(
        self,
        now: dict[Role, int],
        target: dict[Role, int],
        expected: ExpectedDemand,
        capacities: Sequence[Capacity],
    ) -> Checked:
        requests = self._recent.replay(expected, random.Random(_SEED))
        trials: list[Rehearsed] = []
        present: Rehearsed | None = None
        first_missed = ""
        while sum(target.values()) < sum(now.values()):
            trial = rehearse(requests, target, capacities, self._slo)
            trials.append(trial)
            missed = trial.missed(self._slo)
            if missed and present is None:
                present = rehearse(requests, now, capacities, self._slo)
                trials.append(present)
            if not missed or (present is not None and trial.late <= present.late):
                break
            first_missed = first_missed or f"with {_counted(target)} {missed}"
            target = {role: count + -(-(now.get(role, 0) - count) // 2) for role, count in target.items()}
        if not first_missed:
            return Checked(trials=tuple(trials))
        seconds, number = trials[0].seconds, trials[0].requests
        return Checked(
            trials=tuple(trials),
            kept=target,
            why=f"{_counted(target)} stay: {first_missed}, in a simulation of {number} requests over {seconds:.0f} s",
        )


def _counted(workers: Mapping[Role, int]) -> str:
    return " and ".join(f"{count} {role}" for role, count in workers.items())
