"""All KV events that a worker tells: of each data-parallel rank's own blocks, and of what it shares with other workers."""

from collections.abc import Sequence
from dataclasses import dataclass

from penstock.core.errors import ProtocolError
from penstock.core.types.events import EventBatch, EventMessage, Holder, KvEvent
from penstock.core.types.instances import EngineInfo
from penstock.runtime.config import EventConfig
from penstock.runtime.events.publisher import EventPublisher
from penstock.seams import BroadcastSink


@dataclass(frozen=True, slots=True)
class _RankSink:
    """Passes the batches of one rank on."""

    rank: int
    sink: BroadcastSink

    def push_event(self, message: EventMessage) -> None:
        if isinstance(message, EventBatch):
            self.sink.push_event(self.rank, message)


class EventPublishers:
    """The publishers of one worker. One task owns it.

    Attributes:
        ranks: of each data-parallel rank's own blocks; one before `begin`.
        shared: of other holders that it loads from.
    """

    def __init__(self, config: EventConfig) -> None:
        self.ranks = [EventPublisher(config)]
        self.shared: dict[Holder, EventPublisher] = {}
        self._config = config

    def begin(self, info: EngineInfo) -> None:
        """Have a publisher for each rank and holder of a started engine."""
        self.ranks += [EventPublisher(self._config) for _ in range(1, info.data_parallel)]
        for holder in info.kv_holders:
            self.shared[holder.kind] = EventPublisher(self._config, holder.kind)

    def of(self, rank: int = 0, holder: Holder = Holder.WORKER) -> EventPublisher:
        """Give the publisher of a rank's own blocks, or of another holder's.

        Raises:
            ProtocolError: the worker loads from no such holder.
        """
        if holder is Holder.WORKER:
            return self.ranks[rank]
        if holder not in self.shared:
            raise ProtocolError(f"holder {holder}: the worker loads nothing from one; update the older side")
        return self.shared[holder]

    def publish(self, rank: int, events: Sequence[KvEvent]) -> None:
        """Publish the events of a rank's step by holder, its own last: offloaded blocks are known before the device evicts them."""
        own = events
        if self.shared:
            own = [event for event in events if event.holder is Holder.WORKER]
            for holder, publisher in self.shared.items():
                publisher.publish([event for event in events if event.holder is holder])
        self.ranks[rank].publish(own)

    def broadcast_to(self, sink: BroadcastSink) -> None:
        """Tell `sink` the batches of every rank and holder from now on."""
        for rank, publisher in enumerate(self.ranks):
            publisher.subscribe(_RankSink(rank, sink))
        for publisher in self.shared.values():
            publisher.subscribe(_RankSink(0, sink))

    def check(self) -> None:
        """Raise AssertionError if the state is inconsistent."""
        for publisher in (*self.ranks, *self.shared.values()):
            publisher.check()
