"""A worker's KV events of one holder: numbered, the latest kept in a replay ring, their sum in a mirror.

Workers are the source of truth. A subscriber asks for the batches after its last one; if the ring is
too short, it gets a snapshot of the mirror as of the latest sequence.
"""

import weakref
from collections import deque
from collections.abc import Iterator, Sequence
from itertools import islice

from penstock.core.log import get_logger
from penstock.core.types.events import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    EventBatch,
    EventMessage,
    Holder,
    KvEvent,
    Tier,
)
from penstock.core.wire import unpack_hashes
from penstock.runtime.config import EventConfig
from penstock.runtime.events.content import Content
from penstock.runtime.events.snapshot import Snapshot
from penstock.seams import EventSink

_log = get_logger()


class ContentMirror:
    """The content of a worker's caches, or of another holder, derived from KV events."""

    def __init__(self, holder: Holder = Holder.WORKER) -> None:
        self._content = Content()
        self._block_size = 0
        self._holder = holder

    def __len__(self) -> int:
        return len(self._content)

    @property
    def unknown_removals(self) -> int:
        """Removed blocks that were not held; each is a bookkeeping error of the engine."""
        return self._content.unknown_removals

    def counts(self) -> dict[tuple[int, Tier], int]:
        """(hash, tier) -> copies."""
        return {
            (block_hash, tier): count
            for hashes, _, copies in self._content.runs()
            for tier, count in zip(Tier, copies, strict=True)
            if count
            for block_hash in unpack_hashes(hashes).tolist()
        }

    def apply(self, event: KvEvent) -> None:
        match event:
            case BlockStored():
                self._block_size = event.block_size
                self._content.store(event.block_hashes, event.parent_block_hash, event.tier)
            case BlockRemoved():
                self._content.remove(event.block_hashes, event.tier)
            case AllBlocksCleared():
                self._content.clear()

    def snapshot(self, sequence: int, chunk_hashes: int) -> Snapshot:
        """Make a snapshot of the content as of batch `sequence`, the latest one; later events do not affect it."""
        return Snapshot(self._content.walk(), sequence, self._block_size, chunk_hashes, self._holder)

    def check(self) -> None:
        self._content.check()


class EventPublisher:
    """Numbers a worker's event batches of one holder 1, 2, 3, ... and replays them to subscribers. One task owns it."""

    def __init__(self, config: EventConfig | None = None, holder: Holder = Holder.WORKER) -> None:
        self.config = config or EventConfig()
        self.holder = holder
        self.mirror = ContentMirror(holder)
        self.sequence = 0
        """Number of the latest batch; 0 before the first."""
        self._ring: deque[tuple[EventBatch, int]] = deque()
        """(batch, number of its hashes), oldest first."""
        self._ring_hashes = 0
        self._sinks: list[EventSink] = []
        self._snapshot: weakref.ref[Snapshot] | None = None  # the latest, while a subscriber reads it

    def publish(self, events: Sequence[KvEvent]) -> None:
        """Number one step's events and push them to every subscriber; without events, do nothing."""
        if not events:
            return
        self.sequence += 1
        batch = EventBatch(sequence=self.sequence, events=tuple(events), holder=self.holder)
        for event in events:
            self.mirror.apply(event)
        if self.config.replay_batches_max:
            self._keep(batch)
        for sink in tuple(self._sinks):
            sink.push_event(batch)

    def events_after(self, sequence: int | None) -> Iterator[EventMessage | None]:
        """Return what a subscriber that has applied `sequence` lacks: the later batches, or a snapshot without them.

        Returns:
            lazily built messages, with None where enough was done for one turn of the event loop. Subscribers that read
            a snapshot at the same time share it, and afterwards ask for the batches after it.
        """
        if sequence == self.sequence:
            return iter(())
        if sequence is None or not self._first_kept() <= sequence + 1 <= self.sequence:
            return self._current_snapshot().messages()
        return iter([batch for batch, _ in islice(self._ring, sequence + 1 - self._first_kept(), None)])

    def subscribe(self, sink: EventSink) -> None:
        if sink not in self._sinks:
            self._sinks.append(sink)

    def unsubscribe(self, sink: EventSink) -> None:
        if sink in self._sinks:
            self._sinks.remove(sink)

    def check(self) -> None:
        counts = [_num_hashes(batch) for batch, _ in self._ring]
        assert counts == [count for _, count in self._ring], "publisher: hashes of each batch in the ring"
        assert self._ring_hashes == sum(counts), "publisher: hashes in the ring"
        numbers = [batch.sequence for batch, _ in self._ring]
        assert numbers == list(range(self.sequence - len(numbers) + 1, self.sequence + 1)), (
            f"publisher: the ring holds the latest batches without gaps, got {numbers} at {self.sequence}"
        )
        self.mirror.check()

    def _first_kept(self) -> int:
        return self.sequence - len(self._ring) + 1

    def _keep(self, batch: EventBatch) -> None:
        ring, config, count = self._ring, self.config, _num_hashes(batch)
        ring.append((batch, count))
        self._ring_hashes += count
        while len(ring) > config.replay_batches_max or self._ring_hashes > config.replay_hashes_max:
            self._ring_hashes -= ring.popleft()[1]

    def _current_snapshot(self) -> Snapshot:
        """Return the snapshot that another subscriber still reads, if the ring has all later batches; else begin one."""
        snapshot = None if self._snapshot is None else self._snapshot()
        if snapshot is None or not self._first_kept() <= snapshot.sequence + 1:
            snapshot = self.mirror.snapshot(self.sequence, self.config.snapshot_chunk_hashes)
            self._snapshot = weakref.ref(snapshot)
            _log.debug("snapshot_begun", sequence=self.sequence, blocks=len(self.mirror))
        return snapshot


def _num_hashes(batch: EventBatch) -> int:
    """Count a batch's hashes, at least one per event."""
    count = 0
    for event in batch.events:
        count += 1 if isinstance(event, AllBlocksCleared) else len(event.block_hashes) >> 3 or 1
    return count
