"""The offloader: copies full blocks of requests to KV tiers in the background, as their requests leave the batch."""

from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

from penstock.core.ids import BlockId
from penstock.core.types.events import BlockStored, KvEvent
from penstock.core.wire import HashArray, hash_list
from penstock.kv.manager.counters import TierCounters
from penstock.kv.pool.pool import BlockPool
from penstock.seams.kv import KvSource, KvTier

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
