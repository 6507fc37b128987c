"""What a worker tells all routers at once, where a broker carries it."""

import msgspec

from penstock.core.ids import WorkerId
from penstock.core.types.events import EventBatch
from penstock.core.types.load import WorkerLoad
from penstock.core.wire import Wire


class FrontendFigures(Wire, frozen=True):
    """The part of a load report that differs from frontend to frontend; see `WorkerLoad`.

    Attributes:
        key: that the frontend gave its connection.
    """

    key: bytes
    accepted_requests: int = 0
    peers: int = 0
    peer_requests: int = 0
    peer_prefill_tokens: int = 0
    peer_prefill_pairs: int = 0
    peer_arrivals: int = 0

    @classmethod
    def of(cls, key: bytes, load: WorkerLoad) -> "FrontendFigures":
        """Take a frontend's part of a report to it."""
        return cls(key=key, **{name: getattr(load, name) for name in _FIGURES})

    def complete(self, load: WorkerLoad) -> WorkerLoad:
        """Make the report to this frontend of a report to another one."""
        return msgspec.structs.replace(load, **{name: getattr(self, name) for name in _FIGURES})


_FIGURES = FrontendFigures.__struct_fields__[1:]


class RankNews(Wire, frozen=True):
    """What is new of one data-parallel rank.

    Attributes:
        batches: KV events, of each holder in order.
        load: the newest load report, if there is a new one; that of the first of `frontends`.
        frontends: whom it is for, and what differs for each.
    """

    rank: int = 0
    batches: tuple[EventBatch, ...] = ()
    load: WorkerLoad | None = None
    frontends: tuple[FrontendFigures, ...] = ()


class Broadcast(Wire, frozen=True):
    """One message of a worker, named by the id under which it is registered."""

    worker_id: WorkerId
    ranks: tuple[RankNews, ...]
