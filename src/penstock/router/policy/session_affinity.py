"""The `session` policy: requests of one session stay with one worker while it is eligible."""

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
"""How much dearer than the session's worker all others are, at least."""


class _Place(NamedTuple):
    worker_id: WorkerId
    last_s: float


@dataclass(frozen=True, slots=True)
class SessionAffinity:
    """The session's worker first, otherwise as `kv`.

    A request without a session, of a new session, or of a session whose worker is not eligible goes where `kv` sends it, and
    the session follows. A session has a prefill worker, too. The term `session` makes all other workers dearer; other terms
    are those of `kv`, and so are waits, disaggregation and explanations. A `seams.HistoryPolicy`; one event loop owns it.
    """

    name: ClassVar[str] = "session"
    term_names: ClassVar[tuple[str, ...]] = (*PredictedSeconds.term_names, "session")
    otherwise: PredictedSeconds = field(default_factory=PredictedSeconds)
    sessions_max: int = SESSIONS_MAX
    """Most sessions remembered, counted again for prefill workers; past it the least recently used is forgotten."""
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
        """Find the slot of the session's worker, if eligible."""
        if context.session is None:
            return None
        place = self._places.get((context.session, context.prompt_only))
        if place is None or context.now_s - place.last_s > self.idle_s:
            return None
        found = np.flatnonzero(context.eligible & (context.worker_ids == place.worker_id))
        return int(found[0]) if len(found) else None
