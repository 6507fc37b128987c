"""What moving a prompt's KV between two workers takes, by all that the fleet knows of the way between them."""

import numpy as np
from numpy.typing import NDArray

from penstock.router.disagg.disagg import left_to_move
from penstock.router.fleet.fleet import Fleet
from penstock.router.fleet.worker_pool import WorkerPool
from penstock.router.policy.selector import Choice, WorkerSelector
from penstock.seams import RoutingContext


class MovePrices:
    """One router's. Pure bookkeeping, and nothing kept."""

    def __init__(self, fleet: Fleet, selector: WorkerSelector) -> None:
        """Price what this one's policy is to compare."""
        self._fleet = fleet
        self._selector = selector

    def after(
        self, pool: WorkerPool, context: RoutingContext, prompt: Choice, blocks: int
    ) -> tuple[NDArray[np.float64], NDArray[np.float64] | None]:
        """Say what a block of a prompt takes to each worker, and its link, beyond what passes while the prompt is computed."""
        block_s, link_s = self._block_s(context, prompt.slot), self._link_s(pool, context, prompt.slot)
        if self._selector.prefill_term is None:
            return block_s, link_s
        instance = self._fleet.slots.at(prompt.slot).instance
        cached = int(context.overlap_blocks[prompt.slot]) * context.block_size
        uncached = max(context.request_tokens - cached, 1)
        streams = instance.exchange is not None and instance.exchange.streams
        return left_to_move(
            block_s,
            link_s,
            blocks,
            context.request_tokens,
            uncached_tokens=uncached,
            chunk_tokens=instance.engine.max_batch_tokens if streams else uncached,
            prefill_s=float(prompt.terms[self._selector.prefill_term, prompt.slot]),
        )

    def _block_s(self, context: RoutingContext, source: int) -> NDArray[np.float64]:
        """Say what a block takes from the worker in a slot to each; those that hand over have blocks of one size."""
        slot = int(context.eligible.argmax())
        return (
            self._fleet.link_bandwidths.byte_s(source)
            * self._fleet.slots.at(slot).instance.engine.kv_bytes_per_block
        )

    def _link_s(self, pool: WorkerPool, context: RoutingContext, source: int) -> NDArray[np.float64] | None:
        """Say what each worker is charged for the first use of its link to the one in a slot; None for nothing."""
        if not self._selector.term_names:
            return None  # a policy that predicts no seconds has nothing to hold it against
        setups_s = pool.pairs.setups_s(source, len(context.eligible))
        return self._fleet.link_bandwidths.link_setup_cost.charge_s(source, setups_s, context.now_s)
