"""Longest prefix, unless loads are far apart or the prefix is short: three thresholds."""

import numpy as np
from numpy.typing import NDArray

from penstock.seams import RoutingContext

SPREAD_REQUESTS = 64
SPREAD_RATIO = 1.5
PREFIX_SHARE = 0.3


class PrefixThenLoad:
    """Fewest requests if max - min > 64 and max > 1.5 * min; else the longest match if it is more than 0.3 of the
    prompt; else fewest requests.

    Loads are the requests that the router has sent and that have not ended.

    Source: the `cache_aware` policy of sglang-router 0.3 with its defaults.
    """

    name = "prefix-then-load"

    def costs(self, context: RoutingContext) -> NDArray[np.float64]:
        load = context.own_requests
        eligible = load[context.eligible]
        if len(eligible):
            low, high = eligible.min(), eligible.max()
            is_uneven = high - low > SPREAD_REQUESTS and high > SPREAD_RATIO * low
            longest = context.overlap_blocks[context.eligible].max() * context.block_size
            if not is_uneven and longest > PREFIX_SHARE * context.request_tokens:
                return -context.overlap_blocks.astype(np.float64)
        return load.astype(np.float64)
