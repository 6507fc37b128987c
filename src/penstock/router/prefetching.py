"""A decode worker that reads a prompt's KV while a prefill worker computes it, until the request itself goes there."""

from penstock.core.errors import WorkerLost
from penstock.core.ids import RequestId
from penstock.core.types import Delta, Prefetch
from penstock.router.quote import Route
from penstock.router.shared import Shared


class Prefetching:
    """A reservation there, and what ends it: `claim` it or `drop` it."""

    def __init__(self, shared: Shared, route: Route, prefetch: Prefetch) -> None:
        """Tell the worker that the route leads to.

        Raises:
            WorkerLost: the connection has ended; nothing is reserved.
            Overloaded: too much is on its way to this worker; nothing is reserved.
            RequestError: it is larger than the plane carries; nothing is reserved.
        """
        self._shared = shared
        self._route = route
        self._request_id: RequestId = prefetch.request_id
        self._connection = shared.fleet.prefetch(route.slot, prefetch, self)
        self._reservation = shared.fleet.loads.reserve(
            route.slot, route.prefill_tokens, route.blocks, route.cached_tokens
        )
        self._is_open = True

    def claim(self) -> Route | None:
        """Give the way there for the request itself, which goes out next; None where the worker takes nothing any more."""
        if self._is_open and self._shared.fleet.is_ready(self._route.slot):
            self._release("used")
            return self._route
        self.drop()
        return None

    def drop(self) -> None:
        """Tell the worker that the request does not come. Safe twice."""
        if self._is_open:
            self._connection.abort(self._request_id)
            self._release("dropped")

    # -- DeltaHandler

    def on_delta(self, delta: Delta) -> None:
        """Nothing comes before the request went there."""

    def on_lost(self, error: WorkerLost, *, alone: bool) -> None:
        del error, alone
        self._release("dropped")

    def _release(self, outcome: str) -> None:
        if not self._is_open:
            return
        self._is_open = False
        fleet = self._shared.fleet
        fleet.loads.release(self._reservation)
        fleet.finished(self._route.slot, self._request_id)
        self._shared.metrics.prefetches.labels(outcome).inc()
