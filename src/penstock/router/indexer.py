"""Keeps the prefix index: by workers' KV events, and by prediction for workers that send none."""

import asyncio
import math
from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import assert_never

import numpy as np
from numpy.typing import NDArray

from penstock.core.log import get_logger
from penstock.core.types.events import AllBlocksCleared, BlockRemoved, BlockStored, EventSnapshot, KvEvent
from penstock.core.types.kv import blocks_per_chunk, chunk_ends, chunk_hashes
from penstock.core.wire import HashArray, PackedHashes, unpack_hashes
from penstock.router.config import RouterConfig
from penstock.router.metrics import RouterMetrics
from penstock.router.radix import PrefixMatch, RadixStats, RadixTree
from penstock.runtime.events.subscriber import EventFault

_log = get_logger()


_INDEX_INTERVAL_S = 1.0  # its figures move with every step of every worker, and are read every few seconds

_WARN_INTERVAL_S = 60.0  # between warnings that the index is full


class IndexGauges:
    """Writes what the prefix index counts into the metrics, at most once a second. One event loop owns it."""

    def __init__(
        self, metrics: RouterMetrics, read: Callable[[], RadixStats], why_full: Callable[[], str]
    ) -> None:
        """Read the index with `read`; `why_full` says what to do where it has to forget blocks."""
        self.events = 0
        """KV events applied so far; the indexer counts them."""
        self._metrics = metrics
        self._read = read
        self._why_full = why_full
        self._warned_s = -math.inf
        self._events_seen = self._evicted_seen = self._contradictions_seen = 0
        self._timer: asyncio.TimerHandle | None = None

    def note(self) -> None:
        """Write the metrics within a second."""
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(_INDEX_INTERVAL_S, self._write)

    def _write(self) -> None:
        self._timer = None
        stats = self._read()
        self._metrics.indexed_blocks.set(stats.pairs)
        evicted = stats.evicted_pairs - self._evicted_seen
        self._metrics.evicted_blocks.inc(evicted)
        now_s = asyncio.get_running_loop().time()
        if evicted and now_s - self._warned_s >= _WARN_INTERVAL_S:
            self._warned_s = now_s
            _log.warning("index_full", blocks=stats.pairs, evicted=stats.evicted_pairs, fix=self._why_full())
        self._metrics.kv_events.inc(self.events - self._events_seen)
        self._metrics.event_faults.labels("contradiction").inc(
            stats.contradictions - self._contradictions_seen
        )
        self._evicted_seen, self._events_seen = stats.evicted_pairs, self.events
        self._contradictions_seen = stats.contradictions


_INTERVALS = 32  # one ends in 6 ms if 1,000,000 blocks are noted: 0.2 us a block on a shared AMD EPYC


@dataclass(slots=True, eq=False)
class _Interval:
    """The blocks sent since `begun_s`, by slot. Each slot's set holds the parents of all its blocks."""

    begun_s: float
    blocks: dict[int, set[int]] = field(default_factory=dict)
    num_blocks: int = 0


class Predictions:
    """What workers without KV events are guessed to hold: the prefixes that were sent there lately.

    A prefix that is sent to a worker is stored in the tree, and forgotten `ttl_s` after it was last sent. Time is cut into
    intervals. In each interval a block of a worker is stored once, as one more copy in the tree, and the end of the interval
    removes that copy. So a block stays until the last interval that used it ends, without a timer of its own.

    One event loop owns it; nothing else writes to the slots of these workers.
    """

    def __init__(self, tree: RadixTree, *, ttl_s: float, blocks_max: int) -> None:
        """Predict nothing yet.

        Args:
            tree: the index.
            ttl_s: how long a block is taken to stay after it was last sent, up to a thirty-second part longer.
            blocks_max: bound of what is noted, (worker, block, interval); past it the oldest is forgotten.
        """
        self._tree = tree
        self._ttl_s = ttl_s
        self._interval_s = ttl_s / _INTERVALS
        self._blocks_max = blocks_max
        self._interval_blocks = max(blocks_max // _INTERVALS, 1)
        self._intervals: deque[_Interval] = deque()  # oldest first
        self._num_blocks = 0
        self._timer: asyncio.TimerHandle | None = None

    def sent(self, slot: int, hashes: HashArray) -> None:
        """Predict that a worker holds a prefix from now on.

        Args:
            slot: the worker's.
            hashes: (n,) uint64, from the root on; of more than an interval may hold, the first.
        """
        interval = self._present(asyncio.get_running_loop().time())
        noted = interval.blocks.setdefault(slot, set())
        path = hashes[: self._interval_blocks].tolist()
        known = _num_leading(path, noted)
        if known < len(path):
            self._tree.store(slot, hashes[known : len(path)], path[known - 1] if known else None)
            before = len(noted)
            noted.update(path[known:])
            interval.num_blocks += len(noted) - before
            self._num_blocks += len(noted) - before
            while self._num_blocks > self._blocks_max:
                self._end_oldest()

    def forget(self, slot: int) -> None:
        """Forget a worker's predictions. The caller clears its slot in the tree."""
        for interval in self._intervals:
            gone = len(interval.blocks.pop(slot, ()))
            interval.num_blocks -= gone
            self._num_blocks -= gone

    def check(self) -> None:
        """Raise AssertionError where counts are wrong or past their bounds."""
        assert self._num_blocks == sum(i.num_blocks for i in self._intervals), "num_blocks: the intervals'"
        assert self._num_blocks <= self._blocks_max, f"{self._num_blocks} blocks are noted: past the bound"
        for interval in self._intervals:
            assert interval.num_blocks == sum(map(len, interval.blocks.values())), "num_blocks: the sets'"
        begun = [interval.begun_s for interval in self._intervals]
        assert begun == sorted(begun), f"intervals: oldest first, got {begun}"
        assert bool(self._intervals) == (self._timer is not None), "a timer runs while there is something"

    def _present(self, now_s: float) -> _Interval:
        """Give the present interval; a new one where the last is long or large enough."""
        last = self._intervals[-1] if self._intervals else None
        if (
            last is None
            or now_s - last.begun_s >= self._interval_s
            or last.num_blocks >= self._interval_blocks
        ):
            last = _Interval(now_s)
            self._intervals.append(last)
            if self._timer is None:
                self._set_timer()
        return last

    def _set_timer(self) -> None:
        ends_s = self._intervals[0].begun_s + self._interval_s + self._ttl_s
        self._timer = asyncio.get_running_loop().call_at(ends_s, self._expire)

    def _expire(self) -> None:
        self._end_oldest()
        self._timer = None
        if self._intervals:
            self._set_timer()

    def _end_oldest(self) -> None:
        interval = self._intervals.popleft()
        self._num_blocks -= interval.num_blocks
        for slot, blocks in interval.blocks.items():
            self._tree.remove(slot, np.fromiter(blocks, np.uint64, len(blocks)))


def _num_leading(path: list[int], noted: set[int]) -> int:
    """Count the blocks of a path before the first that is not noted. All behind that are not noted either."""
    low, high = 0, len(path)
    while low < high:
        middle = (low + high) // 2
        if path[middle] in noted:
            low = middle + 1
        else:
            high = middle
    return low


_CHUNKS_MAX = 1_000_000
_HASH_BYTES = 8
_WEIGHT = 0.25
"""Of one answer: after three answers that found nothing, less than half of what the region advertises counts."""
_FORGIVEN_S = 60.0


class AdvertisedShare:
    """The share of a region's advertised prefixes that its answers confirm. One event loop owns it."""

    def __init__(self, now_s: float) -> None:
        """Begin with all of them."""
        self._share = 1.0
        self._learnt_s = now_s

    def at(self, now_s: float) -> float:
        """Give the share. The distance from 1 halves every `_FORGIVEN_S`, since a region without requests has no answers to raise it."""
        return 1.0 - (1.0 - self._share) * math.exp2((self._learnt_s - now_s) / _FORGIVEN_S)

    def learn(self, expected_tokens: int, cached_tokens: int, now_s: float) -> None:
        """Take an answer into account; `expected_tokens` were this share of the advertised ones."""
        if expected_tokens <= 0:
            return
        share = self.at(now_s)
        seen = min(share * cached_tokens / expected_tokens, 1.0)
        self._share, self._learnt_s = share + _WEIGHT * (seen - share), now_s


class RegionIndex:
    """A radix tree of chunks, beside the tree of blocks. One event loop owns it.

    In a link's events a "block" is a chunk, and `block_size` is the chunk's.
    """

    def __init__(
        self,
        on_count: Callable[[int], object] = lambda _: None,
        clock: Callable[[], float] = lambda: asyncio.get_running_loop().time(),
    ) -> None:
        """Know nothing yet; `on_count` is called with `num_chunks` after each change, and `clock` gives seconds."""
        self._tree = RadixTree(_CHUNKS_MAX)
        self._on_count = on_count
        self._clock = clock
        self._shares: dict[int, AdvertisedShare] = {}  # by slot; 1 without one

    @property
    def num_chunks(self) -> int:
        """Number of (link, chunk) pairs."""
        return self._tree.stats().pairs

    def advertised_by(self, slot: int) -> int:
        """Count the chunks that a link's region advertises."""
        return self._tree.held_blocks(slot)

    def apply(self, slot: int, events: Sequence[KvEvent], block_size: int) -> int:
        """Apply the events of a link in order; give the number of events skipped, of another size or malformed.

        Args:
            slot: of the link.
            events: of its chunks.
            block_size: tokens of a block of its model.
        """
        size, left_out = block_size * blocks_per_chunk(block_size), 0
        for event in events:
            match event:
                case AllBlocksCleared():
                    self._tree.clear(slot)
                case _ if len(event.block_hashes) % _HASH_BYTES:
                    left_out += 1
                case BlockRemoved():
                    self._tree.remove(slot, event.block_hashes)
                case BlockStored(block_size=chunk_tokens) if chunk_tokens == size:
                    chunks = unpack_hashes(event.block_hashes)
                    for index in range(len(chunks)):  # one by one: neighbours here are not parent and child
                        self._tree.store(slot, chunks[index : index + 1], None)
                case _:
                    left_out += 1
        self._on_count(self.num_chunks)
        return left_out

    def replace(self, slot: int, part: EventSnapshot, block_size: int) -> None:
        """Store a part of a snapshot; the first part replaces all chunks of the link."""
        if part.chunk == 0:
            self._tree.clear(slot)
        self.apply(slot, part.events, block_size)

    def found(self, slot: int, expected_tokens: int, cached_tokens: int) -> float:
        """Learn from an answer how much of what a region advertises is there.

        Args:
            slot: of its link.
            expected_tokens: cached tokens that were expected there, at the share so far.
            cached_tokens: cached tokens in the region's answer.

        Returns:
            The share that counts from now on.
        """
        now_s = self._clock()
        share = self._shares.setdefault(slot, AdvertisedShare(now_s))
        share.learn(expected_tokens, cached_tokens, now_s)
        return share.at(now_s)

    def forget(self, slot: int) -> None:
        """Forget a link."""
        self._shares.pop(slot, None)
        if slot < self._tree.num_slots:
            self._tree.clear(slot)
            self._on_count(self.num_chunks)

    def deepened(
        self, match: PrefixMatch, hashes: HashArray, block_size: int, slots: Collection[int]
    ) -> PrefixMatch:
        """Give a match in which a link has the leading blocks that its region advertises, where these are more.

        Only the share that the region's answers have confirmed counts.

        Args:
            match: of the tree of blocks.
            hashes: (n,) uint64, of the prompt's full blocks.
            block_size: tokens of a block.
            slots: of the links.
        """
        chunks = self._tree.match(chunk_hashes(hashes, block_size)).depths
        advertised: NDArray[np.int32] = np.zeros_like(match.depths)
        known = [slot for slot in slots if slot < len(chunks)]
        advertised[known] = np.concatenate(([0], chunk_ends(block_size)))[chunks[known]]
        for slot, share in self._shares.items():
            if slot < len(advertised):
                advertised[slot] = int(advertised[slot] * share.at(self._clock()))
        if not (advertised > match.depths).any():
            return match
        tiers = match.tiers.copy()
        tiers[0] += np.maximum(advertised - match.depths, 0)
        return PrefixMatch(np.maximum(match.depths, advertised), tiers)

    def check(self) -> None:
        """Raise AssertionError where the tree is broken."""
        self._tree.check()


_BLOCKS_MIN = 1_000_000
"""The index has room for at least so many blocks, and for as many predicted ones."""
_ROOM_FACTOR = 2
"""Room in the index over the blocks that workers say they have: engines may not count lower tiers."""
_RECLAIMED_AT_ONCE = 1024
"""Blocks of lost workers reclaimed in one turn of the event loop: 0.2 ms on a shared AMD EPYC."""


class Indexer:
    """Applies events and predictions to the radix tree, by slot: of a worker, or of a host or store that workers share. One event loop owns it.

    A slot has either events or predictions, until `forget` empties it. A worker's blocks are forgotten at once, and their memory
    is reclaimed over the next turns of the loop.
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
