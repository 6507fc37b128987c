"""What carries a worker's KV events and load reports to all routers at once, where their connections do not."""

from collections.abc import Callable
from typing import Protocol

from penstock.core.ids import WorkerId
from penstock.core.types.events import EventBatch, EventMessage
from penstock.core.types.load import RankNews, WorkerLoad


class BroadcastSink(Protocol):
    """A worker's way to all routers. Sync; drops what it cannot carry."""

    def push_event(self, rank: int, batch: EventBatch) -> None:
        """Send a batch of a data-parallel rank soon; one of what ranks share is for the routers of every rank."""
        ...

    def push_load(self, news: RankNews) -> None:
        """Send the newest load report of a rank now."""
        ...


class BroadcastListener(Protocol):
    """One router's connection to a rank of a worker, as a carrier sees it."""

    def push_event(self, message: EventMessage) -> None: ...

    def push_load(self, load: WorkerLoad) -> None: ...


class EventCarrier(Protocol):
    """Carries what is new, at most once and in any order; a router's connection to the worker repairs what is lost.

    So a carrier that fails stops nothing: once in `repair_interval_s` each connection says what its router should have.
    """

    @property
    def repair_interval_s(self) -> float: ...

    def sink(self, worker_id: WorkerId) -> BroadcastSink:
        """Give the way of this process's worker, by the id under which it is registered."""
        ...

    def follow(
        self, worker_id: WorkerId, rank: int, key: bytes, listener: BroadcastListener
    ) -> Callable[[], None]:
        """Pass to `listener` what a rank of a worker tells, with load reports as they are for the connection `key`.

        Returns:
            what ends it.
        """
        ...
