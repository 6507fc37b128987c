"""The largest request rate that a number of workers of one role serves within the SLO."""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from penstock.core.types.instances import Role
from penstock.perf.model_shape import Parallel
from penstock.perf.pool import (
    Demand,
    PoolModel,
    PredictedPool,
    Prediction,
    Share,
    aggregated_share,
    decode_share,
    prefill_share,
)
from penstock.planner.demand import ExpectedDemand, SloTargets


class StepTimes(Protocol):
    """The part of a latency model that capacity depends on."""

    @property
    def kv_capacity_tokens(self) -> int: ...

    def kv_held_tokens(self, tokens: float) -> float: ...

    def decode_step_s(self, batch: int, context_tokens: int) -> float: ...

    def mixed_step_s(self, chunks: Sequence[tuple[int, int]], batch: int, context_tokens: int) -> float: ...


@dataclass(frozen=True, slots=True)
class WorkerModel:
    """A `PoolModel` of a profile, of linear prices or of a roofline. Immutable.

    steps:           step times of one worker
    parallel:        how its devices divide a step
    factor:          step times are so many times as long
    kv_tokens:       tokens of KV that the worker holds; None is the model's
    verified_tokens: tokens computed per decode step and sequence
    """

    steps: StepTimes
    parallel: Parallel = field(default_factory=Parallel)
    factor: float = 1.0
    kv_tokens: int | None = None
    verified_tokens: int = 1

    @property
    def kv_capacity_tokens(self) -> int:
        return self.steps.kv_capacity_tokens if self.kv_tokens is None else self.kv_tokens

    def kv_held_tokens(self, tokens: float) -> float:
        return self.steps.kv_held_tokens(tokens)

    def decode_step_s(self, batch: int, context_tokens: int) -> float:
        return self.factor * self.steps.decode_step_s(batch, context_tokens)

    def mixed_step_s(self, chunks: Sequence[tuple[int, int]], batch: int, context_tokens: int) -> float:
        return self.factor * self.steps.mixed_step_s(chunks, batch, context_tokens)


_KNOWN_MAX = 512
_IDLE_PER_S = (1.0, 0.1, 0.01, 0.001)
"""Rates to look at an almost idle worker by: predictions have no finer resolution than a share of its largest rate."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Capacity:
    """The latency model of one role's workers.

    model:            latency model of one worker; a decode step yields one token per sequence
    max_batch_tokens: most tokens of a step on each data-parallel rank
    block_size:       tokens in a KV block
    requests_max:     most requests in a worker's batch; None is as many as its KV holds
    price:            what one worker costs in the unit of the budget; None is its GPUs
    """

    role: Role
    model: PoolModel
    max_batch_tokens: int
    block_size: int = 16
    requests_max: int | None = None
    price: float | None = None
    _known: dict[tuple[int, Demand], float] = field(default_factory=dict, repr=False, compare=False)
    """Rates that were worked out: each takes a millisecond, and a decision asks for some of them several times."""

    @property
    def gpus(self) -> int:
        """GPUs of one worker, or the cores that it computes on."""
        return self.model.parallel.devices

    @property
    def cost(self) -> float:
        """What one worker costs in the unit of the budget."""
        return self.gpus if self.price is None else self.price

    def slower(self, factor: float) -> "Capacity":
        """Give the same workers with step times `factor` times as long."""
        if factor == 1:
            return self
        model = WorkerModel(
            self.model, self.model.parallel, factor, verified_tokens=self.model.verified_tokens
        )
        return replace(self, model=model, _known={})

    def rate_per_s(self, workers: int, expected: ExpectedDemand, slo: SloTargets) -> float:
        """Give the largest rate within the SLO; 0 if no rate is."""
        demand = self._demand(expected, slo)
        known = self._known.get((workers, demand))
        if known is None:
            found = self._pool(workers).largest(self._share(demand), demand)
            known = found[0] if found else 0.0
            if len(self._known) >= _KNOWN_MAX:
                self._known.clear()
            self._known[workers, demand] = known
        return known

    def predict(
        self, workers: int, rate_per_s: float, expected: ExpectedDemand, slo: SloTargets
    ) -> Prediction | None:
        """Predict the latencies at the SLO's percentile; None if the workers cannot serve the rate."""
        share = self._share(self._demand(expected, slo))
        return self._pool(workers).predict(share, rate_per_s, slo.percentile)

    def workers(self, rate_per_s: float, expected: ExpectedDemand, slo: SloTargets, most: int) -> int | None:
        """Give the fewest workers that serve a rate within the SLO; None if `most` do not."""
        # A worker more never serves less, so the fewest are found by bisection.
        counts = range(1, most + 1)
        found = bisect_left(counts, rate_per_s, key=lambda n: self.rate_per_s(n, expected, slo))
        return None if found == len(counts) else counts[found]

    def unreachable(self, expected: ExpectedDemand, slo: SloTargets) -> str:
        """Say which target one worker misses at any rate and by how much; empty if it meets both at some rate."""
        if self.rate_per_s(1, expected, slo) > 0:
            return ""
        pool, share = self._pool(1), self._share(self._demand(expected, slo))
        found = (pool.predict(share, rate_per_s, slo.percentile) for rate_per_s in _IDLE_PER_S)
        seen = min(
            (each for each in found if each is not None),
            key=lambda each: each.ttft_s + each.itl_s,
            default=None,
        )
        if seen is None:
            tokens = expected.input_tokens + expected.output_tokens
            return f"{self.role}: no rate is predicted for requests of {tokens} tokens; a worker's KV holds {self.model.kv_capacity_tokens}"
        for name, value, bound in (("TTFT", seen.ttft_s, slo.ttft_s), ("ITL", seen.itl_s, slo.itl_s)):
            if value > bound:
                return (
                    f"{self.role}: an idle worker's {name} is {value * 1e3:.1f} ms, {(value - bound) * 1e3:.1f} ms above the"
                    f" target of {bound * 1e3:.1f} ms"
                )
        return f"{self.role}: no rate meets both targets"

    def _pool(self, workers: int) -> PredictedPool:
        return PredictedPool(self.model, workers, self.max_batch_tokens, self.requests_max)

    def _share(self, demand: Demand) -> Share:
        if self.role is Role.PREFILL:
            return prefill_share(demand)
        if self.role is Role.DECODE:
            return decode_share(demand, self.block_size)
        return aggregated_share(demand)

    @staticmethod
    def _demand(expected: ExpectedDemand, slo: SloTargets) -> Demand:
        tokens = max(expected.input_tokens, 1)
        return Demand(
            input_tokens=tokens,
            output_tokens=max(expected.output_tokens, 2),
            ttft_s=slo.ttft_s / expected.ttft_factor,
            itl_s=slo.itl_s / expected.itl_factor,
            percentile=slo.percentile,
            cached_tokens=round(tokens * expected.cached_share),
            input_spread=expected.input_lengths.spread,
            output_spread=expected.output_lengths.spread,
        )
