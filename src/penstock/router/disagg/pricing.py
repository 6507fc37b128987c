"""One router's inputs of disaggregation decisions: what KV transfers cost now."""

import numpy as np
from numpy.typing import NDArray

from penstock.router.config import RouterConfig
from penstock.router.disagg.disagg import DisaggDecision, DisaggInputs
from penstock.router.disagg.link_setup import LinkSetup
from penstock.router.fleet.fleet import Fleet
from penstock.router.fleet.worker_pool import ModelPool
from penstock.router.policy.selector import WorkerChoice, WorkerSelector
from penstock.seams import RoutingContext


class DisaggPricing:
    """Prices KV transfers by link bandwidths and link set-ups. One event loop owns it."""

    def __init__(self, fleet: Fleet, selector: WorkerSelector, config: RouterConfig) -> None:
        self._fleet = fleet
        self._selector = selector
        self._config = config.disagg
        self.link_setup = LinkSetup(fleet.loads.num_slots, selector)
        fleet.slot_followers.append(self.link_setup)

    def inputs(
        self,
        pool: ModelPool,
        context: RoutingContext,
        *,
        prefill_mask: NDArray[np.bool_],
        prompt_turn: int,
        prompt: WorkerChoice,
        blocks: int,
    ) -> DisaggInputs:
        """Give the inputs of the decision about a request.

        Args:
            pool: of its model.
            context: of the request.
            prefill_mask: (num_slots,) bool, workers that may compute its prompt.
            prompt_turn: round-robin position among them.
            prompt: the cheapest of them.
            blocks: full KV blocks of the prompt.
        """
        setup_s = self.link_setup.setup_s(pool, context, prompt.slot)
        block_s, setup_s = self._left(context, prompt, blocks, setup_s)
        return DisaggInputs(
            prefill_mask=prefill_mask,
            prompt_turn=prompt_turn,
            blocks=blocks,
            block_s=block_s,
            setup_s=setup_s,
            kinds=pool.pairs.kinds(len(context.eligible)),
            config=self._config,
            always=self._fleet.slots.at(prompt.slot).instance.engine.transferred_prompts_only,
        )

    def taken(self, decision: DisaggDecision, tie: int, *, again: bool) -> None:
        """Account for a decision that is carried out; `again` replaces an earlier decision about the same request."""
        self.link_setup.taken(decision, tie, again=again)

    def check(self) -> None:
        """Raise AssertionError where the link set-ups are broken."""
        self.link_setup.check(self._fleet.loads.num_slots)

    def _left(
        self, context: RoutingContext, prompt: WorkerChoice, blocks: int, setup_s: NDArray[np.float64] | None
    ) -> tuple[NDArray[np.float64], NDArray[np.float64] | None]:
        """Give the seconds for a block to each worker, and for the link, beyond what passes during the prefill."""
        # All eligible workers have blocks of one size.
        reader = self._fleet.slots.at(int(context.eligible.argmax()))
        byte_s = self._fleet.link_bandwidths.byte_s(prompt.slot)
        block_s = byte_s * reader.instance.engine.kv_bytes_per_block
        if self._selector.prefill_term is None:
            return block_s, setup_s
        instance = self._fleet.slots.at(prompt.slot).instance
        cached = int(context.overlap_blocks[prompt.slot]) * context.block_size
        uncached = max(context.request_tokens - cached, 1)
        streams = instance.exchange is not None and instance.exchange.streams
        return left_to_move(
            block_s,
            setup_s,
            blocks,
            context.request_tokens,
            uncached_tokens=uncached,
            chunk_tokens=instance.engine.max_batch_tokens if streams else uncached,
            prefill_s=float(prompt.terms[self._selector.prefill_term, prompt.slot]),
        )


def left_to_move(
    block_s: NDArray[np.float64],
    setup_s: NDArray[np.float64] | None,
    blocks: int,
    tokens: int,
    *,
    uncached_tokens: int,
    chunk_tokens: int,
    prefill_s: float,
) -> tuple[NDArray[np.float64], NDArray[np.float64] | None]:
    """Take off what passes while the prompt is computed.

    The decode worker sets the link up from the start of the prefill. Blocks move from the end of the first chunk on, and the
    last chunk's blocks after the prefill.

    Args:
        block_s: (num_slots,) seconds that each block takes to each worker.
        setup_s: (num_slots,) seconds before the first block moves; None for none.
        blocks: of the prompt.
        tokens: of the prompt.
        uncached_tokens: that the prefill worker computes.
        chunk_tokens: that it computes at a time, before the first blocks can move.
        prefill_s: seconds for all of them.

    Returns:
        what is left of both, the first as a mean of all the blocks.
    """
    chunks = -(-uncached_tokens // chunk_tokens)
    last_tokens = uncached_tokens - (chunks - 1) * chunk_tokens
    first_s = prefill_s * min(chunk_tokens / uncached_tokens, 1.0)
    begin_s = first_s if setup_s is None else np.maximum(first_s, setup_s)
    early_s = blocks * block_s * max(1 - last_tokens / tokens, 0.0)
    left_s = block_s - np.minimum(np.maximum(prefill_s - begin_s, 0.0), early_s) / max(blocks, 1)
    return left_s, None if setup_s is None else np.maximum(setup_s - prefill_s, 0.0)
