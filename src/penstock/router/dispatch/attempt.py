"""One attempt at a request: its reservation and connection at a worker, or at a prefill and a decode worker, and its direct stream."""

import asyncio
import secrets

import msgspec

from penstock.core.errors import WorkerLost
from penstock.core.ids import RequestId
from penstock.core.types.instances import Role
from penstock.core.types.requests import TRANSFER_ID_BYTES, Delta, KvHandle, Prefetch, Request
from penstock.router.candidates import WorkerRoute
from penstock.router.dispatch.progress import Progress
from penstock.router.dispatch.state import DispatcherState, Leg, LegPart
from penstock.router.fleet.fleet import Fleet
from penstock.router.fleet.member import Condition, DeltaHandler
from penstock.router.metrics import RouterMetrics
from penstock.seams import Connection, DirectSink, DirectStream, Hold, Interrupt

_EARLY_STEPS = 2
"""The prompt's step and the first decode step: a request that kills its worker does so within these."""


class RoutedRequest:
    """One request, or one prefetch, at one worker: what it reserves there, and its handler, from sending until `release`."""

    def __init__(
        self,
        fleet: Fleet,
        route: WorkerRoute,
        sent: Request | Prefetch,
        handler: DeltaHandler,
        *,
        tenant: str,
        is_expected: bool = False,
    ) -> None:
        """Send to the route's worker, then reserve there.

        Args:
            fleet: knows the worker.
            route: to the worker.
            sent: the request, or the prefetch of a request that follows.
            handler: receives deltas and the loss of the worker until `release`.
            tenant: whose request it is.
            is_expected: whether the request itself follows later.

        Raises:
            WorkerLost: the connection has ended; nothing is reserved.
            Overloaded: too much is on its way to this worker; nothing is reserved.
            RequestError: it is larger than the plane carries; nothing is reserved.
        """
        self.route = route
        self.member = fleet.slots.at(route.slot)
        self.connection = fleet.submit(route.slot, sent, handler)
        self._fleet = fleet
        self._request_id = sent.request_id
        self._reservation = fleet.loads.reserve(
            route.slot,
            route.prefill_tokens,
            route.blocks,
            route.cached_tokens,
            is_expected=is_expected,
            tenant=tenant,
        )

    def prefill_done(self) -> None:
        """Note the first token: the prompt is computed."""
        self._fleet.loads.prefill_done(self._reservation)

    def compare(self, cached_tokens: int, block_size: int, metrics: RouterMetrics) -> None:
        """Count how many of the tokens guessed to be cached were cached."""
        if not self.member.is_predicted:
            return
        guessed = self.route.overlap_blocks * block_size
        metrics.predicted_hit_tokens.inc(guessed)
        metrics.predicted_hits_found_tokens.inc(min(guessed, cached_tokens))
        if self.member.instance.engine.is_deployment:
            share = self._fleet.regions.found(self.route.slot, guessed, cached_tokens)
            metrics.links.show_advertised_share(self.member.instance.name, share)

    def abort(self) -> None:
        """Ask the worker to stop; `release` is still due."""
        self.connection.abort(self._request_id)

    def release(self) -> None:
        """Release the reservation, and take no more deltas. Safe twice."""
        self._fleet.loads.release(self._reservation)
        self._fleet.finished(self.route.slot, self._request_id)


class DecodeSide:
    """The decode worker of a prompt under prefill: a prefetch and a reservation there, until the request follows.

    A `DeltaHandler` of its own. End it with `go_on` or `drop`.
    """

    def __init__(
        self, shared: DispatcherState, route: WorkerRoute, prefill: WorkerRoute, request: Request
    ) -> None:
        """Send the prefetch: the decode worker reads KV while the prompt is computed.

        Args:
            shared: the dispatcher's.
            route: to the decode worker.
            prefill: to the prefill worker, which gets the prompt next.
            request: the one to come.

        Raises:
            WorkerLost: the connection has ended; nothing is reserved.
            Overloaded: too much is on its way to this worker; nothing is reserved.
            RequestError: it is larger than the plane carries; nothing is reserved.
        """
        self.route = route
        self.transfer_id = secrets.token_bytes(TRANSFER_ID_BYTES)
        fleet, self._metrics = shared.fleet, shared.metrics
        self._fleet = fleet
        prefetch = Prefetch(
            request_id=request.request_id,
            block_hashes=request.block_hashes,
            transfer_id=self.transfer_id,
            prefill_worker=prefill.worker_id,
            source=fleet.slots.at(prefill.slot).kv_source,
        )
        self._routed = RoutedRequest(fleet, route, prefetch, self, tenant=request.tenant, is_expected=True)
        self._is_open = True

    def go_on(self, request: Request, handler: DeltaHandler, source: "WorkerAttempt") -> "WorkerAttempt":
        """Send the request itself after the prefill; `source` releases its KV once the decode worker has a token.

        Raises:
            WorkerLost: the decode worker is lost, or takes nothing new.
            Overloaded: too much is on its way to it.
            RequestError: the request is larger than the plane carries.
        """
        if not (self._is_open and self._routed.member.condition is Condition.READY):
            self.drop()
            raise WorkerLost("the decode worker takes nothing new any more; another one is chosen")
        self._close("used")
        request = msgspec.structs.replace(request, transfer_id=self.transfer_id)
        return WorkerAttempt(self._fleet, self.route, request, handler, source=source)

    def drop(self) -> None:
        """Tell the decode worker that no request follows. Safe twice."""
        if self._is_open:
            self._routed.abort()
            self._close("dropped")

    # -- DeltaHandler

    def on_delta(self, delta: Delta) -> None:
        """Nothing comes before the request is sent."""

    def on_lost(self, error: WorkerLost, *, alone: bool) -> None:
        """Let the prefill go on: `go_on` fails then, and another worker is chosen."""
        del error, alone
        if self._is_open:
            self._close("dropped")

    def _close(self, outcome: str) -> None:
        self._is_open = False
        self._routed.release()
        self._metrics.prefetches.labels(outcome).inc()


class WorkerAttempt:
    """A request's connection and reservation on one worker. `release` it once.

    On a prefill worker `decode` is the decode worker that goes on. On a decode worker `source` is the prefill worker's attempt.
    """

    def __init__(
        self,
        fleet: Fleet,
        route: WorkerRoute,
        request: Request,
        handler: DeltaHandler,
        *,
        decode: DecodeSide | None = None,
        source: "WorkerAttempt | None" = None,
    ) -> None:
        """Send the request to the route's worker.

        Raises:
            WorkerLost: the connection has ended; nothing is reserved.
            Overloaded: too much is on its way to this worker; nothing is reserved.
            RequestError: it is larger than the plane carries; nothing is reserved.
        """
        self.route = route
        self._routed = RoutedRequest(fleet, route, request, handler, tenant=request.tenant)
        self.connection = self._routed.connection
        self.decode = decode
        self._source = source
        self.has_tokens = False
        self.early_steps = _EARLY_STEPS
        """How many of the first steps with tokens are still to come."""
        self._member = self._routed.member
        self.has_begun = not self._member.instance.engine.announces
        """Whether the worker has begun to compute the request; True where the worker does not say so."""
        self._fleet = fleet
        self._request_id: RequestId = request.request_id
        self._sent_tokens = request.num_emitted
        self._clock = asyncio.get_running_loop().time
        part = LegPart.PREFILL if decode is not None else LegPart.WHOLE if source is None else LegPart.DECODE
        self.leg = Leg(self._member.instance.name, part, self._clock())

    @property
    def is_at_decode_worker(self) -> bool:
        return self._member.instance.role is Role.DECODE

    @property
    def suspect_at(self) -> int | None:
        """How many answers got on at its worker so far; None where the request cannot have caused a failure now.

        It can while its worker began to compute it a step or two ago.
        """
        return self._member.answers if self.has_begun and self.early_steps > 0 else None

    def on_step(self) -> None:
        """Note one of the first steps with tokens."""
        self.early_steps -= 1
        self._member.answers += not self.early_steps

    def on_first_token(self) -> None:
        """Release the prefill's reservation, and the prompt's KV on the prefill worker."""
        self.has_tokens = True
        self.leg.first_token_s = self._clock()
        self._routed.prefill_done()
        self._let_source_go()

    def prefilled(self, request: Request, handle: KvHandle | None, handler: DeltaHandler) -> "WorkerAttempt":
        """Go on at the decode worker with the first token. This attempt is over in any case.

        Raises:
            WorkerLost: the decode worker is lost, or takes nothing new.
            Overloaded: too much is on its way to it.
            RequestError: the request is larger than the plane carries.
        """
        decode, self.decode = self.decode, None
        assert decode is not None, "its prompt is computed for a decode worker"
        self.release()
        request = msgspec.structs.replace(
            request, expected_cached_tokens=decode.route.cached_tokens, kv=handle
        )
        try:
            return decode.go_on(request, handler, self)
        except BaseException:
            self.abort()
            raise

    def compare(self, cached_tokens: int, block_size: int, metrics: RouterMetrics) -> None:
        """Count how many of the tokens guessed to be cached were cached."""
        self._routed.compare(cached_tokens, block_size, metrics)

    def grant(self, taken_from: int, taken_to: int) -> None:
        """Grant the worker credit for the tokens of its own that the reader took.

        Args:
            taken_from: output tokens that the reader had before, including those that came with the request.
            taken_to: output tokens that it has now.
        """
        tokens = taken_to - max(taken_from, self._sent_tokens)
        if tokens > 0:
            self.connection.grant(self._request_id, tokens)

    def finish(self, progress: Progress) -> None:
        """Note that the answer is complete."""
        if self._member.is_predicted:
            self._fleet.answered(self.route.slot, progress.request())

    def abort(self) -> None:
        """Ask the worker to stop; `release` is still due."""
        self._routed.abort()

    def release(self) -> None:
        """Release the reservation, take no more deltas, and release the request's other worker."""
        self.leg.ended_s = self._clock()
        self._routed.release()
        self._let_source_go()
        if self.decode is not None:
            self.decode.drop()

    def _let_source_go(self) -> None:
        source, self._source = self._source, None
        if source is not None:
            source.abort()


class DirectTokens:
    """Opens and closes one request's direct stream, and keeps its progress right. One event loop owns it."""

    def __init__(self, request_id: RequestId, interrupted: Interrupt) -> None:
        """Begin closed; `interrupted` is called once it is closed because the client has to be waited for, or is gone."""
        self.sink: DirectSink | None = None
        """Has the rule; None: there is none."""
        self._request_id = request_id
        self._interrupted = interrupted
        self._connection: Connection | None = None
        self._progress: Progress | None = None

    def open(self, attempt: WorkerAttempt | None, progress: Progress) -> None:
        """Take the way if it is there: the reader has all tokens so far, and the attempt is beyond its early steps."""
        if self.sink is None or attempt is None or attempt.early_steps or self._connection is not None:
            return
        rule = self.sink.open(self._interrupt)
        if rule is None:
            return
        connection, (stream, client) = attempt.connection, rule
        if connection.open_direct(self._request_id, stream, client):
            self._connection, self._progress = connection, progress
            progress.direct = _Counted(stream)

    def close(self) -> None:
        """Leave the way: what came by it counts, and what came and was not written is unread. Safe twice."""
        connection, self._connection = self._connection, None
        progress, self._progress = self._progress, None
        if connection is None or progress is None:
            return
        progress.direct = None
        taken = connection.close_direct(self._request_id)
        if taken is None:
            return
        progress.wrote(taken.written)
        if taken.ungranted:
            connection.grant(self._request_id, taken.ungranted)
        if taken.waiting:
            progress.add(Delta(request_id=self._request_id, token_ids=taken.waiting))

    def _interrupt(self, why: Hold | Exception) -> None:
        self.close()
        self._interrupted(why)


class _Counted:
    """The tokens of a direct stream since now."""

    __slots__ = ("_before", "_stream")

    def __init__(self, stream: DirectStream) -> None:
        self._stream = stream
        self._before = stream.tokens

    @property
    def tokens(self) -> int:
        return self._stream.tokens - self._before
