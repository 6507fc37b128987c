"""Where the open sessions of agents keep their KV: requests of a session go to that worker while it is eligible."""

from collections import OrderedDict
from dataclasses import dataclass

from penstock.core.ids import WorkerId
from penstock.core.types.requests import Request, SessionAction, SessionControl


@dataclass(slots=True)
class _Place:
    """A session's worker, and how it was opened; `control` is sent with its requests, so that another worker opens it too.

    Attributes:
        before: the control that `control` has replaced, which counts again if a worker refuses the new one.
    """

    worker_id: WorkerId
    control: SessionControl
    last_s: float
    before: SessionControl | None = None


class OpenSessions:
    """What one router knows of the sessions that it saw opened. Soft state: workers decide how long they keep KV."""

    def __init__(self, sessions_max: int, idle_s: float) -> None:
        """Know none.

        Args:
            sessions_max: past it the least recently used is forgotten.
            idle_s: how long a session without requests is remembered.
        """
        self._sessions_max = sessions_max
        self._idle_s = idle_s
        self._places: OrderedDict[tuple[str, str], _Place] = OrderedDict()  # latest used last

    def __len__(self) -> int:
        return len(self._places)

    def worker_of(self, request: Request, now_s: float) -> WorkerId | None:
        """Give the worker that keeps the session's KV; None where it is not open."""
        place = self._find(request, now_s)
        return None if place is None else place.worker_id

    def control_for(self, request: Request, now_s: float) -> SessionControl | None:
        """Give what the worker is told of the session: it is open, also where only an earlier request said so."""
        if request.session_control is not None:
            return request.session_control
        place = self._find(request, now_s)
        return None if place is None else place.control

    def taken(self, request: Request, worker_id: WorkerId, now_s: float) -> WorkerId | None:
        """Note where a request goes; give the worker that its session leaves behind, None for none."""
        if request.session is None:
            return None
        key = request.tenant, request.session
        control = request.session_control
        if control is not None and control.action is SessionAction.CLOSE:
            closed = self._places.pop(key, None)
            return None if closed is None or closed.worker_id == worker_id else closed.worker_id
        left = None
        place = self._find(request, now_s)
        if place is not None:
            left = None if place.worker_id == worker_id else place.worker_id
            place.worker_id, place.last_s = worker_id, now_s
            if control is not None and control != place.control:
                place.before, place.control = place.control, control
        elif control is not None:
            self._places[key] = _Place(worker_id, control, now_s)
            if len(self._places) > self._sessions_max:
                self._places.popitem(last=False)
        else:
            return None
        self._places.move_to_end(key)
        return left

    def refused(self, request: Request) -> None:
        """Note that a worker refused a request: what it said of its session is not sent with later ones."""
        if request.session is None:
            return
        key = request.tenant, request.session
        place = self._places.get(key)
        if place is None or place.control != request.session_control:
            return
        if place.before is None:
            del self._places[key]
        else:
            place.control, place.before = place.before, None

    def check(self) -> None:
        """Raise AssertionError where too much is kept, or in the wrong order."""
        assert len(self._places) <= self._sessions_max, f"{len(self._places)} open sessions: past the bound"
        times = [place.last_s for place in self._places.values()]
        assert times == sorted(times), "open sessions: the latest used last"

    def _find(self, request: Request, now_s: float) -> _Place | None:
        """Find an open session; forget those that were not used for too long."""
        places = self._places
        while places and now_s - next(iter(places.values())).last_s > self._idle_s:
            places.popitem(last=False)
        return None if request.session is None else places.get((request.tenant, request.session))
