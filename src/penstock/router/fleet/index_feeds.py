"""Has the prefix index follow the KV events of workers: of their own blocks, and of blocks that they share with others."""

import random
from collections.abc import Sequence

from penstock.core.ids import WorkerId
from penstock.core.log import get_logger
from penstock.core.types.events import EventSnapshot, Holder, KvEvent
from penstock.router.index.indexer import Indexer
from penstock.router.metrics import RouterMetrics
from penstock.router.workers.event_feeds import EventFeeds
from penstock.router.workers.member import FleetMember
from penstock.runtime.events.subscriber import EventSubscriber

_log = get_logger()


class IndexFeeds:
    """Makes subscribers that write into the index. One event loop owns it."""

    def __init__(self, indexer: Indexer, metrics: RouterMetrics, rng: random.Random) -> None:
        """Write into `indexer`, and count what is wrong with messages in `metrics`."""
        self._indexer = indexer
        self._metrics = metrics
        self._rng = rng

    def follow(
        self, member: FleetMember, feeds: EventFeeds, slot: int, holder: Holder = Holder.WORKER
    ) -> EventSubscriber:
        """Keep a slot of the index equal to what a holder keeps, as a member tells of it.

        Args:
            member: a connected worker.
            feeds: of its connection.
            slot: the holder's.
            holder: the member itself, or what it shares with others.
        """
        block_size = member.instance.card.block_size
        index = self._indexer.regions if member.instance.engine.is_deployment else self._indexer

        def apply(_: WorkerId, events: Sequence[KvEvent]) -> None:
            left_out = index.apply(slot, events, block_size)
            if left_out and subscriber.doubt():
                _log.warning(
                    "kv_events_left_out",
                    worker=member.instance.name,
                    holder=holder,
                    events=left_out,
                    block_size=block_size,
                    fix="they are of blocks of another size, or have hashes that are none; its content is asked for"
                    " anew. Should it go on (penstock_router_event_faults_total), update the older side",
                )

        def replace(_: WorkerId, part: EventSnapshot) -> None:
            index.replace(slot, part, block_size)

        subscriber = EventSubscriber(
            feeds.connection,
            apply=apply,
            replace=replace,
            on_fault=lambda fault: self._metrics.event_faults.labels(fault).inc(),
            rng=self._rng,
            holder=holder,
        )
        feeds.add(subscriber)
        return subscriber
