"""The prefix index, kept by what workers say of their blocks; of those that say nothing, by what was sent there."""

from collections.abc import Sequence
from typing import assert_never

from penstock.core.radix import RadixTree
from penstock.core.types import AllBlocksCleared, BlockRemoved, BlockStored, KvEvent
from penstock.core.wire import PackedHashes, unpack_hashes
from penstock.router.config import RouterConfig
from penstock.router.metrics import IndexGauges, RouterMetrics
from penstock.router.predictions import Predictions


class Indexer:
    """Keeps a tree in step with workers, by slot. Who may speak for a slot is the caller's business.

    A slot is either told of or guessed about, from `forget` to `forget`.
    """

    def __init__(self, config: RouterConfig, metrics: RouterMetrics) -> None:
        self.tree = RadixTree(config.indexed_blocks_max)
        self._predictions = Predictions(
            self.tree, ttl_s=config.predicted_s, blocks_max=config.indexed_blocks_max
        )
        self._metrics = metrics
        self._gauges = IndexGauges(metrics, self.tree.stats)

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

    def sent(self, slot: int, block_hashes: PackedHashes) -> None:
        """Take a request's blocks to be stored soon, on a worker that does not say what it holds."""
        self._predictions.sent(slot, unpack_hashes(block_hashes)[::2])
        self._gauges.note()

    def forget(self, slot: int) -> None:
        """Forget what a worker held: it is gone."""
        self.tree.clear(slot)
        self._predictions.forget(slot)
        self._gauges.note()

    def check(self) -> None:
        """Raise AssertionError where a part is broken."""
        self.tree.check()
        self._predictions.check()

    def _store(self, slot: int, event: BlockStored) -> None:
        self.tree.store(slot, event.block_hashes, event.parent_block_hash, event.tier)
