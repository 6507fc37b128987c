"""The result of one engine step."""

from penstock.core.ids import RequestId
from penstock.core.types.events import KvEvent
from penstock.core.types.load import WorkerLoad
from penstock.core.types.requests import Delta
from penstock.core.wire import Wire


class Step(Wire, frozen=True):
    """Everything one engine step changed.

    `prefilling` lists requests with a prefill chunk in this step whose prompt is not finished. `events` are all of one
    data-parallel rank, `rank`.
    """

    deltas: tuple[Delta, ...] = ()
    events: tuple[KvEvent, ...] = ()
    load: WorkerLoad | None = None
    prefilling: tuple[RequestId, ...] = ()
    rank: int = 0
