"""Sums of the workers' counters at the end of a simulation, by role."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Self

from penstock.sim.world.cluster import SimCluster, SimWorker


@dataclass(slots=True)
class Counters:
    """Sums over the workers that ran at the end.

    prefix_hit_tokens: cached tokens of admitted prompts, including those transferred from another worker
    received_bytes:    KV received from other workers
    failures:          prompts recomputed after a failed KV transfer, by error code
    expired, refused:  prefill results not fetched in time, or not exported for lack of blocks
    """

    prefilled_tokens: int = 0
    prefix_hit_tokens: int = 0
    generated_tokens: int = 0
    preemptions: int = 0
    received_bytes: int = 0
    failures: Counter[str] = field(default_factory=Counter)
    expired: int = 0
    refused: int = 0

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
        return counters
