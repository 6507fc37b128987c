"""A worker's KV events of one holder: numbered, the latest kept in a replay ring, their sum in a mirror.

Workers are the source of truth. A subscriber asks for the batches after its last one; if the ring is
too short, it gets a snapshot of the mirror as of the latest sequence.
"""

import weakref
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Protocol

from penstock.core.errors import ProtocolError
from penstock.core.log import get_logger
from penstock.core.native import native
from penstock.core.types.events import (
    COPIES_MAX,
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    Copies,
    EventBatch,
    EventMessage,
    EventSnapshot,
    Holder,
    KvEvent,
    Tier,
)
from penstock.core.types.instances import EngineInfo
from penstock.core.wire import Hashes, PackedHashes, hash_list, pack_hashes, unpack_hashes
from penstock.runtime.config import EventConfig
from penstock.seams import BroadcastSink, EventSink

Runs = list[tuple[PackedHashes, int | None, Copies]]
"""Chains of blocks with equal copies by tier: (hashes, parent of the first, copies)."""

_TIERS = tuple(Tier)
_ALL = 1 << 62


class Walk(Protocol):
    """An incremental iteration over a worker's content as of one moment, parents before children.

    Later changes of the content do not affect it.
    """

    @property
    def is_done(self) -> bool: ...

    def next(self, steps: int) -> Runs:
        """Visit up to `steps` more blocks and return their runs."""
        ...


class _Content(Protocol):
    def walk(self) -> Walk: ...


class ContentCalls:
    """Methods shared by the native content and its Python reference."""

    def runs(self: _Content) -> Runs:
        """Return the whole content at once."""
        return self.walk().next(_ALL)


class ContentWalkPython:
    """Python reference of the native walk; it copies everything when it begins."""

    def __init__(self, runs: Runs) -> None:
        self._blocks = _single(runs)
        self._left = sum(len(hashes) // 8 for hashes, _, _ in runs)

    @property
    def is_done(self) -> bool:
        return not self._left

    def next(self, steps: int) -> Runs:
        runs: Runs = []
        for block_hash, parent, copies in islice(self._blocks, min(steps, self._left)):
            self._left -= 1
            if runs and runs[-1][0][-8:] == parent and runs[-1][2] == copies:
                runs[-1] = (PackedHashes(runs[-1][0] + block_hash), *runs[-1][1:])
            else:
                runs.append(
                    (block_hash, None if parent is None else int.from_bytes(parent, "little"), copies)
                )
        return runs


class ContentPython(ContentCalls):
    """Python reference of the native content: a plain map, without a prefix index. One task owns it.

    Engines may store equal blocks several times and remove each copy separately, so copies are counted, up to 4,095 of a
    block in a tier. A hash names its whole prefix, so a block's parent never changes.
    """

    def __init__(self) -> None:
        self.unknown_removals = 0
        """Removed blocks that were not held; each is a bookkeeping error of the engine."""
        self._copies: dict[int, Copies] = {}
        self._parents: dict[int, int | None] = {}

    def __len__(self) -> int:
        return len(self._copies)

    def store(self, hashes: Hashes, parent: int | None, tier: Tier) -> None:
        """Add a copy of each block of a chain; `parent` is the first one's parent."""
        for block_hash in hash_list(hashes):
            copies = self._copies.get(block_hash)
            if copies is None:
                copies, self._parents[block_hash] = (0,) * len(_TIERS), parent
            self._copies[block_hash] = _changed(copies, tier, +1)
            parent = block_hash

    def remove(self, hashes: Hashes, tier: Tier) -> None:
        """Remove a copy of each block; blocks that are not held only count in `unknown_removals`."""
        for block_hash in hash_list(hashes):
            copies = self._copies.get(block_hash)
            if copies is None or not copies[_TIERS.index(tier)]:
                self.unknown_removals += 1
                continue
            left = _changed(copies, tier, -1)
            if any(left):
                self._copies[block_hash] = left
            else:
                del self._copies[block_hash], self._parents[block_hash]

    def clear(self) -> None:
        """Remove everything."""
        self._copies.clear()
        self._parents.clear()

    def walk(self) -> Walk:
        """Begin an iteration over the current content."""
        return ContentWalkPython(self._all_runs())

    def _all_runs(self) -> Runs:
        runs: list[tuple[list[int], int | None, Copies]] = []
        parents, visited = self._parents, dict.fromkeys(self._parents, False)
        ends = self._parents.keys() - set(self._parents.values())
        for end in (*ends, *self._parents):  # the latter reach blocks whose parents form a cycle
            path: list[int] = []
            at: int | None = end
            while at is not None and visited.get(at) is False:
                visited[at] = True
                path.append(at)
                at = parents[at]
            for block_hash in reversed(path):
                parent, copies = parents[block_hash], self._copies[block_hash]
                if not runs or parent != runs[-1][0][-1] or copies != runs[-1][2]:
                    runs.append(([], parent, copies))
                runs[-1][0].append(block_hash)
        return [(pack_hashes(hashes), parent, copies) for hashes, parent, copies in runs]

    def check(self) -> None:
        """Raise AssertionError if the state is inconsistent."""
        assert self._copies.keys() == self._parents.keys(), (
            "content: each block has a parent or is a first one"
        )
        for block_hash, copies in self._copies.items():
            assert any(copies), f"content: block {block_hash:x} is kept without copies"
            assert all(0 <= count <= COPIES_MAX for count in copies), (
                f"content: block {block_hash:x}: {copies}"
            )


def _single(runs: Runs) -> Iterator[tuple[PackedHashes, bytes | None, Copies]]:
    """Yield (hash, parent, copies) of each block of the runs."""
    for hashes, first_parent, copies in runs:
        parent = None if first_parent is None else first_parent.to_bytes(8, "little")
        for at in range(0, len(hashes), 8):
            block_hash = PackedHashes(hashes[at : at + 8])
            yield block_hash, parent, copies
            parent = block_hash


def _changed(copies: Copies, tier: Tier, by: int) -> Copies:
    at = _TIERS.index(tier)
    return (*copies[:at], min(copies[at] + by, COPIES_MAX), *copies[at + 1 :])


if TYPE_CHECKING or native is None:
    Content = ContentPython
else:

    class Content(ContentCalls, native.Content):
        """Does what its reference says."""

        __doc__ = ContentPython.__doc__


_HASH_BYTES = 8
_STEPS_AT_ONCE = 4096
"""Blocks visited at a time: 0.5 ms on a shared AMD EPYC."""
_EVENTS_MAX = 512
"""Events in one message, and built at a time; reached if blocks form chains so short that each needs its own event."""


class Snapshot:
    """A snapshot that any number of subscribers may read at once; they share its messages. One task owns it."""

    def __init__(
        self,
        walk: Walk,
        sequence: int,
        block_size: int,
        chunk_hashes: int,
        holder: Holder = Holder.WORKER,
    ) -> None:
        """Make a snapshot.

        Args:
            walk: iteration begun when `sequence` was the latest batch.
            sequence: the batch whose content the snapshot has.
            block_size: tokens in a block.
            chunk_hashes: most hashes in a message.
            holder: whose content it is.
        """
        self._holder = holder
        self.sequence = sequence
        self._walk = walk
        self._block_size = block_size
        self._chunk_hashes = chunk_hashes
        self._built: list[EventSnapshot] = []
        self._open: list[BlockStored] = []  # events of the next message
        self._room = chunk_hashes
        self._events = self._make_events()
        self._is_whole = False

    def messages(self) -> Iterator[EventSnapshot | None]:
        """Yield all messages, and None where enough was done for one turn of the event loop."""
        index = 0
        while True:
            if index < len(self._built):
                yield self._built[index]
                index += 1
            elif self._is_whole:
                return
            else:
                self._continue()
                if index == len(self._built):
                    yield None

    def _continue(self) -> None:
        """Do a part of the work, which yields at most one message."""
        for count, event in enumerate(self._events, 1):
            if event is None:
                return
            size = len(event.block_hashes) // _HASH_BYTES
            is_full = bool(self._open) and (size > self._room or len(self._open) >= _EVENTS_MAX)
            if is_full:
                self._close(last=False)
            self._open.append(event)
            self._room -= size
            if is_full or count >= _EVENTS_MAX:
                return
        self._close(last=True)
        self._is_whole = True

    def _close(self, *, last: bool) -> None:
        self._built.append(
            EventSnapshot(
                sequence=self.sequence,
                chunk=len(self._built),
                last=last,
                events=tuple(self._open),
                holder=self._holder,
            )
        )
        self._open = []
        self._room = self._chunk_hashes

    def _make_events(self) -> Iterator[BlockStored | None]:
        """Yield all events, parents before children, and None after every `_STEPS_AT_ONCE` blocks."""
        while not self._walk.is_done:
            yield from self._events_of(self._walk.next(_STEPS_AT_ONCE))
            yield None

    def _events_of(self, runs: Runs) -> Iterator[BlockStored]:
        for hashes, parent, copies in runs:
            for tier, count in zip(Tier, copies, strict=True):
                for _ in range(count):
                    yield from self._parts(hashes, parent, tier)

    def _parts(self, hashes: PackedHashes, parent: int | None, tier: Tier) -> Iterator[BlockStored]:
        step = self._chunk_hashes * _HASH_BYTES
        for start in range(0, len(hashes), step):
            packed = PackedHashes(hashes[start : start + step])
            yield BlockStored(
                block_hashes=packed, parent_block_hash=parent, block_size=self._block_size, tier=tier
            )
            parent = int.from_bytes(packed[-_HASH_BYTES:], "little")


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
