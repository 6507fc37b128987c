"""A routing policy of your own: the quietest of the workers that have most of the prompt, else the quietest of all.

Every frontend must be able to import it:

    PYTHONPATH=examples penstock serve --graph examples/mock.yaml --policy routing_policy:QuietestHolder

or a package lists it, and then its name is enough (`--policy quietest-holder`):

    [project.entry-points."penstock.policies"]
    quietest-holder = "routing_policy:QuietestHolder"

`penstock.testing.routing_policy.RoutingPolicySuite` tests what every policy must do.
"""

import numpy as np
from numpy.typing import NDArray

from penstock.seams import RoutingContext

SHARE = 0.5
"""A worker that has so much of the prompt is a holder."""


class QuietestHolder:
    """Prices holders by their load, and everybody else by theirs plus more than any holder's can be."""

    name = "quietest-holder"

    def costs(self, context: RoutingContext) -> NDArray[np.float64]:
        load = (context.running_requests + context.waiting_requests).astype(np.float64)
        cached_tokens = context.overlap_blocks * context.block_size
        is_holder = cached_tokens >= SHARE * context.request_tokens
        return np.where(is_holder, load, load + load.max(initial=0.0) + 1.0)
