"""The seam of optional cost terms of the disaggregation decision: each term is one file beside this one."""

import numpy as np
from numpy.typing import NDArray

from penstock.router.disagg.disagg import DisaggDecision, Override
from penstock.router.fleet.worker_pool import WorkerPool
from penstock.seams import RoutingContext


class Adjustment:
    """One optional cost term with its state by worker slot. A term overrides what it needs; one event loop owns it."""

    def setup_s(self, pool: WorkerPool, context: RoutingContext, source: int) -> NDArray[np.float64] | None:
        """Give (num_slots,) seconds before KV begins to move from the worker in slot `source` to each; None for none."""
        del pool, context, source
        return None

    def override(self, context: RoutingContext) -> Override | None:
        """Give what may change the decision about the request of this context; None for nothing."""
        del context
        return None

    def taken(self, decision: DisaggDecision, tie: int, *, again: bool) -> None:
        """Account for a decision that is carried out; `again` replaces an earlier decision about the same request."""

    def moved(self, source: int, reader: int) -> None:
        """Note that the worker in slot `reader` has read KV of the worker in slot `source`."""

    def grow(self, num_slots: int) -> None:
        """Have this many slots."""

    def forget(self, slot: int) -> None:
        """Forget the worker in a slot."""

    def check(self, num_slots: int) -> None:
        """Raise AssertionError where the state is broken."""
