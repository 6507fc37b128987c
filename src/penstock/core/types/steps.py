"""Everything one engine step changed."""

from penstock.core.ids import RequestId
from penstock.core.types.events import KvEvent
from penstock.core.types.load import WorkerLoad
from penstock.core.types.requests import Delta
from penstock.core.wire import Wire


class Step(Wire, frozen=True):
    """All that one engine step changed, at once.

    `prefilling` names the requests of whose prompt a part was computed, and not the end.
    """

    deltas: tuple[Delta, ...] = ()
    events: tuple[KvEvent, ...] = ()
    load: WorkerLoad | None = None
    prefilling: tuple[RequestId, ...] = ()
