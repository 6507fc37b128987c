"""The planner: observes a deployment, expects, decides, damps and acts, round after round."""

import asyncio
import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from time import perf_counter

import msgspec

from penstock.core.errors import PenstockError
from penstock.core.log import get_logger
from penstock.core.types.instances import Role
from penstock.planner.actor import Actor, ActorConfig, Look
from penstock.planner.capacity import Capacity
from penstock.planner.config import PlannerConfig, kinds_of
from penstock.planner.damping import Damped, warm
from penstock.planner.decider import ScalingDecision
from penstock.planner.demand import ExpectedDemand, SloTargets
from penstock.planner.estimator import Estimator
from penstock.planner.observation import Observation, ObservedWorker
from penstock.planner.policy import Policy
from penstock.planner.record import DecisionRecord, Expected, SeenDeployment, SeenRole
from penstock.runtime.observations import Digest
from penstock.seams import ScalingConnector

Observe = Callable[[float], Awaitable[Observation]]
"""Gives what was seen in the last so many seconds."""

BY = "planner"
"""The planner's name in a deployment's log."""
_INTERVAL_S_MAX, _INTERVAL_S_MIN = 10.0, 1.0
"""Demand is forecast in intervals of two reactions, within these bounds: shorter ones have more noise than news."""
_GAP_MAX = 60
"""After a longer pause, as of a machine that slept, so many intervals are taken as the last one."""
_START_GUESS_S = 60.0
"""Seconds of a worker's start before one was measured."""
_RECENT_S = 10.0
"""Queues and latencies of the last two reactions count, and of so many seconds at least."""
_BACK_OFF_S_MAX = 60.0
_EPSILON_S = 1e-6
_SAME_HORIZON = 0.6
"""Horizons are equal within this ratio."""
_log = get_logger()


class Planner:
    """Changes the workers of a deployment so that it holds its SLO with few of them. One task owns it.

    Event-loop time is its only clock.
    """

    def __init__(
        self,
        connector: ScalingConnector,
        observe: Observe,
        *,
        config: PlannerConfig,
        slo: SloTargets,
        capacities: Sequence[Capacity],
        policy: Policy | None = None,
        by: str = BY,
        on_record: Callable[[DecisionRecord], None] = lambda _record: None,
        on_round: Callable[[float, str], None] = lambda _seconds, _error: None,
    ) -> None:
        """Check the settings; looks at nothing yet.

        Args:
            connector: the deployment; the caller closes it.
            observe: gives what was seen of it in the last so many seconds.
            config: bounds, periods and times.
            slo: latency targets.
            capacities: the latency model of each role's workers, with prices in the unit of `config.budget`: one aggregated
                role, prefill and decode, or all three.
            policy: decides and damps; left out, the one that these settings make.
            by: the planner's name for the connector.
            on_record: called with the record of each round.
            on_round: called with the seconds of each round of `run` and why it failed, empty if it did not.

        Raises:
            ConfigError: the roles cannot be planned, a bound names none of them, or the budget pays no replica of each.
        """
        self._policy = policy or Policy(config, slo, capacities)
        self._observe = observe
        self._config = config
        self._slo = slo
        self._on_record = on_record
        self._on_round = on_round
        self._actor = Actor(
            connector,
            by=by,
            config=ActorConfig(
                hold_s=config.act.hold_s,
                start_deadline_s=config.act.start_deadline_s,
                start_wait_s_max=config.act.start_wait_s_max,
            ),
        )
        self._horizon_s = _START_GUESS_S + config.floor_period_s
        self._interval_s = min(_INTERVAL_S_MAX, max(_INTERVAL_S_MIN, 2 * config.react_period_s))
        self._estimator = Estimator(
            capacities,
            slo,
            interval_s=self._interval_s,
            horizon_s=self._horizon_s,
            season_s=config.season_s,
        )
        self._number = 0
        self._interval_since_s: float | None = None
        self._floor_s = -math.inf
        self._floor: ExpectedDemand | None = None
        self._warm: dict[Role, int] | None = None
        """Workers of each role in the last round, if all were warm."""
        self._short_s: float | None = None
        """Last time at which the SLO was out of reach; None once that has been said to be over."""

    async def run(self) -> None:
        """Decide every `react_period_s`, until it is cancelled. A round that fails is logged and tried again, later each time."""
        failures = 0
        while True:
            text, begun_s = "", perf_counter()  # the loop's clock stands still while a round computes
            try:
                await self.step()
                failures = 0
            except Exception as error:  # noqa: BLE001 - serving goes on without a planner
                failures += 1
                text = error.message if isinstance(error, PenstockError) else repr(error)
                _log.warning("planner_round_failed", error=text, failures=failures)
            self._on_round(perf_counter() - begun_s, text)
            wait_s = self._config.react_period_s * 2 ** min(failures, 16)
            await asyncio.sleep(min(wait_s, max(_BACK_OFF_S_MAX, self._config.react_period_s)))

    async def step(self) -> DecisionRecord:
        """Observe, expect, decide, damp and act once; returns what came of it.

        Raises:
            Unavailable: the deployment does not answer.
        """
        now_s = asyncio.get_running_loop().time()
        recent = await self._observe(max(2 * self._config.react_period_s, _RECENT_S))
        look = await self._actor.look(recent.silent)
        await self._take_intervals(now_s)
        views = warm(recent.workers, self._config.cold_s)
        self._estimator.learn_steps(views, recent.seconds)
        is_floor = self._begin_floor(now_s, look, recent)
        self._number += 1
        record = DecisionRecord(
            number=self._number,
            at_s=now_s,
            seen=self._seen(recent, views),
            horizon_s=self._horizon_s,
            is_floor=is_floor,
            now=dict(look.now),
            room={limit.role: limit.room for limit in look.scale.limits},
            rigid=self._actor.rigid,
            overdue=look.overdue,
            is_dry=self._config.act.dry_run,
        )
        if not recent.frontends:
            record = await self._act_blind(record, look)
        else:
            counts = {role: sum(view.role is role for view in views) for role in self._estimator.factors}
            self._warm = counts if len(views) == len(recent.workers) else None
            expected = self._expect(recent, is_floor=is_floor, counts=counts)
            decision = self._policy.decide(
                now_s,
                expected,
                now=record.now,
                room=record.room,
                factors={role: factor.value for role, factor in self._estimator.factors.items()},
            )
            record = await self._act(record, look, recent, decision)
        self._say(record)
        self._on_record(record)
        return record

    async def _act_blind(self, record: DecisionRecord, look: Look) -> DecisionRecord:
        """Change nothing, as nothing is known of the demand; only where no worker could serve, the fewest start: no frontend is ready before."""
        held = "no frontend has sent what it sees, so nothing is known of the demand"
        have = {role: look.now.get(role, 0) for role in self._estimator.factors}
        kinds = kinds_of(have.keys())
        if look.held or any(all(have[role] for role in kind) for kind in kinds):
            return msgspec.structs.replace(record, held=held)
        begun = max(kinds, key=lambda kind: sum(have[role] > 0 for role in kind))
        target = {role: max(have[role], self._config.bounds(role)[0]) for role in have if role in begun}
        outcome = await self._actor.carry_out(target, look=look, is_dry=self._config.act.dry_run)
        return msgspec.structs.replace(
            record,
            target=have | target,
            adds=dict(outcome.plan.adds),
            retires=outcome.plan.retires,
            refused=outcome.refused,
            held=f"{held}; no worker could answer it, so the fewest start",
            waits=outcome.waits,
        )

    async def _act(
        self, record: DecisionRecord, look: Look, recent: Observation, decision: ScalingDecision
    ) -> DecisionRecord:
        """Damp the decision and carry it out; gives the whole record."""
        if look.held:
            damped = Damped(dict(record.now))
        else:
            damped = self._policy.damp(
                record.at_s,
                decision,
                now=record.now,
                start_s=record.horizon_s,
                may_flip=lambda *roles: roles not in record.rigid,
            )
        load = {
            worker.name: float(worker.running_requests + worker.waiting_requests) for worker in recent.workers
        }
        outcome = await self._actor.carry_out(
            damped.target, load=load, look=look, is_dry=self._config.act.dry_run
        )
        plan = outcome.plan
        return msgspec.structs.replace(
            record,
            expected=self._expected(),
            decision=decision,
            target=damped.target,
            damped=damped.why,
            flips=plan.flips,
            adds=dict(plan.adds),
            retires=plan.retires,
            late=(*plan.late, *(name for name, _ in plan.late_flips)),
            refused=outcome.refused,
            held=outcome.held,
            waits=outcome.waits,
        )

    # -- observe and expect

    async def _take_intervals(self, now_s: float) -> None:
        """Give the estimator the intervals that have ended since the last round."""
        if self._interval_since_s is None:
            self._interval_since_s = now_s
        ended = int((now_s - self._interval_since_s + _EPSILON_S) / self._interval_s)
        if ended < 1:
            return
        seen = await self._observe(now_s - self._interval_since_s)
        self._interval_since_s += ended * self._interval_s
        if seen.frontends:
            self._estimator.take(seen, min(ended, _GAP_MAX), warm=self._warm)

    def _begin_floor(self, now_s: float, look: Look, recent: Observation) -> bool:
        """Tell whether demand is to be forecast anew: it is time, or more arrives than was expected."""
        is_due = now_s - self._floor_s >= self._config.floor_period_s - _EPSILON_S
        if not is_due and not self._is_surge(recent):
            return False
        starts_s = [limit.start_s for limit in look.scale.limits if limit.start_s is not None]
        horizon_s = max(starts_s, default=_START_GUESS_S) + self._config.floor_period_s
        if not _SAME_HORIZON < horizon_s / self._horizon_s < 1 / _SAME_HORIZON:
            self._horizon_s = horizon_s
            self._estimator.look_ahead(horizon_s)
        self._floor_s = now_s
        return True

    def _is_surge(self, recent: Observation) -> bool:
        return self._floor is None or bool(self._estimator.surges(recent, self._floor))

    def _expect(self, recent: Observation, *, is_floor: bool, counts: Mapping[Role, int]) -> ExpectedDemand:
        """Give the demand to provide for; between two floors, work and lengths stay as they were forecast."""
        expected = self._estimator.expect(recent, warm=counts)
        if is_floor or self._floor is None:
            # The forecast follows only once an interval has ended, and falls after one that was not seen whole.
            surges = self._estimator.surges(recent, expected)
            arrivals_per_s = recent.demand.arrivals_per_s if surges else 0.0
            self._floor = msgspec.structs.replace(
                expected,
                rate_per_s=max(expected.rate_per_s, arrivals_per_s),
                rates=expected.rates | surges,
                start_s=self._horizon_s,
            )
            return self._floor
        return msgspec.structs.replace(
            self._floor,
            queued=expected.queued,
            ttft_s=expected.ttft_s,
            decode_ttft_s=expected.decode_ttft_s,
            itl_s=expected.itl_s,
            warm=expected.warm,
        )

    # -- explain

    def _seen(self, recent: Observation, views: Sequence[ObservedWorker]) -> SeenDeployment:
        demand, share = recent.demand, self._slo.percentile / 100
        return SeenDeployment(
            seconds=recent.seconds,
            arrivals_per_s=demand.arrivals_per_s,
            finished_per_s=demand.finished_per_s,
            failed_per_s=demand.failed_per_s,
            ttft_s=demand.ttft_s.quantile(share),
            itl_s=demand.itl_s.quantile(share),
            queued=demand.queued,
            oldest_queued_s=demand.oldest_queued_s,
            frontends=len(recent.frontends),
            silent=recent.silent,
            decode_ttft_s=demand.decode_ttft_s.quantile(share),
            roles=tuple(
                _role_seen(role, recent.of(role), views, factor.value)
                for role, factor in self._estimator.factors.items()
            ),
        )

    def _expected(self) -> tuple[Expected, ...]:
        return tuple(
            Expected(
                series=name,
                mean=found.mean,
                low=found.low,
                high=found.high,
                method=found.method,
                is_cold=found.is_cold,
                mean_error=found.mean_error,
            )
            for name, found in self._estimator.forecasts.items()
        )

    def _say(self, record: DecisionRecord) -> None:
        """Log changes, and that the SLO is out of reach until it was in reach for `cool_down_s`: demand comes and goes."""
        if record.is_change:
            _log.info("planner_decided", round=record.number, what=record.explain())
        if record.decision is None:
            return
        if shortfall := record.decision.shortfall:
            if self._short_s is None:
                _log.warning("slo_out_of_reach", why=shortfall)
            self._short_s = record.at_s
        elif self._short_s is not None and record.at_s - self._short_s >= self._config.cool_down_s:
            _log.warning(
                "slo_in_reach", why=f"for {self._config.cool_down_s:g} s the decided workers hold it"
            )
            self._short_s = None


def _role_seen(
    role: Role, workers: Sequence[ObservedWorker], warm_ones: Sequence[ObservedWorker], factor: float
) -> SeenRole:
    steps = Digest.merged(worker.step_s for worker in workers)
    uses = [worker.gpu for worker in workers if worker.gpu is not None]
    return SeenRole(
        role=role,
        workers=len(workers),
        cold=sum(worker not in warm_ones for worker in workers),
        running=sum(worker.running_requests for worker in workers),
        waiting=sum(worker.waiting_requests for worker in workers),
        queued_prefill_tokens=sum(worker.queued_prefill_tokens for worker in workers),
        kv_usage=sum(worker.kv_usage for worker in workers) / max(1, len(workers)),
        step_s=steps.mean,
        factor=factor,
        gpu_watts=sum(use.watts for use in uses) if uses else None,
        gpu_utilization=sum(use.utilization for use in uses) / len(uses) if uses else None,
    )
