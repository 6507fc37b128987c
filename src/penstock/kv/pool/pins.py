"""Blocks that are held for others than sequences: while a reader copies them away, or until their content has come."""

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Protocol

from penstock.core.ids import BlockId
from penstock.core.wire import HashArray


class PinnedPool(Protocol):
    """What pins need of a pool."""

    def match(self, block_hashes: HashArray) -> list[BlockId]: ...

    def acquire(self, block_ids: Sequence[BlockId]) -> None: ...

    def allocate(self, count: int) -> list[BlockId] | None: ...

    def release(self, block_ids: Sequence[BlockId]) -> None: ...

    def commit(self, block_ids: Sequence[BlockId], block_hashes: HashArray, parent: int | None) -> None: ...


class Pins:
    """References of one pool that no sequence holds. They end by `unpin` alone: time limits are the caller's.

    Not thread-safe; one task owns it.
    """

    def __init__(self, pool: PinnedPool, on_change: Callable[[], None]) -> None:
        """Hold nothing.

        Args:
            pool: the engine's.
            on_change: called when blocks were given back or published: somebody may have waited for that.
        """
        self._pool = pool
        self._on_change = on_change
        self._held: Counter[BlockId] = Counter()

    def __len__(self) -> int:
        return len(self._held)

    def pin(self, block_hashes: HashArray) -> list[BlockId]:
        """Hold the leading blocks that are resident.

        Args:
            block_hashes: (n, 2) uint64, chained.

        Returns:
            (m,) with m <= n: it stops at the first block that is not there.
        """
        block_ids = self._pool.match(block_hashes)
        self._pool.acquire(block_ids)
        self._held.update(block_ids)
        return block_ids

    def reserve(self, count: int) -> list[BlockId] | None:
        """Hold `count` blocks for content that is still to come; None if there are not as many."""
        block_ids = self._pool.allocate(count)
        if block_ids is not None:
            self._held.update(block_ids)
        return block_ids

    def hold(self, block_ids: Sequence[BlockId]) -> None:
        """Hold blocks that somebody else holds too."""
        self._pool.acquire(block_ids)
        self._held.update(block_ids)

    def pass_on(self, block_ids: Sequence[BlockId]) -> None:
        """Leave blocks to somebody else, who holds them from now on."""
        self._forget(block_ids)

    def publish(self, block_ids: Sequence[BlockId], block_hashes: HashArray, parent: int | None) -> None:
        """Put held blocks into the prefix cache: their content is complete. They stay held.

        Args:
            block_ids: (n,) each the child of the one before it.
            block_hashes: (n, 2) uint64, their names.
            parent: low64 of the block before the first, None at the root.

        Raises:
            ValueError: not as many hashes as blocks.
        """
        self._pool.commit(block_ids, block_hashes, parent)
        self._on_change()

    def unpin(self, block_ids: Sequence[BlockId]) -> None:
        """Let go of blocks, in the order of their sequence; what is published stays cached while there is room."""
        self._forget(block_ids)
        self._pool.release(block_ids)
        self._on_change()

    def holders(self) -> dict[BlockId, int]:
        """Count how often each block is held, to check the pool's references."""
        return dict(self._held)

    def _forget(self, block_ids: Sequence[BlockId]) -> None:
        held = self._held
        for block_id in block_ids:
            times = held.get(block_id, 0)
            assert times, "unpinned more often than pinned"
            if times > 1:
                held[block_id] = times - 1
            else:
                del held[block_id]
