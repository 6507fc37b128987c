"""A sum of blocks: prefill blocks of the worker and of this request, and blocks of running decodes."""

import numpy as np
from numpy.typing import NDArray

from penstock.core.types.events import Tier
from penstock.seams import RoutingContext

CREDITS = {Tier.DEVICE: 1.0, Tier.HOST: 0.75, Tier.DISK: 0.25, Tier.OBJECT: 0.0}
"""Computed blocks that one block in a tier saves."""
_CREDITS = np.array([CREDITS[tier] for tier in Tier])


class LinearBlocks:
    """argmin of [active prefill + prompt - device - 0.75 host - 0.25 disk], at least 0, + [active decode + request].

    All in blocks. Active are those of requests that the router has sent: for prefill what they had to compute, until
    their first token; for decode their prompts, until their end.

    Source: the default cost of NVIDIA Dynamo's KV router, overlap weight 1, temperature 0.
    """

    name = "linear-blocks"

    def costs(self, context: RoutingContext) -> NDArray[np.float64]:
        prefill = (
            context.own_prefill_tokens / context.block_size + context.request_tokens / context.block_size
        )
        prefill -= _CREDITS @ context.tier_blocks
        np.maximum(prefill, 0.0, out=prefill)
        return prefill + context.own_blocks + context.request_blocks
