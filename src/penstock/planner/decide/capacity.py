"""The largest request rate that a number of replicas of one role serves within the SLO."""

from dataclasses import dataclass

from penstock.core.types.instances import Role
from penstock.perf.roofline.roofline import Roofline
from penstock.perf.search.demand import Demand
from penstock.perf.search.pool import Pool, Share
from penstock.planner.decide.expected_demand import ExpectedDemand
from penstock.planner.decide.slo import Slo

_IDLE_PER_S = (1.0, 0.1, 0.01, 0.001)
"""Rates to look at an almost idle worker by: predictions have no finer resolution than a share of its largest rate."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Capacity:
    """The latency model of one role's workers.

    model:            latency model of one worker
    max_batch_tokens: most tokens of a step on each data-parallel rank
    block_size:       tokens in a KV block
    """

    role: Role
    model: Roofline
    max_batch_tokens: int
    block_size: int = 16

    @property
    def gpus(self) -> int:
        """GPUs of one worker."""
        return self.model.parallel.devices

    def rate_per_s(self, workers: int, expected: ExpectedDemand, slo: Slo) -> float:
        """Give the largest rate within the SLO; 0 if no rate is."""
        found = self._pool(workers).largest(self._share(expected), self._demand(expected, slo))
        return found[0] if found else 0.0

    def workers(self, rate_per_s: float, expected: ExpectedDemand, slo: Slo, most: int) -> int | None:
        """Give the fewest workers that serve a rate within the SLO; None if `most` do not."""
        return next((n for n in range(1, most + 1) if self.rate_per_s(n, expected, slo) >= rate_per_s), None)

    def unreachable(self, expected: ExpectedDemand, slo: Slo) -> str:
        """Say which target one worker misses at any rate and by how much; empty if it meets both at some rate."""
        if self.rate_per_s(1, expected, slo) > 0:
            return ""
        pool, share = self._pool(1), self._share(expected)
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

    def _pool(self, workers: int) -> Pool:
        return Pool(self.model, workers, self.max_batch_tokens)

    def _share(self, expected: ExpectedDemand) -> Share:
        total = max(expected.input_tokens, 1)
        new = max(1, round(total * (1 - expected.cached_share)))
        if self.role is Role.DECODE:  # the KV of the prompt's full blocks comes from prefill workers
            new = (total - 1) % self.block_size + 1
        answer = 0 if self.role is Role.PREFILL else max(expected.output_tokens - 1, 1)
        return Share(new_tokens=new, cached_tokens=total - new, answer_tokens=answer)

    def _demand(self, expected: ExpectedDemand, slo: Slo) -> Demand:
        return Demand(
            input_tokens=max(expected.input_tokens, 1),
            output_tokens=max(expected.output_tokens, 1),
            ttft_s=slo.ttft_s,
            itl_s=slo.itl_s,
            percentile=slo.percentile,
        )
