"""Whether a prompt is computed where its answer is, or by a prefill worker that hands it over; two sums of seconds decide.

Beside the prices of both workers there is what the move takes: each block that the decode worker lacks, over the link.
Policies that predict no times go by the number of tokens to compute.
"""

from dataclasses import dataclass, replace

import numpy as np

from penstock.core.types import Tier
from penstock.router.chooser import Chooser
from penstock.router.config import DisaggConfig
from penstock.seams import RoutingContext

_MOVED = list(Tier).index(Tier.OBJECT)
"""What is to be moved is priced as if it lay in the last tier: at so many seconds a token."""


@dataclass(frozen=True, slots=True)
class Comparison:
    """Both sums, in seconds (or in the policy's own numbers, None where these cannot be compared).

    `local` is all of it on the decode worker; `prefill` and `decode` are its parts elsewhere, the move in the latter.
    """

    local: float | None
    prefill: float | None
    decode: float | None
    is_remote: bool

    @property
    def remote(self) -> float | None:
        """The whole of it elsewhere."""
        return None if self.prefill is None or self.decode is None else self.prefill + self.decode


def as_handed_over(
    context: RoutingContext, handed_blocks: int, block_bytes: int, config: DisaggConfig
) -> RoutingContext:
    """Show a request whose leading blocks a prefill worker has, to price it on those that may go on with it.

    Args:
        context: as it is without.
        handed_blocks: how many blocks would be moved to who has none.
        block_bytes: of one.
        config: how fast they move.
    """
    overlaps = np.maximum(context.overlap_blocks, handed_blocks)
    tiers = context.tier_blocks.copy()
    tiers[_MOVED] += (overlaps - context.overlap_blocks).astype(tiers.dtype)
    onboard = context.prices.onboard_token_s.copy()
    onboard[_MOVED] = block_bytes / config.link_bytes_per_s / context.block_size
    return replace(
        context,
        overlap_blocks=overlaps,
        tier_blocks=tiers,
        prices=replace(context.prices, onboard_token_s=onboard),
    )


def compare(
    chooser: Chooser,
    *,
    local: float,
    prefill: float,
    decode: float,
    uncached_tokens: int,
    config: DisaggConfig,
) -> Comparison:
    """Decide where a prompt is computed.

    Args:
        chooser: whose prices these are.
        local: of the request on the best decode worker.
        prefill: of its prompt on the best prefill worker.
        decode: of the rest on the best decode worker once the prompt is handed over.
        uncached_tokens: what the best decode worker would have to compute.
        config: what it takes beside.
    """
    if uncached_tokens < config.remote_tokens_min:
        return Comparison(local, None, None, is_remote=False)
    if not chooser.term_names:
        return Comparison(None, None, None, is_remote=True)
    after = decode + config.hand_over_s
    return Comparison(local, prefill, after, is_remote=prefill + after < local)
