"""The offloader: copies the full blocks of requests that leave the batch to KV tiers, in the background."""

from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence

from penstock.core.ids import BlockId
from penstock.core.types.events import Tier
from penstock.core.wire import HashArray
from penstock.kv.manager.counters import TierCounters
from penstock.kv.pool.pool import BlockPool
from penstock.seams.kv import KvTier

_PINNED_SHARE = 8
"""At most one in so many device blocks is pinned for copies. Others wait unpinned, and are dropped if evicted first."""
_WAITING_MAX = 4096
"""Most prefixes that wait for each tier; beyond it the oldest are dropped."""


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
        counters: Mapping[Tier, TierCounters],
    ) -> None:
        """Make an offloader without work.

        Args:
            pool: the device's blocks.
            tiers: each gets the blocks that it does not keep yet.
            on_change: called when blocks were freed.
            counters: count the copies.
        """
        self._pool = pool
        self._on_change = on_change
        self._counters = counters
        self._pinned_max = max(1, pool.num_blocks // _PINNED_SHARE)
        self._held: Counter[BlockId] = Counter()
        self._waiting: list[tuple[KvTier, deque[tuple[HashArray, int]]]] = [(tier, deque()) for tier in tiers]

    def offload(self, block_hashes: HashArray) -> None:
        """Copy a prefix that is in the device's cache to each tier, without the blocks that the tier keeps.

        Args:
            block_hashes: (n, 2) uint64, from the first block on.
        """
        for tier, waiting in self._waiting:
            if tier.locate(block_hashes) < len(block_hashes):
                waiting.append((block_hashes, 0))
                if len(waiting) > _WAITING_MAX:
                    lost, start = waiting.popleft()
                    self._counters[tier.tier].dropped_blocks += len(lost) - start
        self._go_on()

    def holders(self) -> Counter[BlockId]:
        """Count its references to each device block."""
        return self._held

    def clear(self) -> None:
        """Forget the prefixes that wait."""
        for _, waiting in self._waiting:
            waiting.clear()

    def _go_on(self) -> None:
        for tier, waiting in self._waiting:
            while waiting and self._held.total() < self._pinned_max:
                hashes, start = waiting.popleft()
                end = self._begin(tier, hashes, start)
                if end < len(hashes):
                    waiting.appendleft((hashes, end))

    def _begin(self, tier: KvTier, hashes: HashArray, start: int) -> int:
        """Begin to copy as much of a prefix as may be pinned; its first `start` blocks were begun before.

        Returns:
            number of leading blocks whose copy has begun or that were dropped.
        """
        block_ids = self._pool.match(hashes)
        start = max(start, tier.locate(hashes))
        end = min(len(block_ids), start + self._pinned_max - self._held.total())
        if end > start:
            read = tier.offload(hashes[:end], block_ids[:end], self._on_done)
            self._pool.acquire(read)
            self._held.update(read)
            self._counters[tier.tier].offloaded_blocks += len(read)
        if end < len(block_ids):
            return max(end, start)
        self._counters[tier.tier].dropped_blocks += len(hashes) - max(end, start)
        return len(hashes)

    def _on_done(self, block_ids: Sequence[BlockId]) -> None:
        self._held.subtract(block_ids)
        self._held = +self._held
        self._pool.release(block_ids)
        self._go_on()
        self._on_change()
