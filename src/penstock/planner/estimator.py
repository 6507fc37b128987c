"""Turns observations into the demand to provide for, and measures how far the latency models are off."""

import math
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol

import msgspec

from penstock.core.types.instances import Role
from penstock.perf.latency import Correction
from penstock.perf.pool import PoolModel, Prediction
from penstock.planner.demand import ExpectedDemand, SloTargets, missed, surely_above
from penstock.planner.forecast import Forecast, Series
from penstock.planner.observation import Observation, ObservedWorker
from penstock.runtime.observations import Digest

_LATENCIES_WEIGHT = 0.05
"""Of one interval: 99th percentiles of some hundred requests differ by a fifth from interval to interval."""
_FEW = 50
"""Fewer values say nothing of a percentile."""
_IDLE_SHARE = 0.4
"""Latencies predicted below this share of their target are those of almost idle workers: that ratio is another one."""
_LOWEST, _HIGHEST = 0.8, 2.0
_FACTOR_STEP = 1.05
"""The factor changes in steps of 5 %, so that equal loads give equal decisions."""


class LatencyFactor:
    """Measured over predicted latency. One task owns it.

    Predictions take requests and workers as equal. Short streams see more of a moment's crowd, and of a prompt beside them, than
    the mean one.
    """

    def __init__(self, guess: float = 1.0) -> None:
        """Begin with a guess, above 0."""
        self.value = guess
        """Measured over predicted, within 5 %."""
        self._log = math.log(guess)

    def learn(self, measured_s: float | None, count: int, predicted_s: float | None, target_s: float) -> None:
        """Compare one interval with its prediction.

        Args:
            measured_s: the latency at the SLO's percentile; None of no request.
            count: requests that it is of.
            predicted_s: uncorrected prediction at their rate; None beyond what the workers can serve.
            target_s: the latency's target.
        """
        if measured_s is None or predicted_s is None or count < _FEW:
            return
        if measured_s <= 0 or predicted_s < _IDLE_SHARE * target_s:
            return
        ratio = min(max(measured_s / predicted_s, _LOWEST), _HIGHEST)
        self._log += _LATENCIES_WEIGHT * (math.log(ratio) - self._log)
        if not 1 / _FACTOR_STEP < math.exp(self._log) / self.value < _FACTOR_STEP:
            self.value = math.exp(self._log)


_STEPS_MIN = 16
_STEPS_WEIGHT = 0.03
"""Of one worker's steps in one round: their batch is known at its end only, so single ones are some percent off."""
"""The factor changes in steps of 5 %, so that equal loads give equal decisions."""


class StepFactor:
    """One role's factor. One task owns it."""

    def __init__(self, model: PoolModel) -> None:
        """Trust the model so far.

        Args:
            model: latency model of one worker, uncorrected.
        """
        self.value = 1.0
        """Measured over predicted step time, within 5 %."""
        self._model = model
        self._correction = Correction(weight=_STEPS_WEIGHT)

    @property
    def is_trusted(self) -> bool:
        """Whether steps are within a factor of two of the corrected model."""
        return self._correction.trusted

    def learn(self, workers: Iterable[ObservedWorker], seconds: float, prompt_tokens: int = 1) -> None:
        """Compare the steps of warm workers over the last `seconds` with the model.

        Args:
            workers: of one role.
            seconds: observed time.
            prompt_tokens: mean new tokens of a prompt. Few steps have whole prompts and most have none, which takes longer than
                as many steps with a few tokens each.
        """
        for worker in workers:
            mean_s = worker.step_s.mean
            if mean_s is None or worker.step_s.count < _STEPS_MIN:
                continue
            new = round(worker.prefilled_tokens_per_s * seconds / worker.step_s.count)
            batch, context = worker.running_requests, worker.context_tokens
            if not (new or batch):
                continue
            chunk = max(new, prompt_tokens) if batch else new
            mixed = new / chunk if chunk else 0.0
            predicted_s = mixed * self._model.mixed_step_s([(chunk, 0)], batch, context) if mixed else 0.0
            if mixed < 1:
                predicted_s += (1 - mixed) * self._model.decode_step_s(batch, context)
            self._correction.observe(predicted_s, mean_s)
        moved = self._correction.factor / self.value
        if not 1 / _FACTOR_STEP < moved < _FACTOR_STEP:
            self.value = self._correction.factor


_LENGTH_INTERVALS, _LENGTH_INTERVALS_MAX = 30, 360
"""Intervals whose lengths make up the distributions, and the most where these had too few requests."""
_COST_INTERVALS = 3
"""Intervals whose lengths tell what a request costs: those of one alone are as often long as short by chance."""
_ITL_GUESS = 1.15
"""Streams' ITL over the predicted one, before it was measured: a stream is not as long as the mean, nor a crowd as large."""
_INPUT_GUESS, _OUTPUT_GUESS = 512, 256
"""Lengths that stand in for requests that were not seen yet: the first ones that end are the shortest ones."""
_RESERVE_MAX = 1.5
"""Of a jump: the band of a forecast near 0 says little."""
_STALE_SHARE = 0.5
"""Requests that wait in workers for longer than this share of the TTFT target are queued: shorter waits are between steps."""


Lengths = tuple[Digest, Digest]
"""Prompt tokens of requests, and output tokens of those that ended."""


class Predicts(Protocol):
    """The part of `Capacity` that estimates depend on."""

    @property
    def role(self) -> Role: ...

    @property
    def model(self) -> PoolModel: ...

    def rate_per_s(self, workers: int, expected: ExpectedDemand, slo: SloTargets) -> float: ...

    def predict(
        self, workers: int, rate_per_s: float, expected: ExpectedDemand, slo: SloTargets
    ) -> Prediction | None: ...


class Estimator:
    """Forecasts arrivals, the cached share and the work of each role, and follows lengths, step times and latencies.

    Lengths are those that were seen. Their growth is in the work. One task owns it.
    """

    def __init__(
        self,
        capacities: Sequence[Predicts],
        slo: SloTargets,
        *,
        interval_s: float,
        horizon_s: float,
        season_s: float | None = None,
    ) -> None:
        """Begin without observations.

        Args:
            capacities: uncorrected latency model of each role's workers.
            slo: targets of present latencies.
            interval_s: seconds of each observation that `take` gets.
            horizon_s: how far ahead demand is forecast.
            season_s: seconds after which demand repeats itself; None for no season.
        """

        def series(name: str, season_s: float | None = None) -> Series:
            return Series(name, interval_s=interval_s, horizon_s=horizon_s, season_s=season_s)

        self.factors = {capacity.role: StepFactor(capacity.model) for capacity in capacities}
        self._capacities = tuple(capacities)
        self._slo = slo
        self._rate = series("requests_per_s", season_s)
        self._cached = series("cached_share")
        self._load = {role: series(f"{role}_load", season_s) for role in self.factors}
        self._ttft_factor, self._itl_factor = LatencyFactor(), LatencyFactor(_ITL_GUESS)
        self._lengths: deque[Lengths] = deque(maxlen=_LENGTH_INTERVALS_MAX)
        self._unseen = [slo.samples_min, slo.samples_min]
        """Prompts and answers that are still to be seen before a percentile of them can be told."""

    @property
    def forecasts(self) -> dict[str, Forecast]:
        """The forecast of each series that has had a value."""
        every = (self._rate, self._cached, *self._load.values())
        return {series.name: found for series in every if (found := series.forecast()) is not None}

    def look_ahead(self, horizon_s: float) -> None:
        """Forecast `horizon_s` ahead from now on."""
        for series in (self._rate, self._cached, *self._load.values()):
            series.look_ahead(horizon_s)

    def take(self, seen: Observation, intervals: int = 1, *, warm: Mapping[Role, int] | None = None) -> None:
        """Take the observation of the last interval, or of several whose mean stands for each.

        `warm` counts the workers of each role that served it, where all of them did throughout; else latencies teach nothing.
        """
        demand = seen.demand
        for _ in range(intervals):
            self._rate.take(demand.arrivals_per_s)
        if demand.input_tokens.mean is not None:
            self._cached.take(demand.cached_share)
        lengths = demand.input_tokens, demand.output_tokens
        self._lengths.append(lengths)
        self._unseen = [max(0, left - each.count) for left, each in zip(self._unseen, lengths, strict=True)]
        now = self._described(self._lengths, _COST_INTERVALS, demand.cached_share)
        for capacity in self._capacities:
            each_per_s = capacity.rate_per_s(1, now, self._slo)
            if each_per_s > 0:
                for _ in range(intervals):
                    self._load[capacity.role].take(demand.arrivals_per_s / each_per_s)
        if warm is not None and intervals == 1:
            self._learn_latencies(seen, now, warm)

    def _described(self, seen: Sequence[Lengths], intervals: int, cached_share: float) -> ExpectedDemand:
        """Describe the requests of the last intervals, of more where these have too few to tell the SLO's percentile."""
        enough = self._slo.samples_min
        counts, chosen = [0, 0], list[Lengths]()
        for lengths in reversed(seen):
            if len(chosen) >= intervals and min(counts) >= enough:
                break
            chosen.append(lengths)
            counts = [count + each.count for count, each in zip(counts, lengths, strict=True)]
        inputs = Digest.merged(each for each, _ in chosen)
        outputs = Digest.merged(each for _, each in chosen)
        unseen = [max(0, min(left, enough - count)) for left, count in zip(self._unseen, counts, strict=True)]
        return ExpectedDemand(
            rate_per_s=0.0,
            input_tokens=_mean(inputs, _INPUT_GUESS, unseen[0]),
            output_tokens=_mean(outputs, _OUTPUT_GUESS, unseen[1]),
            cached_share=cached_share,
            input_lengths=inputs,
            output_lengths=outputs,
        )

    def _learn_latencies(self, seen: Observation, now: ExpectedDemand, warm: Mapping[Role, int]) -> None:
        """Compare the latencies of an interval with those of its rate and workers."""
        demand, slo = seen.demand, self._slo
        share = slo.percentile / 100
        used = [capacity for capacity in self._capacities if warm.get(capacity.role)]
        if len({capacity.role for capacity in used} - {Role.AGGREGATED}) == 1 or len(used) > 2:
            return
        ttft_s: list[float | None] = []
        itl_s: list[float | None] = []
        for capacity in used:
            factor = self.factors[capacity.role].value
            found = capacity.predict(warm[capacity.role], factor * demand.arrivals_per_s, now, slo)
            if capacity.role is not Role.DECODE:
                ttft_s.append(None if found is None else factor * found.ttft_s)
            if capacity.role is not Role.PREFILL:
                itl_s.append(None if found is None else factor * found.itl_s)
        for learned, digest, predicted_s, target_s in (
            (self._ttft_factor, demand.ttft_s.minus(demand.decode_ttft_s), ttft_s, slo.ttft_s),
            (self._itl_factor, demand.itl_s, itl_s, slo.itl_s),
        ):
            if len(predicted_s) == 1:
                learned.learn(digest.quantile(share), digest.count, predicted_s[0], target_s)

    def learn_steps(self, workers: Iterable[ObservedWorker], seconds: float) -> None:
        """Compare the steps of warm workers over the last `seconds` with their models."""
        every = list(workers)
        tokens = self._new_tokens()
        for role, factor in self.factors.items():
            factor.learn((worker for worker in every if worker.role is role), seconds, tokens)

    def expect(self, recent: Observation, *, warm: Mapping[Role, int]) -> ExpectedDemand:
        """Give the demand to provide for: the forecast, and what is queued or too slow now.

        Args:
            recent: the last seconds.
            warm: workers of each role that present latencies are of; none are looked at where none is warm.
        """
        demand, slo = recent.demand, self._slo
        rate = self._rate.forecast()
        ttft_s, decode_ttft_s, itl_s = missed(demand, slo) if any(warm.values()) else (None, None, None)
        lengths = self._lengths or [(demand.input_tokens, demand.output_tokens)]
        expected = msgspec.structs.replace(
            self._described(lengths, _LENGTH_INTERVALS, self._cached_share(demand.cached_share)),
            rate_per_s=rate.high if rate else 0.0,
            queued=demand.queued + sum(_stale(worker, slo.ttft_s) for worker in recent.workers),
            ttft_s=ttft_s,
            decode_ttft_s=decode_ttft_s,
            itl_s=itl_s,
            ttft_factor=self._ttft_factor.value,
            itl_factor=self._itl_factor.value,
            warm=dict(warm),
            method=rate.method if rate else "",
        )
        return msgspec.structs.replace(expected, rates=self._rates(expected))

    def surges(self, recent: Observation, expected: ExpectedDemand) -> dict[Role, float]:
        """Give the work to expect by role where that of the last seconds is above the expected work beyond chance.

        The last seconds are then the mean to expect, with the band of the forecast that they left.

        Returns:
            Requests of the expected lengths per second.
        """
        demand = recent.demand
        inputs, outputs = demand.input_tokens, demand.output_tokens
        now = _plain(expected)
        if inputs.count:
            now = msgspec.structs.replace(now, input_tokens=_mean(inputs, 1))
        if outputs.count >= self._slo.samples_min:  # the first ones that end are the shortest ones
            now = msgspec.structs.replace(now, output_tokens=_mean(outputs, 1))
        found = {}
        for capacity in self._capacities:
            each_per_s, expected_per_s = (
                capacity.rate_per_s(1, one, self._slo) for one in (now, _plain(expected))
            )
            if not (each_per_s > 0 and expected_per_s > 0):
                continue
            rate_per_s = demand.arrivals_per_s * expected_per_s / each_per_s
            if surely_above(rate_per_s, recent.seconds, expected.rate_of(capacity.role), expected.spread):
                load = self._load[capacity.role].forecast()
                reserve = load.high / load.mean if load is not None and load.mean > 0 else 1.0
                found[capacity.role] = min(reserve, _RESERVE_MAX) * rate_per_s
        return found

    def _rates(self, expected: ExpectedDemand) -> dict[Role, float]:
        """Give the expected work of each role in requests of the expected lengths."""
        rates = {}
        for capacity in self._capacities:
            load = self._load[capacity.role].forecast()
            each_per_s = capacity.rate_per_s(1, _plain(expected), self._slo)
            if load is not None and each_per_s > 0:
                rates[capacity.role] = load.high * each_per_s
        return rates

    def _new_tokens(self) -> int:
        """Give the mean prompt tokens that are computed."""
        mean = self._lengths[-1][0].mean if self._lengths else None
        cached = self._cached.forecast()
        return 1 if mean is None else max(1, round(mean * (1 - (min(1.0, cached.mean) if cached else 0.0))))

    def _cached_share(self, present: float) -> float:
        found = self._cached.forecast()
        return present if found is None else min(1.0, found.mean)


def _mean(lengths: Digest, guess: int, unseen: int = 0) -> int:
    """Give the mean length with the guess for those that were not seen yet."""
    count = lengths.count + unseen
    return max(1, round((lengths.total + unseen * guess) / count)) if count else guess


def _plain(expected: ExpectedDemand) -> ExpectedDemand:
    """Give the same for uncorrected latencies, in which work is forecast."""
    return msgspec.structs.replace(expected, ttft_factor=1.0, itl_factor=1.0)


def _stale(worker: ObservedWorker, ttft_s: float) -> int:
    return worker.waiting_requests if worker.oldest_wait_s > _STALE_SHARE * ttft_s else 0
