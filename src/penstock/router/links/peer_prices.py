"""What each worker could load of a prompt from another one, and at what price: by measured speed, where that is less than computing."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from penstock.core.types.events import Tier
from penstock.kv.manager.worth import PEER_MARGIN
from penstock.router.links.kv_transfer_pairs import KvTransferPairs
from penstock.seams import RoutingContext

_LENDERS_MAX = 4
"""Workers with the most of a prompt that are compared; the others have less of it."""
PRICED_TIER = list(Tier).index(Tier.OBJECT)
"""Blocks of other workers are priced as if they lay in the last tier."""


@dataclass(frozen=True, slots=True, eq=False)
class OwnBlocks:
    """Columns of a context before loads from other workers were priced: what each worker has itself."""

    overlap_blocks: NDArray[np.int32]
    tier_blocks: NDArray[np.int32]
    onboard_token_s: NDArray[np.float64]

    def context(self, priced: RoutingContext) -> RoutingContext:
        """Give the context of a request without what workers would load from others."""
        return priced.changed(
            overlap_blocks=self.overlap_blocks,
            tier_blocks=self.tier_blocks,
            prices=priced.prices.with_move(self.onboard_token_s, priced.prices.round_trip_s),
        )


@dataclass(frozen=True, slots=True, eq=False)
class PeerLoads:
    """What is cheaper to load than to compute.

    context: of the request, with these blocks among those of each worker
    sources: (num_slots,) slot of the worker that each would load from; -1 for none
    own:     what each worker has itself
    """

    context: RoutingContext
    sources: NDArray[np.intp]
    own: OwnBlocks


def with_peers(
    context: RoutingContext,
    pairs: KvTransferPairs,
    byte_s: Callable[[int], NDArray[np.float64]],
    block_bytes: int,
    wait_s: Callable[[int], float] = lambda _source: 0.0,
    *,
    readers: NDArray[np.bool_],
) -> PeerLoads | None:
    """Price what each reader could load from the worker from which that saves most.

    Args:
        context: of a request.
        pairs: who lends to whom.
        byte_s: gives (num_slots,) seconds per byte from the worker in a slot to each; infinite where nobody has measured.
        block_bytes: of one block; 0 for engines that keep no memory for KV.
        wait_s: gives the seconds that loads sent to the worker in a slot before will still take.
        readers: (num_slots,) bool, workers that may compute the prompt.

    Returns:
        None where nothing is worth loading.
    """
    lenders = pairs.lenders(context.tier_blocks[0], context.tier_blocks[1], _LENDERS_MAX)
    if not (lenders and block_bytes):
        return None
    prices, tiers = context.prices, context.tier_blocks
    is_quick = prices.worth_fetching()
    held = context.overlap_blocks - (tiers * ~is_quick).sum(axis=0)
    saved_s = np.zeros(len(held))
    token_s, gained = np.zeros(len(held)), np.zeros(len(held), tiers.dtype)
    sources = np.full(len(held), -1, np.intp)
    for source, blocks in lenders:
        tokens = np.maximum(blocks - held, 1) * context.block_size
        load_s = byte_s(source) * (block_bytes / context.block_size) + wait_s(source) / tokens
        is_less = (blocks > held) & (load_s * PEER_MARGIN < prices.prefill_token_s) & readers
        would_save_s = (blocks - held) * np.where(is_less, prices.prefill_token_s - load_s, 0.0)
        is_best = would_save_s > saved_s
        saved_s, token_s = np.where(is_best, would_save_s, saved_s), np.where(is_best, load_s, token_s)
        gained, sources = np.where(is_best, blocks - held, gained), np.where(is_best, source, sources)
    if not np.count_nonzero(gained):
        return None
    moved, moved_s = tiers[PRICED_TIER], prices.onboard_token_s[PRICED_TIER]
    kept = np.where(is_quick[PRICED_TIER], moved, 0)
    all_blocks, onboard = tiers.copy(), prices.onboard_token_s.copy()
    is_gain = gained > 0
    all_blocks[PRICED_TIER] = np.where(is_gain, kept + gained, moved)
    mean_s = (kept * moved_s + gained * token_s) / np.maximum(kept + gained, 1)
    onboard[PRICED_TIER] = np.where(is_gain, mean_s, moved_s)
    overlap_blocks = context.overlap_blocks + np.where(is_gain, kept - moved + gained, 0)
    changed = context.changed(
        overlap_blocks=overlap_blocks.astype(context.overlap_blocks.dtype),
        tier_blocks=all_blocks,
        prices=prices.with_move(onboard, prices.round_trip_s),
    )
    own = OwnBlocks(context.overlap_blocks, tiers, prices.onboard_token_s)
    return PeerLoads(changed, sources, own)
