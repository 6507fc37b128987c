"""Workers' KV events, applied to the prefix index."""

from collections.abc import Sequence
from typing import assert_never

from penstock.core.radix import RadixTree
from penstock.core.types import AllBlocksCleared, BlockRemoved, BlockStored, KvEvent
from penstock.router.metrics import IndexGauges, RouterMetrics


class Indexer:
    """Keeps a tree in step with what workers say, by slot. Who may speak for a slot is the caller's business."""

    def __init__(self, tree: RadixTree, metrics: RouterMetrics) -> None:
        self.tree = tree
        self._metrics = metrics
        self._gauges = IndexGauges(metrics, tree.stats)

    def apply(self, slot: int, events: Sequence[KvEvent]) -> None:
        """Apply one batch of events, in order."""
        for event in events:
            match event:
                case BlockStored():
                    self._store(slot, event)
                case BlockRemoved():
                    self.tree.remove(slot, event.block_hashes, event.tier)
                case AllBlocksCleared():
                    self.tree.clear(slot)
                case _:
                    assert_never(event)
        self._gauges.events += len(events)
        self._gauges.note()

    def replace(self, slot: int, events: Sequence[BlockStored]) -> None:
        """Forget what a worker held and store a snapshot."""
        self.tree.clear(slot)
        for event in events:
            self._store(slot, event)
        self._metrics.event_snapshots.inc()
        self._gauges.note()

    def forget(self, slot: int) -> None:
        """Forget what a worker held: it is gone."""
        self.tree.clear(slot)
        self._gauges.note()

    def _store(self, slot: int, event: BlockStored) -> None:
        self.tree.store(slot, event.block_hashes, event.parent_block_hash, event.tier)
