"""Turns observations into the demand to provide for."""

from collections import deque
from collections.abc import Iterable, Mapping

from penstock.core.types.instances import Role
from penstock.perf.search.pool import PoolModel
from penstock.planner.estimate.expected_demand import ExpectedDemand
from penstock.planner.estimate.series import Series
from penstock.planner.estimate.significance import missed_quantile
from penstock.planner.estimate.slo import Slo
from penstock.planner.estimate.step_factor import StepFactor
from penstock.planner.forecast.forecast import Forecast
from penstock.planner.observe.observation import Observation, WorkerView
from penstock.runtime.observations.windows import Digest

_LENGTH_INTERVALS = 30
"""Intervals whose lengths make up the distributions."""
_INPUT_GUESS, _OUTPUT_GUESS = 512, 256
"""Lengths before the first request, or before the first one that ended."""
_STALE_SHARE = 0.5
"""Requests that wait in workers for longer than this share of the TTFT target are queued: shorter waits are between steps."""


class Estimator:
    """Forecasts arrivals, lengths and the cached share, and follows step times. One task owns it."""

    def __init__(
        self,
        models: dict[Role, PoolModel],
        *,
        interval_s: float,
        horizon_s: float,
        season_s: float | None = None,
    ) -> None:
        """Begin without observations.

        Args:
            models: uncorrected latency model of one worker of each role.
            interval_s: seconds of each observation that `take` gets.
            horizon_s: how far ahead demand is forecast.
            season_s: seconds after which demand repeats itself; None for no season.
        """

        def series(name: str, season_s: float | None = None) -> Series:
            return Series(name, interval_s=interval_s, horizon_s=horizon_s, season_s=season_s)

        self.factors = {role: StepFactor(model) for role, model in models.items()}
        self._rate = series("requests_per_s", season_s)
        self._input, self._output = series("input_tokens"), series("output_tokens")
        self._cached = series("cached_share")
        self._lengths: deque[tuple[Digest, Digest]] = deque(maxlen=_LENGTH_INTERVALS)

    @property
    def forecasts(self) -> dict[str, Forecast]:
        """The forecast of each series that has had a value."""
        every = (self._rate, self._input, self._output, self._cached)
        return {series.name: found for series in every if (found := series.forecast()) is not None}

    def look_ahead(self, horizon_s: float) -> None:
        """Forecast `horizon_s` ahead from now on."""
        for series in (self._rate, self._input, self._output, self._cached):
            series.look_ahead(horizon_s)

    def take(self, seen: Observation, intervals: int = 1) -> None:
        """Take the observation of the last interval, or of several whose mean stands for each."""
        demand = seen.demand
        for _ in range(intervals):
            self._rate.take(demand.arrivals_per_s)
        if demand.input_tokens.mean is not None:
            self._input.take(demand.input_tokens.mean)
            self._cached.take(demand.cached_share)
        if demand.output_tokens.mean is not None:
            self._output.take(demand.output_tokens.mean)
        self._lengths.append((demand.input_tokens, demand.output_tokens))

    def learn_steps(self, workers: Iterable[WorkerView], seconds: float) -> None:
        """Compare the steps of warm workers over the last `seconds` with their models."""
        every = list(workers)
        tokens = self._new_tokens()
        for role, factor in self.factors.items():
            factor.learn((worker for worker in every if worker.role is role), seconds, tokens)

    def expect(self, recent: Observation, slo: Slo, *, warm: Mapping[Role, int]) -> ExpectedDemand:
        """Give the demand to provide for: the forecast, and what is queued or too slow now.

        Args:
            recent: the last seconds.
            slo: targets of present latencies.
            warm: workers of each role that present latencies are of; none are looked at where none is warm.
        """
        demand = recent.demand
        rate = self._rate.forecast()
        inputs = Digest.merged(each for each, _ in self._lengths)
        outputs = Digest.merged(each for _, each in self._lengths)
        if not inputs.count:
            inputs = demand.input_tokens
        if not outputs.count:
            outputs = demand.output_tokens
        late = {
            name: missed_quantile(digest, target_s, slo.percentile) if any(warm.values()) else None
            for name, digest, target_s in (
                ("ttft", demand.ttft_s, slo.ttft_s),
                ("itl", demand.itl_s, slo.itl_s),
            )
        }
        return ExpectedDemand(
            rate_per_s=rate.high if rate else 0.0,
            input_tokens=_mean(self._input, inputs, _INPUT_GUESS),
            output_tokens=_mean(self._output, outputs, _OUTPUT_GUESS),
            cached_share=self._cached_share(demand.cached_share),
            queued=demand.queued + sum(_stale(worker, slo.ttft_s) for worker in recent.workers),
            ttft_s=late["ttft"],
            itl_s=late["itl"],
            warm=dict(warm),
            method=rate.method if rate else "",
            input_lengths=inputs,
            output_lengths=outputs,
        )

    def _new_tokens(self) -> int:
        """Give the mean prompt tokens that are computed."""
        mean = self._lengths[-1][0].mean if self._lengths else None
        cached = self._cached.forecast()
        return 1 if mean is None else max(1, round(mean * (1 - (min(1.0, cached.mean) if cached else 0.0))))

    def _cached_share(self, present: float) -> float:
        found = self._cached.forecast()
        return present if found is None else min(1.0, found.mean)


def _mean(series: Series, lengths: Digest, guess: int) -> int:
    """Give the mean length to expect: the forecast, or what was seen where methods cannot be judged yet."""
    found = series.forecast()
    if found is not None and not found.is_cold:
        return max(1, round(found.mean))
    return guess if lengths.mean is None else max(1, round(lengths.mean))


def _stale(worker: WorkerView, ttft_s: float) -> int:
    return worker.waiting_requests if worker.oldest_wait_s > _STALE_SHARE * ttft_s else 0
