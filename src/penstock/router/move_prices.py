"""What moving a prompt's KV between two workers takes, by all that the fleet knows of the way between them."""

import numpy as np
from numpy.typing import NDArray

from penstock.router.chooser import Choice, Chooser
from penstock.router.disagg import Move, left_to_move
from penstock.router.fleet import Fleet
from penstock.router.worker_pool import WorkerPool
from penstock.seams import RoutingContext


class MovePrices:
    """One router's. Pure bookkeeping, and nothing kept."""

    def __init__(self, fleet: Fleet, chooser: Chooser) -> None:
        """Price what this one's policy is to compare."""
        self._fleet = fleet
        self._chooser = chooser

    def move(self, pool: WorkerPool, context: RoutingContext, source: int | None, blocks: int) -> Move:
        """Say what it takes to move so many blocks from the worker in a slot to each; None is somebody unknown."""
        takers = pool.pairs.takers(source, len(context.eligible))
        block_s, link_s = self._block_s(context, source), self._link_s(pool, context, source)
        return Move(source, blocks, block_s, takers, link_s)

    def after(
        self, pool: WorkerPool, context: RoutingContext, prompt: Choice, blocks: int
    ) -> tuple[NDArray[np.float64], NDArray[np.float64] | None]:
        """Say what a block of a prompt takes to each worker, and its link, beyond what passes while the prompt is computed."""
        block_s, link_s = self._block_s(context, prompt.slot), self._link_s(pool, context, prompt.slot)
        instance = self._fleet.seats.at(prompt.slot).instance
        if instance.exchange is None or not instance.exchange.streams or self._chooser.prefill_term is None:
            return block_s, link_s
        cached = int(context.overlap_blocks[prompt.slot]) * context.block_size
        return left_to_move(
            block_s,
            link_s,
            blocks,
            context.request_tokens,
            uncached_tokens=max(context.request_tokens - cached, 1),
            chunk_tokens=instance.engine.max_batch_tokens,
            prefill_s=float(prompt.terms[self._chooser.prefill_term, prompt.slot]),
        )

    def _block_s(self, context: RoutingContext, source: int | None) -> NDArray[np.float64]:
        """Say what a block takes from the worker in a slot to each; those that hand over have blocks of one size."""
        slot = int(context.eligible.argmax())
        return (
            self._fleet.kv_ways.byte_s(source) * self._fleet.seats.at(slot).instance.engine.kv_bytes_per_block
        )

    def _link_s(
        self, pool: WorkerPool, context: RoutingContext, source: int | None
    ) -> NDArray[np.float64] | None:
        """Say what each worker is charged for the first use of its link to the one in a slot; None for nothing."""
        if source is None or not self._chooser.term_names:
            return None  # a policy that predicts no seconds has nothing to hold it against
        setups_s = pool.pairs.setups_s(source, len(context.eligible))
        return self._fleet.kv_ways.cold_links.charge_s(source, setups_s, context.now_s)
