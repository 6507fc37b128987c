"""Keeps the prefix index: by workers' KV events, and by prediction for workers that send none."""

import asyncio
from collections.abc import Callable, Sequence
from typing import assert_never

from penstock.core.types.events import AllBlocksCleared, BlockRemoved, BlockStored, EventSnapshot, KvEvent
from penstock.core.wire import PackedHashes, unpack_hashes
from penstock.router.config import RouterConfig
from penstock.router.index.gauges import IndexGauges
from penstock.router.index.predictions import Predictions
from penstock.router.index.radix import RadixTree
from penstock.router.index.region_index import RegionIndex
from penstock.router.metrics import RouterMetrics
from penstock.runtime.events.subscriber import EventFault

_HASH_BYTES = 8
_BLOCKS_MIN = 1_000_000
"""The index has room for at least so many blocks, and for as many predicted ones."""
_ROOM_FACTOR = 2
"""Room in the index over the blocks that workers say they have: engines may not count lower tiers."""
_RECLAIMED_AT_ONCE = 1024
"""Blocks of lost workers reclaimed in one turn of the event loop: 0.2 ms on a shared AMD EPYC."""


class Indexer:
    """Applies events and predictions to the radix tree, by slot: of a worker, or of a host or store that workers share. One event loop owns it.

    From `forget` to `forget` a slot has events or predictions, never both. A worker's blocks are forgotten at once, and their
    memory is reclaimed over the next turns of the loop.
    """

    def __init__(self, config: RouterConfig, metrics: RouterMetrics) -> None:
        self._blocks_max = config.indexed_blocks_max
        self.tree = RadixTree(min(_BLOCKS_MIN, self._blocks_max))
        self._predictions = Predictions(
            self.tree, ttl_s=config.predicted_s, blocks_max=min(_BLOCKS_MIN, self._blocks_max)
        )
        self.regions = RegionIndex(metrics.links.advertised_chunks.set)
        """What links to other regions tell."""
        self._expected: dict[int, int] = {}  # by slot, the blocks that a worker says it has
        self._expected_blocks = 0
        self._metrics = metrics
        self._gauges = IndexGauges(metrics, self.tree.stats, self._why_full)
        self._reclaiming: asyncio.Handle | None = None
        self.on_cleared: Callable[[int], None] = lambda _slot: None
        """Called when events say that all of a slot's blocks are gone."""

    def expect(self, slot: int, blocks: int) -> None:
        """Make room for a worker with so many blocks; room never shrinks."""
        self._expected_blocks += blocks - self._expected.get(slot, 0)
        self._expected[slot] = blocks
        self.tree.allow(min(max(_BLOCKS_MIN, _ROOM_FACTOR * self._expected_blocks), self._blocks_max))

    def expected(self, slot: int) -> int:
        """Give the blocks that a slot was expected to have."""
        return self._expected.get(slot, 0)

    def leave(self, slot: int) -> None:
        """Forget a worker for good."""
        self.forget(slot)
        self._expected_blocks -= self._expected.pop(slot, 0)

    def apply(self, slot: int, events: Sequence[KvEvent], block_size: int) -> int:
        """Apply one batch of events, in order.

        Args:
            slot: of the worker.
            events: of the worker, in order.
            block_size: of its model.

        Returns:
            How many are invalid and were left out.
        """
        left_out = 0
        for event in events:
            match event:
                case _ if not self._fits(event, block_size):
                    left_out += 1
                case BlockStored():
                    self._store(slot, event)
                case BlockRemoved():
                    self.tree.remove(slot, event.block_hashes, event.tier)
                case AllBlocksCleared():
                    self._clear(slot)
                    self.on_cleared(slot)
                case _:
                    assert_never(event)
        self._gauges.events += len(events) - left_out
        self._gauges.note()
        return left_out

    def replace(self, slot: int, part: EventSnapshot, block_size: int) -> None:
        """Store the valid events of a part of a snapshot. The first part replaces all that the worker held."""
        if part.chunk == 0:
            self._clear(slot)
        for event in part.events:
            if self._fits(event, block_size):
                self._store(slot, event)
        if part.last:
            self._metrics.event_snapshots.inc()
        self._gauges.note()

    def sent(self, slot: int, block_hashes: PackedHashes) -> None:
        """Predict that a worker without KV events will hold a request's blocks."""
        self._predictions.sent(slot, unpack_hashes(block_hashes)[::2])
        self._gauges.note()

    def forget(self, slot: int) -> None:
        """Forget all blocks of a worker."""
        self._clear(slot)
        self._predictions.forget(slot)
        self.regions.forget(slot)
        self._gauges.note()

    def check(self) -> None:
        """Raise AssertionError where a part is broken."""
        self.tree.check()
        self.regions.check()
        assert self._expected_blocks == sum(self._expected.values()), "expected: summed up"
        self._predictions.check()

    def _why_full(self) -> str:
        room = max(_BLOCKS_MIN, _ROOM_FACTOR * self._expected_blocks)
        if room < self._blocks_max:
            return (
                f"workers hold more than {_ROOM_FACTOR} times the {self._expected_blocks} blocks that they say they have"
                " (total_blocks); update their engines"
            )
        return f"raise router.indexed_blocks_max, {self._blocks_max} now; a block takes some 60 bytes"

    def _clear(self, slot: int) -> None:
        self.tree.clear(slot)
        if self._reclaiming is None:
            self._reclaiming = asyncio.get_running_loop().call_soon(self._reclaim)

    def _reclaim(self) -> None:
        """Reclaim a bounded number of blocks now, and the rest in later turns of the loop."""
        has_more = self.tree.reclaim(_RECLAIMED_AT_ONCE)
        self._reclaiming = asyncio.get_running_loop().call_soon(self._reclaim) if has_more else None

    def _fits(self, event: KvEvent, block_size: int) -> bool:
        """Say whether an event is valid, and count why not."""
        if isinstance(event, AllBlocksCleared):
            return True
        parent = event.parent_block_hash if isinstance(event, BlockStored) else None
        if len(event.block_hashes) % _HASH_BYTES or (parent or 0) < 0:
            fault = EventFault.MALFORMED
        elif isinstance(event, BlockStored) and event.block_size != block_size:
            fault = EventFault.BLOCK_SIZE
        else:
            return True
        self._metrics.event_faults.labels(fault).inc()
        return False

    def _store(self, slot: int, event: BlockStored) -> None:
        self.tree.store(slot, event.block_hashes, event.parent_block_hash, event.tier)
