"""One request from its first route to its end, over any number of workers.

It has no task of its own: deltas are taken as they arrive, and its reader does everything that waits.
"""

import asyncio
import math
from types import TracebackType
from typing import Protocol, Self

import msgspec

from penstock.core.errors import (
    Backlogged,
    Overloaded,
    Parked,
    PenstockError,
    StaleRoute,
    StepFailed,
    Unavailable,
    WorkerLost,
    from_info,
)
from penstock.core.ids import WorkerId
from penstock.core.types.requests import Delta, FinishReason, KvHandle, Request
from penstock.core.wire import num_tokens
from penstock.router.candidates import ScoredCandidates, WorkerRoute
from penstock.router.dispatch.attempt import DecodeSide, DirectTokens, WorkerAttempt
from penstock.router.dispatch.progress import DeltaReader, Progress, begun
from penstock.router.dispatch.state import DispatcherState, Journey, JourneyLog
from penstock.router.fleet.member import identity
from penstock.router.request_queue import Ticket
from penstock.router.retries import RetryState, is_move
from penstock.seams import DeltaSink, DirectSink


class _Waiting(Protocol):
    def wake(self) -> None: ...


class Siblings:
    """The open requests of one prompt. One event loop owns it.

    The first request is routed by the policy. The others wait for its first token and go to its worker, whose cache has the
    prompt. Afterwards each goes on alone. Where the first ends early or its worker is lost, the next becomes the first.
    """

    def __init__(self) -> None:
        """Have none yet."""
        self._members: list[_Waiting] = []
        self._first: _Waiting | None = None
        self._place: WorkerId | None = None  # where the prompt is computed, once it is
        self._answers: WorkerId | None = None  # of the latest first token

    def joined(self, request: _Waiting) -> Self:
        """Add a request."""
        self._members.append(request)
        return self

    def beside(self, request: _Waiting) -> "Siblings":
        """Give the group of one that is opened beside a request: this group, or if that has ended one that goes to its worker."""
        if request in self._members:
            return self
        group = Siblings()
        group._place = self._answers
        return group

    def leave(self, request: _Waiting) -> None:
        """Remove a request that has ended. Safe twice."""
        if request in self._members:
            self._members.remove(request)
            if self._first is request and self._place is None:
                self.lost()

    def must_wait(self, request: _Waiting) -> bool:
        """Say whether this request waits for another that computes the prompt; if none does, this one becomes the first."""
        if len(self._members) < 2:
            return False
        if self._first is None:
            self._first = request
        return self._first is not request and self._place is None

    def place(self, request: _Waiting) -> WorkerId | None:
        """Give the worker to follow; None for the first request, and until the prompt is computed."""
        return None if self._first is request else self._place

    def computed(self, request: _Waiting, worker_id: WorkerId) -> None:
        """Note the first token of a request, and the worker that answers it."""
        self._answers = worker_id
        if self._first is request and self._place is None:
            self._place = worker_id
            self._wake()

    def lost(self) -> None:
        """Follow no worker any more: a worker of these requests is lost."""
        self._first = self._place = None
        self._wake()

    def _wake(self) -> None:
        for member in self._members:
            member.wake()


_ROOM_WAIT_S = 1.0
"""How long a worker may read nothing of what was sent to it, until the next request goes elsewhere; its connection may last for longer."""


class OpenRequest:
    """A `seams.RequestStream`: enter it to send the request, `run` it or iterate for deltas, leave it to cancel the rest.

    Deltas received while the reader was away come merged. The last has a `finish_reason`; a failure is one PenstockError
    after the deltas before it. One task reads it.
    """

    def __init__(self, shared: DispatcherState, request: Request, siblings: Siblings) -> None:
        self.request = request
        self.siblings = siblings.joined(self)
        self._shared = shared
        self._loop = asyncio.get_running_loop()
        self._opened_s = self._loop.time()
        self._deadline_at_s = None if request.deadline_s is None else self._opened_s + request.deadline_s
        self._deadline_timer: asyncio.TimerHandle | None = None
        self._progress: Progress | None = None
        self._attempt: WorkerAttempt | None = None
        self._interruption: PenstockError | None = None  # why the last attempt ended early
        self._error: PenstockError | None = None
        self._finish_reason: FinishReason | None = None
        self._reader = DeltaReader()
        self._direct = DirectTokens(request.request_id, self._reader.interrupt)
        self.wake, self.stop = self._reader.wake, self._reader.stop
        self.kv_transfers = 0  # times its prompt was computed by a prefill worker
        self.waited_for_decode = False
        self._retry_state = RetryState(request, shared.retry_guard)
        self._has_waited = False
        self._decode_wait_s = 0.0  # how long it was queued while no decode worker had a batch slot
        self._way = JourneyLog(request, self._opened_s)

    async def __aenter__(self) -> Self:
        """Send the request to a worker; wait for one where its model has none.

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
        shared.retry_guard.budget.earn()
        shared.router.arrived(self.request)
        if self._deadline_at_s is not None:
            self._deadline_timer = self._loop.call_at(self._deadline_at_s, self._expire)
        try:
            await self._attempt_until_sent()
        except BaseException as error:
            if isinstance(error, PenstockError):
                self.fail(error)
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
        while self._progress is None or not self._progress.unread:
            if not await self._goes_on():
                raise StopAsyncIteration
        return self._take(self._progress)

    async def run(self, sink: DeltaSink, direct: DirectSink | None = None) -> None:
        self._direct.sink = direct
        with self._reader.taking(sink):
            self.pass_on()
            while await self._reader.settle() or await self._goes_on():
                self.pass_on()

    async def _goes_on(self) -> bool:
        """Wait until something came, or send the request again; False once it has ended. Raises the error that it failed with."""
        if self._reader.has_stopped:
            return False
        if self._error is not None:
            raise self._error
        if self._finish_reason is not None:
            return False
        if self._interruption is not None:
            interruption, self._interruption = self._interruption, None
            try:
                await self._go_on_after(interruption)
            except PenstockError as error:
                self.fail(error)
        else:
            await self._reader.wait()
        return True

    def pass_on(self) -> None:
        """Pass what is unread to the sink, if it takes."""
        progress, reader = self._progress, self._reader
        if progress is not None and progress.unread and reader.takes:
            reader.pass_on(self._take(progress))
            if reader.takes:
                self._direct.open(self._attempt, progress)

    @property
    def migrations(self) -> int:
        """Times it moved as its worker was lost."""
        return self._retry_state.migrations

    @property
    def prompt_tokens(self) -> int:
        """The length of the prompt alone, without tokens of earlier attempts."""
        return num_tokens(self.request.token_ids) - self.request.num_emitted

    @property
    def output_tokens(self) -> int:
        """Output tokens so far, including those that came with the request."""
        return self.request.num_emitted if self._progress is None else self._progress.output_tokens

    @property
    def cached_tokens(self) -> int:
        """Prompt tokens that the first worker had cached."""
        return 0 if self._progress is None else self._progress.cached_tokens or 0

    def journey(self, outcome: str | None = None) -> Journey:
        """Describe its way so far; with an `outcome`, that ends now."""
        return self._way.journey(self._loop.time(), outcome, self._progress, self.migrations)

    def fail(self, error: PenstockError) -> None:
        """End the request with this error, after the deltas before it. The first error counts."""
        if self._error is None and self._finish_reason is None:
            self._error = error
            self._abort()
            self.wake()

    def on_delta(self, delta: Delta) -> None:
        self._direct.close()
        attempt, progress = self._attempt, self._progress
        assert attempt is not None, "deltas come during an attempt only"
        assert progress is not None, "and there is progress since the first"
        if delta.token_ids:
            if attempt.early_steps:
                self._on_early_tokens(attempt, progress)
        elif delta.error is None and delta.finish_reason is None and delta.kv is None:
            attempt.has_begun = True
            if delta.cached_tokens is None and not delta.prompt_logprobs:
                return
        if progress.cached_tokens is None and delta.cached_tokens is not None:
            attempt.compare(delta.cached_tokens, progress.block_size, self._shared.metrics)
        if delta.finish_reason is FinishReason.PREFILLED:
            progress.add(msgspec.structs.replace(delta, finish_reason=None, kv=None))
            self._go_on_decoding(attempt, progress, delta.kv)
            self.wake()
            return
        progress.add(delta)
        if delta.error is not None:
            self._on_error(from_info(delta.error), attempt)
        elif delta.finish_reason is not None:
            self._finish(delta.finish_reason)
        elif self._reader.takes:
            self._shared.readable.add(self)
            return
        self.wake()

    def on_lost(self, error: WorkerLost, *, alone: bool) -> None:
        attempt = self._attempt
        if attempt is not None:
            attempt.has_begun |= alone  # no other request was there
            self._retry_state.on_loss(attempt.route.worker_id, error, suspect_at=attempt.suspect_at)
        self._release()
        self._interrupt(error)

    async def _attempt_until_sent(self) -> None:
        """Choose workers and send the request; wait in the queue while all are busy, and for a worker where there is none."""
        with self._shared.request_queue.ticket(self) as ticket:
            give_up_at_s: float | None = None
            while True:
                if self._error is not None:
                    raise self._error
                if self.siblings.must_wait(self):
                    await self._reader.wait_until(math.inf)
                    continue
                candidates = self.score()
                if candidates is not None:
                    if self._is_queued(ticket, candidates):
                        await self._reader.wait_until(math.inf)
                        give_up_at_s = None
                    elif await self._send_by(candidates):
                        self._has_waited |= ticket.released
                        self._decode_wait_s += ticket.decode_wait_s
                        return
                    continue
                self._shared.request_queue.leave(ticket)
                self._shared.check_refusals(self.request, self._retry_state.last_refusal)
                if give_up_at_s is None:
                    give_up_at_s = self._loop.time() + self._shared.config.no_worker_wait_s
                if self._loop.time() >= give_up_at_s:
                    raise self._shared.no_worker(self.request, self._retry_state.last_problem)
                with self._shared.fleet.changes.telling(self.wake):
                    await self._reader.wait_until(give_up_at_s)

    def score(self) -> ScoredCandidates | None:
        """Price the request on the workers that may get it; None where there are none.

        Raises:
            Unavailable: its model was replaced while it ran.
        """
        candidates, retry_state = self._score_elsewhere(), self._retry_state
        if candidates is None and retry_state.lost and self._progress is not None:
            request = self._progress.request_in_time(self._loop.time() - self._opened_s)
            candidates = self._shared.router.score(
                request, retry_state.avoided
            )  # a lost worker that is back is better than none
        return candidates

    def _score_elsewhere(self) -> ScoredCandidates | None:
        """Price the request on the workers that may get it and have not failed it; None where there are none.

        Raises:
            Unavailable: its model was replaced while it ran.
        """
        pool = self._shared.fleet.pools.get(self.request.model)
        if pool is None:
            return None
        if self._progress is None or identity(pool.card) != self._progress.identity:
            self._progress = begun(self.request, self._progress, pool, self._shared.hash_key)
        request = self._progress.request_in_time(self._loop.time() - self._opened_s)
        retry_state = self._retry_state
        lost = self._shared.fleet.ranks.beside(retry_state.lost)  # ranks of one engine are lost together
        exclude, beside = retry_state.avoided | lost, self.siblings.place(self)
        return self._shared.router.score(request, exclude, beside=beside)

    def _is_queued(self, ticket: Ticket, candidates: ScoredCandidates) -> bool:
        """Say whether it waits in the request queue. A request that has tokens, was refused or has waited does not wait again."""
        has_begun = self._has_waited or self.output_tokens > self.request.num_emitted
        state = self._retry_state
        is_late = has_begun or state.avoided or state.lost or self.siblings.place(self)
        return not is_late and self._shared.request_queue.stops(ticket, candidates)

    async def _send_by(self, candidates: ScoredCandidates) -> bool:
        """Send the request to the cheapest candidates; False if it was not sent: a worker refuses it, or had to read others first."""
        again, self._retry_state.was_stale = self._retry_state.was_stale, False
        plan = self._shared.router.take(candidates, again=again)
        assert self._progress is not None, "a plan was made for it"
        request, route, decode = self._progress.request(), plan.decode, None
        try:
            if plan.prefill is not None:
                if request.sampling.max_tokens > request.num_emitted + 1:  # else it ends with its first token
                    decode = DecodeSide(self._shared, plan.decode, plan.prefill, request)
                route = plan.prefill
            self._send(route, decode)
        except WorkerLost as error:
            self._retry_state.on_loss(route.worker_id, error, suspect_at=None)
        except Backlogged as error:
            self._retry_state.was_stale = True
            error.tell(self.wake)
            give_up_at_s = self._loop.time() + _ROOM_WAIT_S
            await self._reader.wait_until(give_up_at_s)
            if self._loop.time() >= give_up_at_s:
                self._retry_state.on_refusal(route.worker_id, error, give_up_at_s)
        except Overloaded as error:
            self._retry_state.on_refusal(route.worker_id, error, self._loop.time())
        else:
            return True
        return False

    def _send(self, route: WorkerRoute, decode: DecodeSide | None) -> None:
        """Send the request, or its prompt alone where a decode worker goes on."""
        assert self._progress is not None, "a plan was made for it"
        known = self._shared.fleet.loads.peer_arrivals(route.slot)
        request = msgspec.structs.replace(
            self._progress.request(),
            deadline_s=self._remaining_s(),
            expected_cached_tokens=route.cached_tokens,
            known_peer_arrivals=known if self._retry_state.may_be_stale else None,
            prefill_only=decode is not None,
            transfer_id=b"" if decode is None else decode.transfer_id,
        )
        try:
            self._attempt = WorkerAttempt(self._shared.fleet, route, request, self, decode=decode)
        except PenstockError:
            if decode is not None:
                decode.drop()
            raise
        self._way.add(self._attempt.leg)

    def _remaining_s(self) -> float | None:
        return None if self._deadline_at_s is None else max(self._deadline_at_s - self._loop.time(), 0.0)

    async def _go_on_after(self, interruption: PenstockError) -> None:
        """Send the request to another worker, if it may be retried."""
        now_s = self._loop.time()
        if is_move(interruption):
            delay_s = self._retry_state.migrate(
                interruption, now_s, self.output_tokens, is_elsewhere=self._score_elsewhere() is not None
            )
            with self._shared.metrics.migrating_requests.track_inprogress():
                await self._reader.wait_until(now_s + delay_s)
        if self._retry_state.needs_isolation:
            await self._isolate()
        await self._attempt_until_sent()

    async def _isolate(self) -> None:
        """Wait until no other suspected request runs without tokens."""
        while not self._shared.retry_guard.isolation.enter(self, self.wake):
            if self._error is not None:
                raise self._error
            await self._reader.wait_until(math.inf)

    def _on_early_tokens(self, attempt: WorkerAttempt, progress: Progress) -> None:
        """Note one of the first steps with tokens on this worker."""
        attempt.on_step()
        if not attempt.early_steps:
            self._shared.retry_guard.isolation.leave(self)
            self._retry_state.on_progress()
        if attempt.has_tokens:
            return
        attempt.on_first_token()
        if attempt.decode is None:
            self.siblings.computed(self, attempt.route.worker_id)
        if progress.output_tokens == self.request.num_emitted:
            ttft_s = self._loop.time() - self._opened_s
            self._shared.metrics.first_token_s.observe(ttft_s)
            self.waited_for_decode = attempt.is_at_decode_worker or 2 * self._decode_wait_s > ttft_s

    def _on_error(self, error: PenstockError, attempt: WorkerAttempt) -> None:
        """Handle an error that the worker sent."""
        self._release()
        retry_state, worker_id = self._retry_state, attempt.route.worker_id
        try:
            if isinstance(error, Overloaded) and not attempt.has_tokens:
                retry_state.on_refusal(worker_id, error, self._loop.time())
            elif isinstance(error, StaleRoute):
                retry_state.on_stale_route()
            elif isinstance(error, Parked):
                self._shared.metrics.parked.inc()
            elif isinstance(error, (StepFailed, WorkerLost)):
                retry_state.on_loss(worker_id, error, suspect_at=attempt.suspect_at)
            elif isinstance(error, Unavailable):
                has_begun = self.output_tokens > self.request.num_emitted
                retry_state.on_unavailable(worker_id, error, has_begun=has_begun)
            else:
                self.fail(error)
                return
        except (Overloaded, Unavailable) as last:
            self.fail(last)
        else:
            self._interrupt(error)

    def _go_on_decoding(self, attempt: WorkerAttempt, progress: Progress, handle: KvHandle | None) -> None:
        """Go on at the decode worker with the first token of the prefill worker. Where the decode worker refuses, plan anew."""
        self.kv_transfers += 1
        self._attempt = None
        self._shared.retry_guard.isolation.leave(self)
        assert attempt.decode is not None, "its prompt is computed for a decode worker"
        decode_id = attempt.decode.route.worker_id
        request = msgspec.structs.replace(progress.request(), deadline_s=self._remaining_s())
        try:
            self._attempt = attempt.prefilled(request, handle, self)
            self._way.add(self._attempt.leg)
        except (WorkerLost, Overloaded) as error:
            state = self._retry_state
            if not isinstance(error, Backlogged):
                (state.lost if isinstance(error, WorkerLost) else state.avoided).add(decode_id)
            self._interrupt(StaleRoute(error.message))
        except PenstockError as error:
            self.fail(error)

    def _interrupt(self, error: PenstockError) -> None:
        if self.output_tokens >= self.request.sampling.max_tokens and self._progress is not None:
            self._progress.end(FinishReason.LENGTH)  # all tokens are here; only the end was lost
            self._finish(FinishReason.LENGTH)
        elif self._error is None:
            self._interruption = error
            if is_move(error):
                self._retry_state.about_to_move()
                self.siblings.lost()
        self.wake()

    def _finish(self, reason: FinishReason) -> None:
        self._finish_reason = reason
        if self._attempt is not None and self._progress is not None:
            self._attempt.finish(self._progress)
        self._release()
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

    def _abort(self) -> None:
        if self._attempt is not None:
            self._attempt.abort()
            self._release()

    def _release(self) -> None:
        self._direct.close()
        attempt, self._attempt = self._attempt, None
        if attempt is not None:
            self._shared.retry_guard.isolation.leave(self)
            attempt.release()

    def _leave(self) -> None:
        """Release everything. Safe twice."""
        self._abort()
        self.siblings.leave(self)
        if self._deadline_timer is not None:
            self._deadline_timer.cancel()
        shared = self._shared
        shared.retry_guard.isolation.leave(self)
        self._retry_state.about_to_move(is_expected=False)
        if shared.requests.pop(self.request.request_id, None) is None:
            return
        outcome = "cancelled" if self._finish_reason is None else self._finish_reason.value
        journey = self.journey(outcome if self._error is None else self._error.code)
        shared.ended(self.request, journey, self._loop.time(), is_whole=self._finish_reason is not None)
