"""One request from its first route to its end, whatever happens to its workers.

It has no task of its own: deltas are taken as they arrive, and everything that waits is done by its reader.
"""

import asyncio
import math
from contextlib import suppress
from types import TracebackType
from typing import Self

import msgspec

from penstock.core.errors import (
    Outrun,
    Overloaded,
    Parked,
    PenstockError,
    StepFailed,
    Unavailable,
    WorkerLost,
    from_info,
)
from penstock.core.types import Delta, FinishReason, KvHandle, Request
from penstock.core.wire import num_tokens
from penstock.router.attempt import Attempt
from penstock.router.gate import Place
from penstock.router.handed_over import HandedOver
from penstock.router.member import identity
from penstock.router.progress import Progress
from penstock.router.quote import Quote, Route
from penstock.router.relay import Relay
from penstock.router.setbacks import Setbacks, is_move
from penstock.router.shared import Shared
from penstock.router.siblings import Siblings


class OpenRequest:
    """A `seams.RequestStream`: enter it to send the request, iterate for deltas, leave it to cancel the rest.

    Deltas received while the reader was away come as one. The last has a `finish_reason`; any failure is one
    PenstockError after the deltas before it. One task reads it.
    """

    def __init__(self, shared: Shared, request: Request, siblings: Siblings) -> None:
        self.request = request
        self.siblings = siblings.joined(self)
        self._shared = shared
        self._loop = asyncio.get_running_loop()
        self._opened_s = self._loop.time()
        self._deadline_at_s = None if request.deadline_s is None else self._opened_s + request.deadline_s
        self._deadline_timer: asyncio.TimerHandle | None = None
        self._progress: Progress | None = None
        self._attempt: Attempt | None = None
        self._interruption: PenstockError | Relay | None = None  # why the last attempt ended early
        self._error: PenstockError | None = None
        self._finish_reason: FinishReason | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._relay = Relay(shared)
        self.hand_overs = 0  # times a worker computed its prompt for another one to go on with
        self._setbacks = Setbacks(request, shared.brakes)
        self._has_waited = False

    async def __aenter__(self) -> Self:
        """Send the request to a worker; waits for one where its model has none.

        Raises:
            Overloaded: too many requests are open, or no worker takes it.
            Unavailable: no worker came in time, or its content is in quarantine.
            RequestError: its id is in use, or it does not fit the model.
        """
        shared = self._shared
        try:
            shared.admit(self.request, self._opened_s)
        except PenstockError as error:
            shared.metrics.ended(error.code).inc()
            raise
        shared.requests[self.request.request_id] = self
        shared.metrics.open_requests.set(len(shared.requests))
        shared.brakes.budget.earn()
        shared.router.arrived(self.request.model)
        if self._deadline_at_s is not None:
            self._deadline_timer = self._loop.call_at(self._deadline_at_s, self._expire)
        try:
            await self._attempt_until_sent()
        except PenstockError as error:
            self.fail(error)
            self._leave()
            raise
        except BaseException:
            self._leave()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._leave()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Delta:
        while True:
            if self._progress is not None and self._progress.unread:
                return self._take(self._progress)
            if self._error is not None:
                raise self._error
            if self._finish_reason is not None:
                raise StopAsyncIteration
            if self._interruption is not None:
                interruption, self._interruption = self._interruption, None
                try:
                    await self._go_on_after(interruption)
                except PenstockError as error:
                    self.fail(error)
            else:
                self._waiter = self._loop.create_future()
                await self._waiter

    @property
    def migrations(self) -> int:
        """Times it went on elsewhere because its worker was lost."""
        return self._setbacks.migrations

    @property
    def prompt_tokens(self) -> int:
        """The true length of the prompt, however often the request moved."""
        return num_tokens(self.request.token_ids) - self.request.num_emitted

    @property
    def output_tokens(self) -> int:
        """Tokens received so far, those that came with the request included."""
        return self.request.num_emitted if self._progress is None else self._progress.output_tokens

    @property
    def cached_tokens(self) -> int:
        """Prompt tokens that the first worker had cached."""
        return 0 if self._progress is None else self._progress.cached_tokens or 0

    def fail(self, error: PenstockError) -> None:
        """End the request with this error, once its reader has taken what came before. The first error counts."""
        if self._error is None and self._finish_reason is None:
            self._error = error
            self._abort()
            self.wake()

    # -- DeltaHandler

    def on_delta(self, delta: Delta) -> None:
        attempt, progress = self._attempt, self._progress
        assert attempt is not None, "deltas come during an attempt only"
        assert progress is not None, "and there is progress since the first"
        if delta.token_ids:
            if attempt.early_steps:
                self._on_early_tokens(attempt, progress)
        elif delta.error is None and delta.finish_reason is None and delta.kv is None:
            attempt.has_begun = True
            if delta.cached_tokens is None:
                return
        if progress.cached_tokens is None and delta.cached_tokens is not None:
            attempt.compare(delta.cached_tokens, progress.block_size, self._shared.metrics)
        if delta.finish_reason is FinishReason.PREFILLED:
            progress.add(msgspec.structs.replace(delta, finish_reason=None, kv=None))
            self._hand_over(delta.kv)
            self.wake()
            return
        if delta.kv is not None:
            self._prefetch(delta.kv, progress.request())
            return
        progress.add(delta)
        if delta.error is not None:
            self._on_error(from_info(delta.error), attempt)
        elif delta.finish_reason is not None:
            self._finish(delta.finish_reason)
        self.wake()

    def on_lost(self, error: WorkerLost, *, alone: bool) -> None:
        attempt = self._attempt
        if attempt is not None:
            attempt.has_begun |= alone  # it was sent there, and nobody else was
            self._setbacks.on_loss(attempt.route.worker_id, is_suspect=attempt.is_early)
        self._release()
        self._interrupt(error)

    # -- the life of an attempt

    async def _attempt_until_sent(self) -> None:
        """Choose a worker and send the request there; wait while none has time, and where there is none."""
        route = self._relay.claim()
        if route is not None and self._send_by(route):
            return
        with self._shared.gate.place(self) as place:
            give_up_at_s: float | None = None
            while True:
                if self._error is not None:
                    raise self._error
                if self.siblings.must_wait(self):
                    await self._wait_until(math.inf)
                    continue
                quote = self.quote()
                if quote is not None:
                    if self._is_held(place, quote):
                        await self._wait_until(math.inf)
                        give_up_at_s = None
                    elif self._send_by(self._chosen(quote)):
                        self._has_waited |= place.told
                        return
                    continue
                place.leave()
                self._check_refusals()
                if give_up_at_s is None:
                    give_up_at_s = self._loop.time() + self._shared.config.no_worker_wait_s
                if self._loop.time() >= give_up_at_s:
                    raise self._shared.no_worker(self.request)
                with self._shared.fleet.news.telling(self.wake):
                    await self._wait_until(give_up_at_s)

    def quote(self) -> Quote | None:
        """Price the request on the workers that may get it; None where there are none.

        Raises:
            Unavailable: its model was replaced while it ran.
        """
        return self._quote(self._relay.handed)

    def _quote(self, handed: HandedOver | None) -> Quote | None:
        """Price it where a prefill worker hands it over; None: that is to be decided."""
        pool = self._shared.fleet.pools.get(self.request.model)
        if pool is None:
            return None
        if self._progress is None:
            self._progress = Progress(self.request, pool.card, self._shared.hash_key)
        elif identity(pool.card) != self._progress.identity:
            raise Unavailable(
                f"model {self.request.model} was replaced by one with other blocks while this request ran; send it again"
            )
        request, setbacks = self._progress.request_in_time(self._loop.time() - self._opened_s), self._setbacks
        exclude, beside = setbacks.avoided | setbacks.lost, self.siblings.place(self)
        quote = self._shared.router.quote(request, exclude, handed=handed, beside=beside)
        if quote is None and setbacks.lost:  # one that was lost and is back is better than none
            quote = self._shared.router.quote(request, setbacks.avoided, handed=handed)
        return quote

    def _is_held(self, place: Place, quote: Quote) -> bool:
        """Say whether it has to wait at the gate; what has begun, was refused or has waited does not wait again."""
        has_begun = self._has_waited or self._relay.handed is not None
        is_late = has_begun or self._setbacks.avoided or self._setbacks.lost or self.siblings.place(self)
        return not is_late and place.stops(quote)

    def _chosen(self, quote: Quote) -> Route:
        again, self._setbacks.was_outrun = self._setbacks.was_outrun, False
        return self._shared.router.take(quote, again=again)

    def _send_by(self, route: Route) -> bool:
        """Send the request where a route leads; False if that one does not take it."""
        try:
            self._send(route)
        except WorkerLost:
            self._setbacks.on_loss(route.worker_id, is_suspect=False)
        except Overloaded as error:
            self._setbacks.on_refusal(route.worker_id, error, self._loop.time())
        else:
            return True
        return False

    def _check_refusals(self) -> None:
        """Give up where every worker has refused."""
        refusal = self._setbacks.last_refusal
        if refusal is not None and self._shared.router.has_ready(self.request.model):
            raise Overloaded(
                f"model {self.request.model}: every worker that is ready has refused this request; the last one:"
                f" {refusal.message}",
                retry_after_s=refusal.retry_after_s or 1.0,
            )

    def _send(self, route: Route) -> None:
        assert self._progress is not None, "a route was made for it"
        remaining_s = None
        if self._deadline_at_s is not None:
            remaining_s = max(self._deadline_at_s - self._loop.time(), 0.0)
        known = self._shared.fleet.loads.peer_arrivals(route.slot)
        request = msgspec.structs.replace(
            self._progress.request(),
            deadline_s=remaining_s,
            expected_cached_tokens=route.cached_tokens,
            known_peer_arrivals=known if self._setbacks.may_be_outrun else None,
            hand_over=route.hand_over,
            kv=None if self._relay.handed is None else self._relay.handed.handle(self._loop.time()),
        )
        self._attempt = Attempt(self._shared.fleet, route, request, self)

    async def _go_on_after(self, interruption: PenstockError | Relay) -> None:
        """Take the request elsewhere, if it may."""
        now_s = self._loop.time()
        if is_move(interruption):
            delay_s = self._setbacks.migrate(interruption, now_s, self.output_tokens)
            with self._shared.metrics.migrating_requests.track_inprogress():
                await self._wait_until(now_s + delay_s)
        if self._setbacks.needs_probation:
            await self._enter_probation()
        await self._attempt_until_sent()

    async def _enter_probation(self) -> None:
        """Wait until no other suspect runs without having shown, by a token, that it does no harm."""
        while not self._shared.brakes.probation.enter(self, self.wake):
            if self._error is not None:
                raise self._error
            await self._wait_until(math.inf)

    # -- what happens to it

    def _on_early_tokens(self, attempt: Attempt, progress: Progress) -> None:
        """Note one of the first steps that give it tokens on this worker."""
        attempt.early_steps -= 1
        if not attempt.early_steps:
            self._shared.brakes.probation.leave(self)
            self._setbacks.on_progress()
        if attempt.has_tokens:
            return
        attempt.on_first_token()
        self.siblings.computed(self, attempt.route)
        # Until then it may have been for another one, should this not take it.
        self._relay.went_on(attempt.route.worker_id)
        if progress.output_tokens == self.request.num_emitted:
            self._shared.metrics.first_token_s.observe(self._loop.time() - self._opened_s)

    def _on_error(self, error: PenstockError, attempt: Attempt) -> None:
        """Handle the worker's own word that it will not go on."""
        self._release()
        if isinstance(error, Overloaded) and not attempt.has_tokens:
            try:
                self._setbacks.on_refusal(attempt.route.worker_id, error, self._loop.time())
            except Overloaded:
                self.fail(error)
            else:
                self._interrupt(error)
        elif isinstance(error, Outrun):
            self._setbacks.on_outrun()
            self._interrupt(error)
        elif isinstance(error, Parked):
            self._shared.metrics.parked.inc()
            self._interrupt(error)
        elif isinstance(error, (StepFailed, WorkerLost)):
            self._setbacks.on_loss(attempt.route.worker_id, is_suspect=attempt.is_early)
            self._interrupt(error)
        elif isinstance(error, Unavailable):
            self._setbacks.avoided.add(attempt.route.worker_id)
            self._interrupt(error)
        else:
            self.fail(error)

    def _prefetch(self, handle: KvHandle, request: Request) -> None:
        """Choose who goes on with a prompt that is being computed, and have that one read its KV from now on."""
        with suppress(PenstockError):  # it is but a hint
            growing = HandedOver(handle, self._loop.time(), worker_id=handle.producer, give_up=lambda: None)
            quote = self._quote(growing)
            if quote is not None:
                self._relay.prefetch(quote, request, handle)

    def _hand_over(self, handle: KvHandle | None) -> None:
        """Go on elsewhere: the prompt is computed, and its first token is here."""
        attempt = self._attempt
        assert attempt is not None, "it said so"
        self._release()
        self.hand_overs += 1
        self._relay.handed = HandedOver(
            handle, self._loop.time(), worker_id=attempt.route.worker_id, give_up=attempt.abort
        )
        if self._error is None:
            self._interruption = self._relay

    def _interrupt(self, error: PenstockError) -> None:
        if self.output_tokens >= self.request.sampling.max_tokens and self._progress is not None:
            self._progress.end(FinishReason.LENGTH)  # only the word that this was all got lost
            self._finish(FinishReason.LENGTH)
        elif self._error is None:
            self._interruption = error
            if is_move(error):
                self._setbacks.about_to_move()
                self.siblings.lost()
        self.wake()

    def _finish(self, reason: FinishReason) -> None:
        self._finish_reason = reason
        if self._attempt is not None and self._progress is not None:
            self._attempt.finish(self._progress)
        self._release()
        self._relay.end()
        if self._deadline_timer is not None:
            self._deadline_timer.cancel()

    def _expire(self) -> None:
        self.fail(self._shared.late(self.request, self.output_tokens))

    def _take(self, progress: Progress) -> Delta:
        before = progress.taken_tokens
        delta = progress.take()
        if self._attempt is not None:
            emitted = self.request.num_emitted
            self._attempt.grant(emitted + before, emitted + progress.taken_tokens)
        return delta

    # -- ends

    def _abort(self) -> None:
        if self._attempt is not None:
            self._attempt.abort()
            self._release()
        self._relay.end()

    def _release(self) -> None:
        attempt, self._attempt = self._attempt, None
        if attempt is not None:
            self._shared.brakes.probation.leave(self)
            attempt.release()

    def _leave(self) -> None:
        """Give everything back. Safe twice."""
        self._abort()
        self.siblings.leave(self)
        if self._deadline_timer is not None:
            self._deadline_timer.cancel()
        shared = self._shared
        shared.brakes.probation.leave(self)
        self._setbacks.about_to_move(is_expected=False)
        if shared.requests.pop(self.request.request_id, None) is None:
            return
        pool = shared.fleet.pools.get(self.request.model)
        if pool is not None and self._finish_reason is not None:
            pool.traffic.ended(self.output_tokens - self.request.num_emitted, self._loop.time())
        outcome = "cancelled" if self._finish_reason is None else self._finish_reason.value
        metrics = shared.metrics
        metrics.cached_tokens.inc(self.cached_tokens)
        metrics.ended(outcome if self._error is None else self._error.code).inc()
        metrics.request_s.observe(self._loop.time() - self._opened_s)
        metrics.open_requests.set(len(shared.requests))

    # -- waiting

    def wake(self) -> None:
        """Have the reader see what has happened."""
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def _wait_until(self, time_s: float) -> None:
        """Wait until this loop time, or until something happens to the request."""
        self._waiter = self._loop.create_future()
        timeout_s = None if time_s == math.inf else time_s - self._loop.time()
        await asyncio.wait((self._waiter,), timeout=timeout_s)
