"""Where requests wait while every worker has enough to do, and how one of them is let through when one has not.

Nothing runs here: it looks, at most once a turn of the loop, after workers have reported or requests have ended, and
tells a request that it may go. The request's own reader then sends it.
"""

import asyncio
import math
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Protocol, Self

import numpy as np
from numpy.typing import NDArray

from penstock.core.errors import Overloaded, PenstockError
from penstock.core.types import Request
from penstock.router.config import HoldConfig
from penstock.router.fleet import Fleet
from penstock.router.hold import Held, HoldQueue
from penstock.router.metrics import RouterMetrics
from penstock.router.quote import Quote

_PAUSE_S = 0.02
"""After a look that found no room, the next comes this much later at the earliest: a price takes some 0.1 ms."""
_SOON_S = 0.1
"""A place in a batch that comes free by then is as good as free: the way there takes a part of that, and so that it is not
empty meanwhile. What waits in a worker cannot be overtaken."""
_LOOK_AGAIN_S = 1.0
"""Predictions also change by themselves, as answers turn out to be shorter; a look comes this often in any case."""


Lane = tuple[str, str | None, bool]
"""A model, an adapter of it or None, and whether it is prefill workers that are waited for."""


class Waiting(Protocol):
    """A request as its place sees it."""

    @property
    def request(self) -> Request: ...

    def quote(self) -> Quote | None:
        """Price it on the workers that may get it; None where there are none."""
        ...

    def wake(self) -> None:
        """Have its reader look at its place again."""
        ...


@dataclass(slots=True, eq=False)
class Place:
    """A request's place before the workers. `held` while it waits, `told` from its turn until it has been sent.

    `lane` is where it waits, or has waited; None before.
    """

    gate: "Gate"
    waiting: Waiting
    lane: Lane | None = None
    held: Held | None = None
    told: bool = False

    def stops(self, quote: Quote) -> bool:
        """Say whether the request has to wait, and have it wait if so; it is woken when it may go.

        Raises:
            Overloaded: too many wait already.
        """
        return self.gate.stops(self, quote)

    def leave(self) -> None:
        """Give it up, whatever it has come to. Safe twice."""
        self.gate.leave(self)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.leave()


class Gate:
    """Holds requests, a queue for each model and each LoRA adapter, and for those that go to prefill workers, as these differ.

    One event loop owns it.
    """

    def __init__(self, fleet: Fleet, config: HoldConfig, metrics: RouterMetrics) -> None:
        self._fleet = fleet
        self._config = config
        self._metrics = metrics
        self._queues: dict[Lane, HoldQueue] = {}
        self._places: dict[Held, Place] = {}
        self._told: dict[Lane, Place] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._next_s = 0.0
        self._look_s = 0.0
        self._listening = ExitStack()

    @property
    def num_held(self) -> int:
        """Count those that wait, and those told to go that have not gone yet."""
        return len(self._places) + len(self._told)

    def drain_s(self, now_s: float) -> float:
        """Predict how long those that wait now will take to leave; of several queues, the longest."""
        return max((queue.drain_s(now_s) for queue in self._queues.values()), default=0.0)

    def place(self, waiting: Waiting) -> Place:
        """Give a request a place; leave its context once it is sent or given up."""
        return Place(self, waiting)

    def stops(self, place: Place, quote: Quote) -> bool:
        """Say whether a request has to wait, and have it wait if so; it is woken when it may go.

        Raises:
            Overloaded: too many wait already.
        """
        if place.told or self._config.threshold_s is None or not quote.wait_terms:
            return False
        if place.held is not None:
            return True
        lane = _lane(quote)
        is_first = lane not in self._queues and lane not in self._told
        if is_first:  # what needs no look at all workers is nearly always enough
            begins_soon = not quote.hand_over and quote.begins_within(self._config.threshold_s)
            if begins_soon or self._room(quote).any():
                return False
        self._hold(place, quote)
        return True

    def _room(self, quote: Quote) -> NDArray[np.bool_]:
        """Say which of the workers that may get a request have room for it: also those that say that nobody waits there.

        So a worker that is faster than predicted is never left idle. Of a prompt that is to be handed over, none has any
        while no worker that answers has room for more.
        """
        threshold_s, context = self._config.threshold_s, quote.context
        assert threshold_s is not None, "asked for only where some are held"
        if quote.hand_over and not self._can_be_answered(quote, threshold_s):
            return np.zeros_like(context.eligible)
        room: NDArray[np.bool_] = quote.waits_s() <= threshold_s
        room &= context.place_wait_s() <= _SOON_S
        nobody_waits = context.waiting_requests == 0
        nobody_waits &= self._fleet.loads.unreported_requests < context.prices.prompts_at_once
        room |= nobody_waits
        room &= np.isfinite(quote.choice.prices())
        return room

    def _can_be_answered(self, quote: Quote, threshold_s: float) -> bool:
        """Say whether the workers that answer are to have a place soon enough, once those prompts have theirs that are being computed."""
        pool, loads, context = self._fleet.pools[quote.request.model], self._fleet.loads, quote.context
        ready = pool.ready
        if not pool.num_ready:
            return True
        places = float(context.prices.batch_requests[ready].sum())
        present = int((context.running_requests + context.waiting_requests)[ready].sum())
        coming = int(loads.own_requests[pool.ready_prefill].sum())
        answer_s = pool.traffic.mean_output_tokens * float(context.step_s()[ready].mean())
        return max(present + coming + 1 - places, 0.0) / places * answer_s <= threshold_s

    def leave(self, place: Place) -> None:
        """Give up a place, whatever it has come to. Safe twice."""
        lane, held = place.lane, place.held
        if lane is None:
            return
        if held is not None:
            self._queues[lane].discard(held)
            self._let_go(lane, place, held)
        if place.told:
            place.told = False
            del self._told[lane]
            if lane in self._queues:
                self._look_at(0.0)

    def check(self) -> None:
        """Raise AssertionError where queues and places disagree."""
        for lane, queue in self._queues.items():
            queue.check()
            assert len(queue), f"{lane}: a queue is kept without any request"
        assert sum(map(len, self._queues.values())) == len(self._places), "each that is held has a place"
        assert all(place.held is held and not place.told for held, place in self._places.items()), (
            "its own place"
        )
        assert all(place.told and place.held is None for place in self._told.values()), "told only once"
        assert all(place.lane == lane for lane, place in self._told.items()), "told in its own lane"
        listens = self._fleet.loads.listener is not None
        assert listens == bool(self._places), (
            f"{len(self._places)} are held, and load reports are heard: {listens}"
        )
        assert self._timer is not None or not self._places, (
            f"{len(self._places)} are held and nobody will look"
        )

    def _hold(self, place: Place, quote: Quote) -> None:
        lane, eligible = _lane(quote), quote.context.eligible
        held = Held(
            place.waiting.request,
            since_s=quote.context.now_s,
            work_s=float(quote.work_s()[eligible].min()),
            wait_s=float(quote.waits_s()[eligible].min()),
            share_s=quote.share_s(),
        )
        queue = self._queues.get(lane) or HoldQueue(self._config)
        try:
            queue.put(held)
        except Overloaded as error:
            self._metrics.hold_refusals.labels("tenant" if error.http_status == 429 else "full").inc()
            raise
        self._queues[lane] = queue
        place.lane, place.held = lane, held
        self._places[held] = place
        self._metrics.held_requests.set(len(self._places))
        if len(self._places) == 1:
            self._fleet.loads.listener = self._on_news
            self._listening.enter_context(self._fleet.news.telling(self._on_news))
        self._look_at(self._next_s)  # it may be the first in turn

    def _let_go(self, lane: Lane, place: Place, held: Held) -> None:
        """Note that a request does not wait any more; it has left its queue."""
        place.held = None
        del self._places[held]
        if not len(self._queues[lane]):
            del self._queues[lane]
        self._metrics.held_requests.set(len(self._places))
        self._metrics.held_s.observe(asyncio.get_running_loop().time() - held.since_s)
        if not self._places:
            self._fleet.loads.listener = None
            self._listening.close()
            if self._timer is not None:
                self._timer.cancel()
                self._timer = None

    def _on_news(self) -> None:
        self._look_at(self._next_s)

    def _look_at(self, time_s: float) -> None:
        """Look at this time, or in the next turn if it has passed."""
        loop = asyncio.get_running_loop()
        if self._timer is not None:
            if self._look_s <= time_s:
                return
            self._timer.cancel()
        self._look_s = max(time_s, loop.time())
        self._timer = loop.call_at(self._look_s, self._look)

    def _look(self) -> None:
        """Let one request of each queue go, if there is room."""
        self._timer = None
        now_s = asyncio.get_running_loop().time()
        for lane in tuple(self._queues):
            if lane not in self._told:
                self._let_one_through(lane, now_s)
        if self._places:
            self._next_s = now_s + _PAUSE_S
            self._look_at(now_s + _LOOK_AGAIN_S)

    def _let_one_through(self, lane: Lane, now_s: float) -> None:
        queue = self._queues[lane]
        held = self._next_of(queue)
        if held is None:
            return
        place = self._places[held]
        queue.take(held, now_s)
        self._let_go(lane, place, held)
        self._tell(lane, place)

    def _tell(self, lane: Lane, place: Place) -> None:
        place.told = True
        self._told[lane] = place
        place.waiting.wake()

    def _next_of(self, queue: HoldQueue) -> Held | None:
        """Choose who goes; where nobody may get it any more, the request's reader has to see to that.

        The first in turn says whether there is room at all, so that a large one does not wait for ever while small
        ones find some.
        """
        chosen, least = None, math.inf
        for held in queue.candidates():
            try:
                quote = self._places[held].waiting.quote()
            except PenstockError:
                quote = None
            if quote is None:
                return held
            room = self._room(quote)
            if not room.any():
                if chosen is None:
                    return None
                continue
            turn_s = queue.turn_s(held, float(quote.work_s()[room].min()))
            if turn_s < least:
                chosen, least = held, turn_s
        return chosen


def _lane(quote: Quote) -> Lane:
    return quote.request.model, quote.request.adapter, quote.hand_over
