"""What chooses a worker for a request."""

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from penstock.core.routing_context import RoutingContext


class RoutingPolicy(Protocol):
    """Prices a request on every worker at once. Pure: the same context gives the same costs.

    One that goes by what it chose before is a `HistoryPolicy`: pure from one `chosen` to the next.
    """

    @property
    def name(self) -> str: ...

    def costs(self, context: RoutingContext) -> NDArray[np.float64]:
        """Return (num_slots,) costs; the lowest eligible one wins, ties are broken by the request's hash.

        That one is finite: `inf` rules a worker out, and a policy that rules all out, or gives NaN, has failed.
        """
        ...


@runtime_checkable
class ExplainedPolicy(RoutingPolicy, Protocol):
    """A routing policy whose costs are seconds, sums of terms, so that a decision can say what it was made of.

    Terms named `queue` and `kv_wait` say how long a request would wait there before its work begins: with them requests
    can be held (`router.queue`).
    """

    @property
    def term_names(self) -> Sequence[str]: ...

    def terms(self, context: RoutingContext) -> NDArray[np.float64]:
        """Return (num_terms, num_slots) seconds whose sums are the costs: an array of its own. Pure, as `costs` is."""
        ...


@runtime_checkable
class HistoryPolicy(RoutingPolicy, Protocol):
    """A routing policy that is told what came of its costs. It bounds what it remembers."""

    def chosen(self, context: RoutingContext, slot: int) -> None:
        """Take note that the request of this context, the last one priced, goes to `slot`."""
        ...
