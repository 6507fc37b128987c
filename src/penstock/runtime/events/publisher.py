"""A worker's KV events, numbered and kept: the latest in a replay ring, the sum of all in a mirror.

Workers are the truth. Whoever follows one asks for the batches after the last it has; where the ring is
too short it gets a snapshot of the mirror, stamped with the sequence it stands for.
"""

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice

from penstock.core.log import get_logger
from penstock.core.types import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    EventBatch,
    EventMessage,
    EventSnapshot,
    KvEvent,
    Tier,
)
from penstock.core.wire import pack_hashes, unpack_hashes
from penstock.runtime.config import EventConfig
from penstock.seams import EventSink

_Signature = tuple[tuple[Tier, int], ...]
"""How a block is held: copies by tier."""

_log = get_logger()


class ContentMirror:
    """What a worker holds, summed up from its events.

    Engines may store equal blocks more than once and remove each copy on its own, so that a block counts.
    A hash names its whole prefix, so that its parent never changes.
    """

    def __init__(self) -> None:
        self._counts: dict[Tier, dict[int, int]] = {tier: {} for tier in Tier}
        self._parents: dict[int, int | None] = {}
        self._block_size = 0
        self.unknown_removals = 0
        """Blocks removed that were not held: the engine's bookkeeping is off by as many."""

    def __len__(self) -> int:
        return len(self._parents)

    def counts(self) -> dict[tuple[int, Tier], int]:
        """Give copies held by (hash, tier)."""
        return {(h, tier): n for tier, held in self._counts.items() for h, n in held.items()}

    def apply(self, event: KvEvent) -> None:
        match event:
            case BlockStored():
                self._store(event)
            case BlockRemoved():
                self._remove(event)
            case AllBlocksCleared():
                self._parents.clear()
                for held in self._counts.values():
                    held.clear()

    def _store(self, event: BlockStored) -> None:
        held = self._counts[event.tier]
        parent = event.parent_block_hash
        self._block_size = event.block_size
        for block_hash in unpack_hashes(event.block_hashes).tolist():
            held[block_hash] = held.get(block_hash, 0) + 1
            self._parents.setdefault(block_hash, parent)
            parent = block_hash

    def _remove(self, event: BlockRemoved) -> None:
        held = self._counts[event.tier]
        for block_hash in unpack_hashes(event.block_hashes).tolist():
            count = held.get(block_hash, 0)
            if count > 1:
                held[block_hash] = count - 1
            elif count == 1:
                del held[block_hash]
                if not any(block_hash in other for other in self._counts.values()):
                    del self._parents[block_hash]
            else:
                self.unknown_removals += 1

    def stored(self, hashes_max: int) -> Iterator[BlockStored]:
        """Say the whole content as events, parents before children, each of at most `hashes_max` hashes."""
        for run, signature in self._runs():
            for start in range(0, len(run), hashes_max):
                parent = self._parents[run[start]]
                packed = pack_hashes(run[start : start + hashes_max])
                for tier, count in signature:
                    event = BlockStored(
                        block_hashes=packed, parent_block_hash=parent, block_size=self._block_size, tier=tier
                    )
                    for _ in range(count):
                        yield event

    def _runs(self) -> Iterator[tuple[list[int], _Signature]]:
        """Cut the content into chains of blocks that are held alike."""
        common = self._common_signature()
        run: list[int] = []
        run_signature: _Signature = ()
        for block_hash in self._parents_first():
            signature = common or self._signature(block_hash)
            if run and (self._parents[block_hash] != run[-1] or signature != run_signature):
                yield run, run_signature
                run = []
            run.append(block_hash)
            run_signature = signature
        if run:
            yield run, run_signature

    def _parents_first(self) -> Iterable[int]:
        """Order the blocks: as they came, unless one came again after its children."""
        seen: set[int] = set()
        for block_hash, parent in self._parents.items():
            if parent not in seen and parent in self._parents:
                return self._preorder()
            seen.add(block_hash)
        return self._parents

    def _preorder(self) -> Iterator[int]:
        children: dict[int, list[int]] = {}
        stack: list[int] = []
        for block_hash, parent in self._parents.items():
            if parent in self._parents:
                children.setdefault(parent, []).append(block_hash)
            else:
                stack.append(block_hash)
        while stack:
            block_hash = stack.pop()
            yield block_hash
            stack.extend(children.get(block_hash, ()))

    def _signature(self, block_hash: int) -> _Signature:
        return tuple((tier, held[block_hash]) for tier, held in self._counts.items() if block_hash in held)

    def _common_signature(self) -> _Signature | None:
        """Give what all blocks share in the plain case: one tier, one copy of each."""
        tiers = [tier for tier, held in self._counts.items() if held]
        if len(tiers) == 1 and max(self._counts[tiers[0]].values()) == 1:
            return ((tiers[0], 1),)
        return None

    def check(self) -> None:
        held = {block_hash for counts in self._counts.values() for block_hash in counts}
        assert held == self._parents.keys(), "mirror: a parent is kept exactly for each block held"
        assert all(n > 0 for counts in self._counts.values() for n in counts.values()), (
            "mirror: counts are > 0"
        )


class EventPublisher:
    """Numbers a worker's batches 1, 2, 3, ... and brings any subscriber up to date. One task owns it."""

    def __init__(self, config: EventConfig | None = None) -> None:
        self.config = config or EventConfig()
        self.mirror = ContentMirror()
        self.sequence = 0
        """Number of the latest batch; 0 before the first."""
        self._ring: deque[EventBatch] = deque()
        self._ring_hashes = 0
        self._sinks: list[EventSink] = []

    def publish(self, events: Sequence[KvEvent]) -> None:
        """Number one step's events and push them to every subscriber; nothing for no events."""
        if not events:
            return
        self.sequence += 1
        batch = EventBatch(sequence=self.sequence, events=tuple(events))
        for event in events:
            self.mirror.apply(event)
        self._keep(batch)
        for sink in tuple(self._sinks):
            sink.push_event(batch)

    def events_after(self, sequence: int | None) -> list[EventMessage]:
        """Give what a subscriber that has applied `sequence` lacks: the tail, or a snapshot and no tail."""
        if sequence == self.sequence:
            return []
        if sequence is None or not self._first_kept() <= sequence + 1 <= self.sequence:
            return self._snapshot()
        return list(islice(self._ring, sequence + 1 - self._first_kept(), None))

    def subscribe(self, sink: EventSink) -> None:
        if sink not in self._sinks:
            self._sinks.append(sink)

    def unsubscribe(self, sink: EventSink) -> None:
        if sink in self._sinks:
            self._sinks.remove(sink)

    def check(self) -> None:
        assert self._ring_hashes == sum(map(_num_hashes, self._ring)), "publisher: hashes in the ring"
        numbers = [batch.sequence for batch in self._ring]
        assert numbers == list(range(self.sequence - len(numbers) + 1, self.sequence + 1)), (
            f"publisher: the ring holds the latest batches without gaps, got {numbers} at {self.sequence}"
        )
        self.mirror.check()

    def _first_kept(self) -> int:
        return self.sequence - len(self._ring) + 1

    def _keep(self, batch: EventBatch) -> None:
        self._ring.append(batch)
        self._ring_hashes += _num_hashes(batch)
        config = self.config
        while len(self._ring) > config.replay_batches_max or self._ring_hashes > config.replay_hashes_max:
            self._ring_hashes -= _num_hashes(self._ring.popleft())

    def _snapshot(self) -> list[EventMessage]:
        limit = self.config.snapshot_chunk_hashes
        chunks: list[list[BlockStored]] = [[]]
        room = limit
        for event in self.mirror.stored(limit):
            size = len(event.block_hashes) >> 3
            if size > room and chunks[-1]:
                chunks.append([])
                room = limit
            chunks[-1].append(event)
            room -= size
        _log.debug("snapshot_made", sequence=self.sequence, blocks=len(self.mirror), chunks=len(chunks))
        return [
            EventSnapshot(
                sequence=self.sequence, chunk=index, last=index == len(chunks) - 1, events=tuple(events)
            )
            for index, events in enumerate(chunks)
        ]


def _num_hashes(batch: EventBatch) -> int:
    """Count a batch's hashes, at least one an event."""
    return sum(
        1 if isinstance(event, AllBlocksCleared) else max(1, len(event.block_hashes) >> 3)
        for event in batch.events
    )
