"""One request's way from the worker that computes its prompt to the one that answers, seen from its router."""

from dataclasses import replace

from penstock.core.ids import WorkerId
from penstock.core.types import KvHandle, Prefetch, Request
from penstock.router.handed_over import HandedOver
from penstock.router.prefetching import Prefetching
from penstock.router.quote import Quote, Route
from penstock.router.shared import Shared


class Relay:
    """Where its prompt's KV is, for as long as it is held there, and who reads it while it is computed."""

    def __init__(self, shared: Shared) -> None:
        """Begin with a prompt that nobody has computed."""
        self.handed: HandedOver | None = None
        """What a prefill worker has computed and nobody has gone on with yet."""
        self._shared = shared
        self._prefetching: Prefetching | None = None

    def prefetch(self, quote: Quote, request: Request, handle: KvHandle) -> None:
        """Have the worker that a quote prefers read the KV of a prompt that is being computed, and go on with it, if it can.

        Args:
            quote: of what is left once the prompt is computed.
            request: as it is until then.
            handle: of KV that is still to come.

        Raises:
            PenstockError: that one could not be told.
        """
        if self._prefetching is not None or not self._shared.fleet.can_prefetch(quote.choice.slot):
            return
        route = self._shared.router.take(replace(quote, is_early=True))
        prefetch = Prefetch(request_id=request.request_id, block_hashes=request.block_hashes, kv=handle)
        self._prefetching = Prefetching(self._shared, route, prefetch)

    def claim(self) -> Route | None:
        """Give the way to who reads its KV already, for the request to go there next; None where there is nobody."""
        prefetching, self._prefetching = self._prefetching, None
        if prefetching is None:
            return None
        if self.handed is not None:
            return prefetching.claim()
        prefetching.drop()
        return None

    def went_on(self, worker_id: WorkerId | None = None) -> None:
        """Have the prefill worker let go of what is left there: this one has gone on, wherever it had the KV from; or nobody does.

        Where that is the prefill worker itself, in another role now, it is not told: it would take the request to be given up.
        """
        if self.handed is not None:
            if self.handed.worker_id != worker_id:
                self.handed.give_up()
            self.handed = None

    def end(self) -> None:
        """Have everybody let go: nobody goes on. Safe twice."""
        self.went_on()
        if self._prefetching is not None:
            self._prefetching.drop()
            self._prefetching = None
