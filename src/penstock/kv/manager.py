"""The KV manager of one engine: a loader and an offloader over its tiers. The offloader copies blocks as their requests leave the batch."""

from collections import Counter, deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial

from msgspec.structs import replace

from penstock.core.clock import Clock, LoopClock
from penstock.core.ids import BlockId
from penstock.core.types.events import AllBlocksCleared, BlockStored, Holder, KvEvent, Tier
from penstock.core.types.instances import KvHolder
from penstock.core.types.load import KvTierCounts
from penstock.core.wire import HashArray, hash_list
from penstock.kv.groups import KvGroups
from penstock.kv.load_or_compute import ComputeSeconds, MeasuredPrefill
from penstock.kv.loader import ChosenPrefix, Loader
from penstock.kv.loads import PrefixLoads, TierCounters
from penstock.kv.pool import BlockPool
from penstock.kv.windows import WindowPrefixes
from penstock.seams.kv import KvRun, KvSource, KvTier

_PINNED_SHARE = 8
"""At most one in so many device blocks is pinned for copies. Others wait unpinned, and are dropped if evicted first."""
_WAITING_MAX = 4096
"""Most prefixes that wait for each tier; beyond it the oldest are dropped."""


@dataclass(slots=True, eq=False)
class _Queue:
    """What waits for one tier: prefixes, with how many of their blocks were begun before.

    hanging: blocks of windows whose first group's block, by its low64, the tier does not have yet.
    """

    tier: KvTier
    counters: TierCounters
    waiting: deque[tuple[HashArray, int]] = field(default_factory=deque)
    hanging: dict[int, HashArray] = field(default_factory=dict)
    reading: Counter[BlockId] = field(default_factory=Counter)
    """Device blocks that it reads now."""


class Offloader:
    """The offloads under way and waiting. Not thread-safe; one task owns it.

    Blocks are pinned on the device while they are copied, but not while they wait, so that a slow tier takes no room from
    requests.
    """

    def __init__(
        self,
        pool: BlockPool,
        tiers: Sequence[KvTier],
        on_change: Callable[[], None],
        counters: Mapping[KvSource, TierCounters],
    ) -> None:
        """Make an offloader without work.

        Args:
            pool: the device's blocks.
            tiers: each gets the blocks that it lacks.
            on_change: called when blocks were freed.
            counters: count the copies.
        """
        self._pool = pool
        self._on_change = on_change
        self._pinned_max = max(1, pool.num_blocks // _PINNED_SHARE)
        self._held: Counter[BlockId] = Counter()
        self._queues = [_Queue(tier, counters[tier]) for tier in tiers]

    def offload(self, block_hashes: HashArray, windows: Sequence[tuple[int, HashArray]] = ()) -> None:
        """Copy a prefix that is in the device's cache to each tier, without the blocks that the tier keeps.

        Args:
            block_hashes: (n, 2) uint64, from the first block on.
            windows: of groups of layers with a window, by position: the names of their blocks there, behind that of the
                prefix's block.
        """
        for queue in self._queues:
            kept = queue.tier.locate(block_hashes)
            if kept < len(block_hashes):
                self._enqueue(queue, block_hashes)
            for position, names in windows:
                if position >= len(block_hashes) or queue.tier.locate(names) == len(names):
                    continue
                if position < kept:
                    self._enqueue(queue, names)
                else:
                    self._hang(queue, names)
        self.go_on()

    def note_stored(self, tier: KvTier, events: Sequence[KvEvent]) -> None:
        """Begin the copies of windows that waited for the blocks that a tier has stored now; `events` are the tier's."""
        queue = next(queue for queue in self._queues if queue.tier is tier)
        if not queue.hanging:
            return
        for event in events:
            if isinstance(event, BlockStored):
                for low in hash_list(event.block_hashes):
                    names = queue.hanging.pop(low, None)
                    if names is not None:
                        self._enqueue(queue, names)
        self.go_on()

    def holders(self) -> Counter[BlockId]:
        """Count its references to each device block."""
        return self._held

    def clear(self) -> None:
        """Forget the prefixes that wait."""
        for queue in self._queues:
            queue.waiting.clear()
            queue.hanging.clear()

    def close(self) -> None:
        """Begin no more copies."""
        self.clear()

    def go_on(self) -> None:
        """Begin the copies that there is room for now."""
        for queue in self._queues:
            while (
                queue.waiting
                and (room := min(self._pinned_max - self._held.total(), queue.tier.offload_room)) > 0
            ):
                hashes, start = queue.waiting.popleft()
                end = self._begin(queue, hashes, start, room)
                if end < len(hashes):
                    queue.waiting.appendleft((hashes, end))

    def _enqueue(self, queue: _Queue, hashes: HashArray) -> None:
        queue.waiting.append((hashes, 0))
        if len(queue.waiting) > _WAITING_MAX:
            lost, start = queue.waiting.popleft()
            queue.counters.dropped_blocks += len(lost) - start

    def _hang(self, queue: _Queue, names: HashArray) -> None:
        low = int(names[0, 0])
        queue.hanging[low] = max(queue.hanging.pop(low, names), names, key=len)
        if len(queue.hanging) > _WAITING_MAX:
            lost = queue.hanging.pop(next(iter(queue.hanging)))
            queue.counters.dropped_blocks += len(lost) - 1

    def _begin(self, queue: _Queue, hashes: HashArray, start: int, room: int) -> int:
        """Begin to copy at most `room` blocks of a prefix; its first `start` blocks were begun before.

        A tier that refuses a block gets none of those after it: they are only loaded after it.

        Returns:
            number of leading blocks whose copy has begun or that were dropped.
        """
        tier = queue.tier
        block_ids = self._pool.match(hashes)
        start = max(start, tier.locate(hashes))
        end = min(len(block_ids), start + room)
        refused = 0
        if end > start:
            read = tier.offload(hashes[:end], block_ids[:end], partial(self._on_done, queue))
            self._pool.acquire(read)
            self._held.update(read)
            queue.reading.update(read)
            queue.counters.offloaded_blocks += len(read)
            refused = _count_refused(queue, hashes[start:end], block_ids[start:end])
        if end < len(block_ids) and not refused:
            return max(end, start)
        queue.counters.dropped_blocks += refused + len(hashes) - max(end, start)
        return len(hashes)

    def _on_done(self, queue: _Queue, block_ids: Sequence[BlockId]) -> None:
        for held in (self._held, queue.reading):
            held.subtract(block_ids)
            for block_id in block_ids:
                if not held[block_id]:
                    del held[block_id]
        self._pool.release(block_ids)
        self.go_on()
        self._on_change()


def _count_refused(queue: _Queue, hashes: HashArray, block_ids: Sequence[BlockId]) -> int:
    """Count the blocks that a tier was offered, and neither keeps nor reads."""
    if all(block_id in queue.reading for block_id in block_ids):
        return 0
    return sum(
        block_id not in queue.reading and not queue.tier.locate(hashes[index : index + 1])
        for index, block_id in enumerate(block_ids)
    )


class KvManager:
    """What a scheduler asks of the tiers below its device. Not thread-safe; one task owns it."""

    def __init__(
        self,
        pool: BlockPool,
        tiers: Sequence[KvTier],
        on_change: Callable[[], None],
        *,
        compute_s: ComputeSeconds | None = None,
        clock: Clock | None = None,
        by_chunk: bool = True,
        groups: KvGroups | None = None,
    ) -> None:
        """Manage tiers, which it starts and `close` closes.

        Args:
            pool: the device's blocks.
            tiers: nearest first, at least one.
            on_change: called when `take_arrived` may return more, or blocks were freed.
            compute_s: predicts how long the engine computes; None predicts it from `prefill`.
            clock: times the loads; None is the event loop's.
            by_chunk: whether `take_arrived` tells of chunks, or of a whole prefix alone.
            groups: groups of layers that have blocks of their own in the pool; None: each block has all layers. With groups
                `choose_prefix` takes the place of `choose_runs`, and a prefix arrives as a whole or is of no use.
        """
        self.tiers = tuple(tiers)
        self.prefill = MeasuredPrefill()
        """Seconds per prompt token, which the engine measures."""
        self._pool = pool
        self._on_change = on_change
        self._on_room: Callable[[], None] = lambda: None
        self._cleared: list[Holder] = []
        """Shared holders whose blocks were forgotten since events were taken."""
        self.prefixes = None if groups is None else WindowPrefixes(pool, groups)
        """Finds the device's windows."""
        self._counters: dict[KvSource, TierCounters] = {tier: TierCounters() for tier in tiers}
        clock, compute_s = clock or LoopClock(), compute_s or self._measured_s
        self.prefix_loads = PrefixLoads(
            self.tiers, pool.block_size, compute_s, counters=self._counters, clock=clock
        )
        """Loads of KV transfers."""
        self._loader = Loader(
            pool,
            self.tiers,
            compute_s,
            on_change=self._changed,
            counters=self._counters,
            clock=clock,
            by_chunk=by_chunk and groups is None,
        )
        self._offloader = Offloader(pool, self.tiers, self._changed, self._counters)
        for tier in self.tiers:
            tier.start(self._on_tier_change)
        self.choose_runs = self._loader.choose_runs
        self.is_under_way = self._loader.is_under_way
        self.take_arrived = self._loader.take_arrived
        self.cancel = self._loader.cancel
        self.begin = self._loader.begin
        self.offload = self._offloader.offload

    def choose_prefix(
        self,
        block_hashes: HashArray,
        num_hits: int,
        known_tokens: int,
        ahead: Sequence[tuple[int, int]] = (),
    ) -> ChosenPrefix:
        """Choose what a waiting request of a model with several groups loads; see `Loader.choose_prefix`."""
        assert self.prefixes is not None, "asked without groups"
        return self._loader.choose_prefix(self.prefixes, block_hashes, num_hits, known_tokens, ahead)

    @property
    def num_blocks(self) -> int:
        """Blocks that all tiers can keep."""
        return sum(tier.num_blocks for tier in self.tiers)

    @property
    def num_own(self) -> int:
        """Blocks that the tiers can keep which no other worker loads from."""
        return sum(tier.num_blocks for tier in self.tiers if tier.shared is None)

    @property
    def shared(self) -> tuple[KvHolder, ...]:
        """Whose blocks its shared tiers load."""
        return tuple(tier.shared for tier in self.tiers if tier.shared is not None)

    @property
    def has_arrived(self) -> bool:
        """Whether `take_arrived` may return requests."""
        return self._loader.has_arrived

    @property
    def tokens(self) -> tuple[int, ...]:
        """Prompt tokens found in each lower `Tier`, host first, as `count` was told."""
        by_tier = {tier.tier: self._counters[tier].hit_tokens for tier in self.tiers}
        return tuple(by_tier.get(tier, 0) for tier in tuple(Tier)[1:])

    @property
    def counts(self) -> tuple[KvTierCounts, ...]:
        """What each tier keeps, and has done since start; nearest first."""
        return tuple(_count(tier, self._counters[tier]) for tier in self.tiers)

    def watch(self, on_room: Callable[[], None]) -> None:
        """Also call `on_room` when blocks were freed."""
        self._on_room = on_room

    def count(self, runs: Sequence[KvRun], prompt_tokens: int) -> None:
        """Count a request's tokens in lower tiers, up to `prompt_tokens`, the prompt tokens that the device lacks."""
        for run in runs:
            found = min(run.num_blocks * self._pool.block_size, prompt_tokens)
            prompt_tokens -= found
            self._counters[run.source].hit_tokens += found

    def count_prefetch(self, runs: Sequence[KvRun]) -> None:
        """Count blocks that are loaded for a request that waits."""
        for run in runs:
            self._counters[run.source].prefetched_blocks += run.num_blocks

    def count_wasted(self, runs: Sequence[KvRun]) -> None:
        """Count prefetched blocks whose request is not admitted with them."""
        for run in runs:
            self._counters[run.source].wasted_blocks += run.num_blocks

    def with_events(self, events: tuple[KvEvent, ...]) -> tuple[KvEvent, ...]:
        """Add the events of all tiers since the last call to those of the device.

        Events of the lowest tier come first, so that a router knows an offloaded block before the device evicts it. If the
        device was cleared, its events come first, since a clearing removes the blocks of all tiers.
        """
        lower: list[KvEvent] = [AllBlocksCleared(holder=holder) for holder in self._cleared]
        self._cleared.clear()
        for tier in reversed(self.tiers):
            told = tier.take_events()
            if self.prefixes is not None:
                self._offloader.note_stored(tier, told)
            lower += _held_by(tier.shared, told)
        is_cleared = any(isinstance(event, AllBlocksCleared) for event in events)
        return (*events, *lower) if is_cleared else (*lower, *events)

    def holders(self) -> Counter[BlockId]:
        """Count its references to each device block."""
        return self._loader.holders() + self._offloader.holders()

    def offloading(self) -> Collection[BlockId]:
        """Return the device blocks that offloads read now."""
        return self._offloader.holders()

    def clear(self) -> None:
        """Forget all blocks of all tiers. The caller clears the device's pool too; its event covers the worker's own tiers."""
        self._offloader.clear()
        for tier in self.tiers:
            tier.clear()
            tier.take_events()
            if tier.shared is not None:
                self._cleared.append(tier.shared.kind)

    def check(self) -> None:
        """Raise AssertionError if a block is held a negative number of times."""
        held = self.holders()
        assert all(number > 0 for number in held.values()), f"blocks held a negative number of times: {held}"

    async def close(self) -> None:
        """Cancel all loads and close the tiers. Safe twice."""
        self._loader.close()
        self._offloader.close()
        for tier in self.tiers:
            await tier.close()

    def _measured_s(self, new_tokens: int, cached_tokens: int) -> float | None:  # noqa: ARG002 - depth is not measured
        return self.prefill.seconds(new_tokens) if self.prefill.is_known else None

    def _on_tier_change(self) -> None:
        self._offloader.go_on()
        self._on_change()

    def _changed(self) -> None:
        self._on_room()
        self._on_change()


def _held_by(holder: KvHolder | None, events: Sequence[KvEvent]) -> Sequence[KvEvent]:
    """Note in a tier's events who holds its blocks."""
    return events if holder is None else [replace(event, holder=holder.kind) for event in events]


def _count(tier: KvTier, counters: TierCounters) -> KvTierCounts:
    return KvTierCounts(
        tier=tier.tier,
        total_blocks=tier.num_blocks,
        cached_blocks=tier.num_cached,
        block_bytes=tier.block_bytes,
        is_off=tier.is_off,
        corrupt_blocks=tier.num_corrupt,
        **asdict(counters),
    )
