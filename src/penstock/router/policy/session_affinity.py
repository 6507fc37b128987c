"""Requests of one session stay with one worker, where that can take them."""

from collections import OrderedDict
from dataclasses import dataclass, field
from typing import ClassVar, NamedTuple

import numpy as np
from numpy.typing import NDArray

from penstock.core.ids import WorkerId
from penstock.router.policy.predicted_seconds import PredictedSeconds
from penstock.seams import RoutingContext

SESSIONS_MAX = 65_536
SESSION_IDLE_S = 1800.0
_DEARER_S = 1e-3
"""By how much others cost more than a session's worker, at least."""


class _Place(NamedTuple):
    worker_id: WorkerId
    last_s: float


@dataclass(frozen=True, slots=True)
class SessionAffinity:
    """A session's worker first, then as `kv` has it.

    A request without a session, with a new one, or with one whose worker is not eligible goes where `kv`
    sends it, and its session with it. Where prompts are computed apart, a session has a worker for these, too.
    What its worker costs stays as `kv` has it, so that waits, hand-overs and explanations are those of `kv`: the term
    `session` makes all others dearer. A `seams.HistoryPolicy`; one event loop owns it.
    """

    name: ClassVar[str] = "session"
    term_names: ClassVar[tuple[str, ...]] = (*PredictedSeconds.term_names, "session")
    otherwise: PredictedSeconds = field(default_factory=PredictedSeconds)
    sessions_max: int = SESSIONS_MAX
    """Sessions remembered, those of prompts apart; past it the one unused for longest is forgotten."""
    idle_s: float = SESSION_IDLE_S
    """How long a session without requests is remembered."""
    _places: OrderedDict[tuple[str, bool], _Place] = field(default_factory=OrderedDict)  # latest used last

    def costs(self, context: RoutingContext) -> NDArray[np.float64]:
        """Return (num_slots,) seconds."""
        costs: NDArray[np.float64] = self.terms(context).sum(axis=0)
        return costs

    def terms(self, context: RoutingContext) -> NDArray[np.float64]:
        """Return (num_terms, num_slots) seconds, named by `term_names`."""
        terms = self.otherwise.terms(context)
        session = np.zeros((1, terms.shape[1]))
        slot = self.slot_of(context)
        if slot is not None:
            costs = terms.sum(axis=0)
            session[0] = np.maximum(costs[slot] - costs, 0.0) + _DEARER_S
            session[0, slot] = 0.0
        return np.concatenate((terms, session))

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
