"""What the workers of one role have done by the end of a simulation, added up."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Self

from penstock.sim.cluster import SimCluster, SimWorker


@dataclass(slots=True)
class Tally:
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
        tally = cls()
        for worker in workers:
            load, hand_over = worker.engine.load(), worker.worker.hand_over
            tally.prefilled_tokens += load.prefilled_tokens
            tally.prefix_hit_tokens += load.prefix_hit_tokens
            tally.generated_tokens += load.generated_tokens
            tally.preemptions += load.preemptions
            tally.received_bytes += cluster.wires.received_bytes[worker.host]
            if hand_over is not None:
                tally.failures.update(hand_over.failures)
                tally.expired += hand_over.offers.expired
                tally.refused += hand_over.offers.refused
        return tally
