"""Prefill work times batch size: no weight to choose."""

import numpy as np
from numpy.typing import NDArray

from penstock.router.policies import uncached_tokens
from penstock.seams import RoutingContext


class Product:
    """argmin of (uncached tokens of this request and of those still before their first token) * (requests + 1).

    Both count what the router has sent and has not seen the end of.

    Source: LMetric, arXiv 2603.15202.
    """

    name = "product"

    def costs(self, context: RoutingContext) -> NDArray[np.float64]:
        new_tokens = context.own_prefill_tokens + uncached_tokens(context)
        return (new_tokens * (context.own_requests + 1)).astype(np.float64)
