"""Requests of one session stay with one worker, where that can take them."""

import math
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import ClassVar, NamedTuple

import numpy as np
from numpy.typing import NDArray

from penstock.core.ids import WorkerId
from penstock.seams import RoutingContext, RoutingPolicy

SESSIONS_MAX = 65_536
SESSION_IDLE_S = 1800.0


class _Place(NamedTuple):
    worker_id: WorkerId
    last_s: float


@dataclass(frozen=True, slots=True)
class SessionAffinity:
    """A session's worker first, then as another policy has it.

    A request without a session, with a new one, or with one whose worker is not eligible goes where `otherwise`
    sends it, and its session with it. Where prompts are computed apart, a session has a worker for these, too.
    A `seams.HistoryPolicy`; one event loop owns it.
    """

    name: ClassVar[str] = "session"
    otherwise: RoutingPolicy
    sessions_max: int = SESSIONS_MAX
    """Sessions remembered, those of prompts apart; past it the one unused for longest is forgotten."""
    idle_s: float = SESSION_IDLE_S
    """How long a session without requests is remembered."""
    _places: OrderedDict[tuple[str, bool], _Place] = field(default_factory=OrderedDict)  # latest used last

    def costs(self, context: RoutingContext) -> NDArray[np.float64]:
        costs = self.otherwise.costs(context)
        slot = self.slot_of(context)
        if slot is not None:
            lowest = float(costs.min())
            costs = costs.copy()
            costs[slot] = lowest - 1.0 if math.isfinite(lowest) else 0.0
        return costs

    def chosen(self, context: RoutingContext, slot: int) -> None:
        places = self._places
        while places and context.now_s - next(iter(places.values())).last_s > self.idle_s:
            places.popitem(last=False)
        if context.session is None:
            return
        key = context.session, context.prompt_only
        places[key] = _Place(WorkerId(int(context.worker_ids[slot])), context.now_s)
        places.move_to_end(key)
        if len(places) > self.sessions_max:
            places.popitem(last=False)

    def check(self) -> None:
        """Raise AssertionError where too much is kept, or in the wrong order."""
        assert len(self._places) <= self.sessions_max, f"{len(self._places)} sessions: past the bound"
        times = [place.last_s for place in self._places.values()]
        assert times == sorted(times), "sessions: the latest used last"

    def slot_of(self, context: RoutingContext) -> int | None:
        """Find the worker of the request's session, if it may get the request."""
        if context.session is None:
            return None
        place = self._places.get((context.session, context.prompt_only))
        if place is None or context.now_s - place.last_s > self.idle_s:
            return None
        found = np.flatnonzero(context.eligible & (context.worker_ids == place.worker_id))
        return int(found[0]) if len(found) else None
