"""What the workers of one role have done by the end of a simulation, added up."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Self

from penstock.sim.world.cluster import SimCluster, SimWorker


@dataclass(slots=True)
class Counters:
    """Of those workers that were there at the end.

    prefix_hit_tokens: what was cached of prompts that were taken in; what came from another worker counts as cached
    received_bytes:    of KV, from other workers
    failures:          prompts whose KV did not come and that were computed again, by error code
    expired, refused:  prompts computed for others: nobody took their KV in time, or it could not be held for them
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
        """Add up what some of a cluster's workers have done so far."""
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
