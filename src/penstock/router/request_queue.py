"""The router's request queue: requests wait here while every worker is busy, and leave when a worker has capacity.

The queue runs no task of its own. After load reports and ended requests it looks at most once per turn of the loop, releases
a ticket, and wakes the request's reader, which sends the request.
"""

import asyncio
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import islice
from types import TracebackType
from typing import Protocol, Self

import numpy as np
from numpy.typing import NDArray

from penstock.core.errors import Overloaded, PenstockError
from penstock.core.types.requests import Request
from penstock.router.candidates import ScoredCandidates
from penstock.router.config import QueueConfig
from penstock.router.fair_queue import FairQueue, QueuedRequest
from penstock.router.fleet.fleet import Fleet
from penstock.router.metrics import RouterMetrics

LATELY_S = 3600.0


class ActiveTenants:
    """Remembers the latest tenant, and when another one was last seen. One event loop owns it."""

    __slots__ = ("_latest", "_other_s", "_seen_s")

    def __init__(self) -> None:
        self._latest: str | None = None
        self._seen_s = -math.inf
        self._other_s = -math.inf

    def seen(self, tenant: str, now_s: float) -> None:
        """Note a request."""
        if tenant != self._latest:
            self._other_s = self._seen_s
            self._latest = tenant
        self._seen_s = now_s

    def are_several(self, now_s: float) -> bool:
        """Say whether at least two tenants have sent requests in the last `LATELY_S` seconds."""
        return now_s - self._other_s <= LATELY_S


class DecodeWait:
    """Adds up the time in which no decode worker had a batch slot for prompts of prefill workers. The caller gives the times."""

    def __init__(self) -> None:
        """Begin at 0."""
        self._total_s = 0.0
        self._since_s: float | None = None

    def note(self, now_s: float, *, is_full: bool) -> None:
        """Note whether decode workers are full from now on."""
        self._total_s = self.total_s(now_s)
        self._since_s = now_s if is_full else None

    def total_s(self, now_s: float) -> float:
        """Give the seconds so far."""
        return self._total_s if self._since_s is None else self._total_s + now_s - self._since_s


_PAUSE_S = 0.02
"""After a look that found no room, the next look comes at least this much later: pricing a request takes some 0.1 ms."""
_SOON_S = 0.1
"""A batch slot that comes free within this time counts as free, so that the slot is not empty while the request travels.
Requests that wait inside a worker cannot be overtaken."""
_LOOK_AGAIN_S = 1.0
"""Predictions also change by themselves, as answers turn out shorter. So a look comes at least this often."""
_QUEUE_KEYS_LOOKED_AT_MAX = 16
"""Queue keys of a model that one look prices, in order of turn. Most share their workers; the first that finds no room ends the look."""


class WaitingRequest(Protocol):
    """A request as its ticket sees it."""

    @property
    def request(self) -> Request: ...

    def score(self) -> ScoredCandidates | None:
        """Price it on the workers that may get it; None where there are none."""
        ...

    def wake(self) -> None:
        """Wake its reader, which looks at the ticket again."""
        ...


@dataclass(slots=True, eq=False)
class Ticket:
    """A request's ticket: `queued` while the request waits, `released` from its turn until it is sent.

    `model` names the queue; None until the request has waited. `decode_wait_s` is how long no decode worker had a batch slot
    while the request was queued, once it has left the queue.
    """

    waiting: WaitingRequest
    leave: "Callable[[Ticket], None]"
    model: str | None = None
    queued: QueuedRequest | None = None
    released: bool = False
    decode_wait_s: float = 0.0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.leave(self)


class RequestQueue:
    """One fair queue for each model, since models share no workers. One event loop owns it."""

    def __init__(self, fleet: Fleet, config: QueueConfig, metrics: RouterMetrics) -> None:
        self._fleet = fleet
        self._config = config
        self._metrics = metrics
        self._queues: dict[str, FairQueue] = {}
        self._tickets: dict[QueuedRequest, Ticket] = {}
        self._released: dict[str, Ticket] = {}
        self._decode_waits: dict[str, DecodeWait] = {}
        self._tenants = ActiveTenants()
        self._timer: asyncio.TimerHandle | None = None
        self._next_s = 0.0
        self._look_s = 0.0
        self._listening = ExitStack()

    @property
    def num_queued(self) -> int:
        """Count queued requests, and released ones that have not been sent yet."""
        return len(self._tickets) + len(self._released)

    def num_queued_for(self, model: str) -> int:
        """Requests of one model that wait."""
        return len(self._queues.get(model, ()))

    def oldest_wait_s(self, now_s: float) -> float:
        """Give the seconds that the oldest queued request has waited; 0 without any."""
        oldest = next(iter(self._tickets), None)
        return 0.0 if oldest is None else max(0.0, now_s - oldest.since_s)

    def drain_s(self, now_s: float) -> float:
        """Predict the seconds until all queued requests have left; of several queues, the longest."""
        return max((queue.drain_s(now_s) for queue in self._queues.values()), default=0.0)

    def ticket(self, waiting: WaitingRequest) -> Ticket:
        """Give a request a ticket; leave its context once the request is sent or given up."""
        return Ticket(waiting, self.leave)

    def stops(self, ticket: Ticket, candidates: ScoredCandidates) -> bool:
        """Queue a request if it has to wait, and say whether it does; it is woken when it may go.

        Raises:
            Overloaded: too many wait already.
        """
        if ticket.released or self._config.threshold_s is None or not candidates.wait_terms:
            return False
        if ticket.queued is not None:
            return True
        model, now_s = candidates.request.model, candidates.context.now_s
        self._tenants.seen(candidates.request.tenant, now_s)
        if model not in self._queues and model not in self._released:
            # the chosen worker alone nearly always decides
            begins_soon = not candidates.is_disaggregated and candidates.begins_within(
                self._threshold_s(now_s)
            )
            if begins_soon or self._room(candidates).any():
                return False
        self._enqueue(ticket, candidates)
        return True

    def _room(self, candidates: ScoredCandidates, *, overtakes: bool = False) -> NDArray[np.bool_]:
        """Mask (num_slots,) the eligible workers with room for a request.

        A worker has room within the threshold, or where its report says that no request waits there: so a worker that is faster
        than predicted is never idle. With several tenants a worker must also have fewer of this router's prompts than it computes at
        once, unless the request `overtakes` them; other routers' do not count, since these might send the next one for ever. Prefill workers have no room while no decode worker has.
        """
        context = candidates.context
        threshold_s = self._threshold_s(context.now_s)
        if candidates.is_disaggregated:
            is_full = not self._can_be_answered(candidates, threshold_s)
            if decode_wait := self._decode_waits.get(candidates.request.model):
                decode_wait.note(context.now_s, is_full=is_full)
            if is_full:
                return np.zeros_like(context.eligible)
        room: NDArray[np.bool_] = candidates.waits_s() <= threshold_s
        room &= context.batch_wait_s() <= _SOON_S
        prompts_at_once = context.prices.prompts_at_once
        nobody_waits = context.waiting_requests == 0
        nobody_waits &= self._fleet.loads.unreported_requests < prompts_at_once
        if self._tenants.are_several(context.now_s):
            nobody_waits &= self._fleet.loads.own_prompts < prompts_at_once
        room |= nobody_waits
        if overtakes:
            room |= self._room_beside(candidates, threshold_s)
        room &= np.isfinite(candidates.choice.prices())
        return room

    def _room_beside(self, candidates: ScoredCandidates, threshold_s: float) -> NDArray[np.bool_]:
        """Mask (num_slots,) the workers with other tenants' prompts, as many as they compute at once: the request overtakes these."""
        context, (_, memory) = candidates.context, candidates.wait_terms
        room = self._fleet.loads.has_room_beside_others(
            candidates.request.tenant, context.prices.prompts_at_once
        )
        room &= self._fleet.pools[candidates.request.model].prices.interleaves_tenants
        room &= context.batch_wait_s() <= _SOON_S
        room &= candidates.choice.terms[memory] <= threshold_s
        return room

    def _threshold_s(self, now_s: float) -> float:
        """Give how long a request may wait inside a worker: shorter while there is another tenant, who cannot overtake it there."""
        config = self._config
        assert config.threshold_s is not None, "asked only where requests are queued"
        if self._tenants.are_several(now_s):
            return min(config.threshold_s, config.shared_threshold_s)
        return config.threshold_s

    def _can_be_answered(self, candidates: ScoredCandidates, threshold_s: float) -> bool:
        """Say whether decode workers will have a batch slot soon enough; prompts under way have theirs there already."""
        pool, context = self._fleet.pools[candidates.request.model], candidates.context
        ready = pool.ready
        if not pool.has_ready:
            return True
        places = float(context.prices.batch_requests[ready].sum())
        present = int((context.running_requests + context.waiting_requests)[ready].sum())
        answer_s = pool.traffic.mean_output_tokens * float(context.step_s()[ready].mean())
        return max(present + 1 - places, 0.0) / places * answer_s <= threshold_s

    def leave(self, ticket: Ticket) -> None:
        """Give up a ticket, queued or released. Safe twice."""
        model, queued = ticket.model, ticket.queued
        if model is None:
            return
        if queued is not None:
            self._queues[model].discard(queued)
            self._leave_queue(model, ticket, queued)
        if ticket.released:
            ticket.released = False
            del self._released[model]
            if model in self._queues:
                self._look_at(0.0)

    def check(self) -> None:
        """Raise AssertionError where queues and places disagree."""
        for model, queue in self._queues.items():
            queue.check()
            assert len(queue), f"{model}: a queue is kept without any request"
        assert self._decode_waits.keys() == self._queues.keys(), "decode waits: one for each queue"
        assert sum(map(len, self._queues.values())) == len(self._tickets), "each queued request has a ticket"
        assert all(
            ticket.queued is queued and not ticket.released for queued, ticket in self._tickets.items()
        ), "its own ticket"
        assert all(ticket.released and ticket.queued is None for ticket in self._released.values()), (
            "released only once"
        )
        assert all(ticket.model == model for model, ticket in self._released.items()), (
            "released for its own model"
        )
        listens = self._fleet.loads.listener is not None
        assert listens == bool(self._tickets), (
            f"{len(self._tickets)} are queued, and load reports are heard: {listens}"
        )
        assert self._timer is not None or not self._tickets, (
            f"{len(self._tickets)} are queued, and no look is planned"
        )

    def _enqueue(self, ticket: Ticket, candidates: ScoredCandidates) -> None:
        request, eligible = candidates.request, candidates.context.eligible
        queued = QueuedRequest(
            ticket.waiting.request,
            queue_key=(request.adapter, candidates.is_disaggregated),
            since_s=candidates.context.now_s,
            work_s=float(candidates.work_s()[eligible].min()),
            wait_s=float(candidates.waits_s()[eligible].min()),
            share_s=candidates.share_s(),
        )
        queue = self._queues.get(request.model) or FairQueue(self._config, self._sent_tokens(request.model))
        is_new_key = queued.queue_key not in queue.queue_keys
        try:
            queue.put(queued)
        except Overloaded as error:
            self._metrics.queue_refusals.labels("tenant" if error.http_status == 429 else "full").inc()
            raise
        self._queues[request.model] = queue
        decode_wait = self._decode_waits.setdefault(request.model, DecodeWait())
        ticket.decode_wait_s = -decode_wait.total_s(queued.since_s)
        ticket.model, ticket.queued = request.model, queued
        self._tickets[queued] = ticket
        self._metrics.queued_requests.set(len(self._tickets))
        if len(self._tickets) == 1:
            self._fleet.loads.listener = self._on_change
            self._listening.enter_context(self._fleet.changes.telling(self._on_change))
        # It may be the first in turn, and the first for its workers.
        is_other = is_new_key and 1 < len(queue.queue_keys) <= _QUEUE_KEYS_LOOKED_AT_MAX
        self._look_at(0.0 if is_other or queue.is_behind(queued) else self._next_s)

    def _sent_tokens(self, model: str) -> Mapping[str, int]:
        """Give each tenant's prompt tokens that the model's workers have still to compute."""
        pool = self._fleet.pools[model]
        return self._fleet.loads.tokens_by_tenant(pool.ready | pool.ready_prefill)

    def _leave_queue(self, model: str, ticket: Ticket, queued: QueuedRequest) -> None:
        """Note that a request has left its queue."""
        ticket.queued = None
        del self._tickets[queued]
        now_s = asyncio.get_running_loop().time()
        ticket.decode_wait_s += self._decode_waits[model].total_s(now_s)
        if not len(self._queues[model]):
            del self._queues[model], self._decode_waits[model]
        self._metrics.queued_requests.set(len(self._tickets))
        self._metrics.queued_s.observe(now_s - queued.since_s)
        if not self._tickets:
            self._fleet.loads.listener = None
            self._listening.close()
            if self._timer is not None:
                self._timer.cancel()
                self._timer = None

    def _on_change(self) -> None:
        self._look_at(self._next_s)

    def _look_at(self, time_s: float) -> None:
        """Look at this time, or in the loop's next turn where the time has passed."""
        loop = asyncio.get_running_loop()
        if self._timer is not None:
            if self._look_s <= time_s:
                return
            self._timer.cancel()
        self._look_s = max(time_s, loop.time())
        self._timer = loop.call_at(self._look_s, self._look)

    def _look(self) -> None:
        """Release one request of each queue if there is room."""
        self._timer = None
        now_s = asyncio.get_running_loop().time()
        for model in tuple(self._queues):
            if model not in self._released:
                self._release_one(model, now_s)
        if self._tickets:
            self._next_s = now_s + _PAUSE_S
            self._look_at(now_s + _LOOK_AGAIN_S)

    def _release_one(self, model: str, now_s: float) -> None:
        """Release the first request that finds room; one at a time, so that the next one is priced with it on its worker.

        The workers of a queue key without room stay reserved for it: nobody later in turn goes there, so that a large request does not wait
        for ever behind small ones.
        """
        queue, pool = self._queues[model], self._fleet.pools.get(model)
        kept: NDArray[np.bool_] | None = None
        for candidates in islice(queue.heads(), _QUEUE_KEYS_LOOKED_AT_MAX):
            queued, eligible = self._next_of(queue, candidates, kept)
            if queued is not None:
                ticket = self._tickets[queued]
                queue.take(queued, now_s)
                self._leave_queue(model, ticket, queued)
                self._tell(model, ticket)
                return
            kept = eligible if kept is None else kept | eligible
            if pool is None or bool(kept[pool.ready | pool.ready_prefill].all()):
                return

    def _tell(self, model: str, ticket: Ticket) -> None:
        ticket.released = True
        self._released[model] = ticket
        ticket.waiting.wake()

    def _next_of(
        self, queue: FairQueue, in_turn: Sequence[QueuedRequest], kept: NDArray[np.bool_] | None
    ) -> tuple[QueuedRequest | None, NDArray[np.bool_]]:
        """Choose the request of a queue key to release, and give (num_slots,) the workers that its first may go to.

        A request without any eligible worker is released for its reader to handle. None is unless the first in turn has room.
        `kept` are workers that others before it wait for.
        """
        chosen, least, eligible = None, math.inf, np.zeros(0, dtype=np.bool_)
        for queued in in_turn:
            try:
                candidates = self._tickets[queued].waiting.score()
            except PenstockError:
                candidates = None
            if candidates is None:
                return queued, eligible
            if queued is in_turn[0]:
                eligible = candidates.context.eligible
            room = self._room(candidates, overtakes=queue.is_behind(queued))
            if kept is not None:
                room &= ~kept
            if not room.any():
                if chosen is None:
                    return None, eligible
                continue
            turn_s = queue.turn_s(queued, float(candidates.work_s()[room].min()))
            if turn_s < least:
                chosen, least = queued, turn_s
        return chosen, eligible
