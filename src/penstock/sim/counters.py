"""Sums of the workers' counters at the end of a simulation, by role."""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, fields
from itertools import zip_longest
from typing import Self

from penstock.sim.world.cluster import SimCluster, SimWorker


@dataclass(slots=True)
class Counters:
    """Sums over workers.

    prefix_hit_tokens: cached tokens of admitted prompts, including those transferred from another worker
    received_bytes:    KV received from other workers
    failures:          prompts recomputed after a failed KV transfer, by error code
    expired, refused:  prefill results not fetched in time, or not exported for lack of blocks
    onboarded_tokens:  cached prompt tokens by lower tier, host first; empty without lower tiers
    """

    prefilled_tokens: int = 0
    prefix_hit_tokens: int = 0
    generated_tokens: int = 0
    preemptions: int = 0
    received_bytes: int = 0
    failures: Counter[str] = field(default_factory=Counter)
    expired: int = 0
    refused: int = 0
    onboarded_tokens: list[int] = field(default_factory=list)

    @classmethod
    def of(cls, workers: Iterable[SimWorker], cluster: SimCluster) -> Self:
        """Add up the counters of `workers`."""
        counters = cls()
        for worker in workers:
            load, kv_transfer = worker.engine.load(), worker.worker.kv_transfer
            counters.prefilled_tokens += load.prefilled_tokens
            counters.prefix_hit_tokens += load.prefix_hit_tokens
            counters.generated_tokens += load.generated_tokens
            counters.preemptions += load.preemptions
            counters.received_bytes += cluster.sim_transports.received_bytes[worker.host]
            if kv_transfer is not None:
                counters.failures.update(kv_transfer.incoming.failures)
                counters.expired += kv_transfer.exports.expired
                counters.refused += kv_transfer.exports.refused
            counters._add_onboarded(load.onboarded_tokens)
        return counters

    def add(self, other: "Counters") -> None:
        """Add the sums over other workers."""
        for name in _SUMS:
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.failures.update(other.failures)
        self._add_onboarded(other.onboarded_tokens)

    def _add_onboarded(self, tokens: Sequence[int]) -> None:
        self.onboarded_tokens = [
            sum(tier) for tier in zip_longest(self.onboarded_tokens, tokens, fillvalue=0)
        ]


_SUMS = tuple(each.name for each in fields(Counters) if each.type in {int, "int"})
