"""One request on one worker, from the moment it is sent until all that it took there is given back."""

from penstock.core.ids import RequestId
from penstock.core.types import Request
from penstock.router.fleet import Fleet
from penstock.router.member import DeltaHandler
from penstock.router.metrics import RouterMetrics
from penstock.router.progress import Progress
from penstock.router.quote import Route

_EARLY_STEPS = 2
"""A prompt's and a first one that only decodes: a request that takes its worker down as it comes does so within them."""


class Attempt:
    """A connection that carries a request's deltas, and a reservation for it. `release` it once."""

    def __init__(self, fleet: Fleet, route: Route, request: Request, handler: DeltaHandler) -> None:
        """Send the request where the route leads.

        Raises:
            WorkerLost: the connection has ended; nothing is reserved.
            Overloaded: too much is on its way to this worker; nothing is reserved.
            RequestError: it is larger than the plane carries; nothing is reserved.
        """
        self.route = route
        self.connection = fleet.submit(route.slot, request, handler)
        self.has_tokens = False
        self.early_steps = _EARLY_STEPS
        """Of the first steps that give it tokens, so many are still to come."""
        self.has_begun = not fleet.announces(route.slot)
        """Whether its worker has said that it computes it; taken for granted where that one does not say so."""
        self._fleet = fleet
        self._request_id: RequestId = request.request_id
        self._sent_tokens = request.num_emitted
        self._reservation = fleet.loads.reserve(
            route.slot, route.prefill_tokens, route.blocks, route.cached_tokens
        )

    @property
    def is_predicted(self) -> bool:
        """Whether what its worker holds is a guess."""
        return self._fleet.predicts(self.route.slot)

    @property
    def is_early(self) -> bool:
        """Whether a failure now may be this request's doing: its worker computes it, and has not done so for long."""
        return self.has_begun and self.early_steps > 0

    def on_first_token(self) -> None:
        """Take back what was reserved for the prefill."""
        self.has_tokens = True
        self._fleet.loads.prefill_done(self._reservation)

    def compare(self, cached_tokens: int, block_size: int, metrics: RouterMetrics) -> None:
        """Count how far a guess of what the worker has cached was true."""
        if self.is_predicted:
            guessed = self.route.overlap_blocks * block_size
            metrics.predicted_hit_tokens.inc(guessed)
            metrics.predicted_hits_found_tokens.inc(min(guessed, cached_tokens))

    def grant(self, taken_from: int, taken_to: int) -> None:
        """Allow the worker as many more tokens as the reader took, of those that this worker sent.

        Args:
            taken_from: the output tokens that the reader had before, those that came with the request included.
            taken_to: those that it has now.
        """
        tokens = taken_to - max(taken_from, self._sent_tokens)
        if tokens > 0:
            self.connection.grant(self._request_id, tokens)

    def finish(self, progress: Progress) -> None:
        """Note that the worker has sent all of the answer."""
        if self.is_predicted:
            self._fleet.answered(self.route.slot, progress.request())

    def abort(self) -> None:
        """Ask the worker to stop; `release` is still due."""
        self.connection.abort(self._request_id)

    def release(self) -> None:
        """Give the reservation back and take no more deltas."""
        self._fleet.loads.release(self._reservation)
        self._fleet.finished(self.route.slot, self._request_id)
