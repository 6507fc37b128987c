"""Routing policies: which worker gets a request."""

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from penstock.core.routing_context import RoutingContext


class RoutingPolicy(Protocol):
    """Prices a request on every worker at once. Pure: the same context gives the same costs.

    A policy that depends on its earlier choices is a `HistoryPolicy`: pure between two calls of `chosen`.
    """

    @property
    def name(self) -> str: ...

    def costs(self, context: RoutingContext) -> NDArray[np.float64]:
        """Return (num_slots,) costs; the eligible worker with the lowest wins, ties are broken by the request's hash.

        `inf` rules a worker out. Costs that are NaN, or `inf` for all eligible workers, count as a failure of the policy.
        """
        ...


@runtime_checkable
class ExplainedPolicy(RoutingPolicy, Protocol):
    """A routing policy whose costs are sums of terms in seconds, so that a decision can be explained.

    Terms named `queue` and `kv_wait` are the time that a request would wait at the worker before its work begins; a policy
    with such terms enables the router's request queue (`router.queue`).
    """

    @property
    def term_names(self) -> Sequence[str]: ...

    def terms(self, context: RoutingContext) -> NDArray[np.float64]:
        """Return a new (num_terms, num_slots) array of seconds; its column sums are the costs. Pure, like `costs`."""
        ...


@runtime_checkable
class HistoryPolicy(RoutingPolicy, Protocol):
    """A routing policy that learns of the choice. It must bound what it remembers."""

    def chosen(self, context: RoutingContext, slot: int) -> None:
        """Note that the request of `context`, the last one priced, goes to the worker in `slot`."""
        ...
