"""Pins: references to blocks that no sequence holds, for example while a peer reads them or writes their content."""

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Protocol

from penstock.core.ids import BlockId
from penstock.core.wire import HashArray


class PinnedPool(Protocol):
    """The pool methods that pins use."""

    def match(self, block_hashes: HashArray) -> list[BlockId]: ...

    def acquire(self, block_ids: Sequence[BlockId]) -> None: ...

    def allocate(self, count: int) -> list[BlockId] | None: ...

    def release(self, block_ids: Sequence[BlockId]) -> None: ...

    def commit(self, block_ids: Sequence[BlockId], block_hashes: HashArray, parent: int | None) -> None: ...


class Pins:
    """The pins of one pool. Only `unpin` ends them; callers enforce time limits. Not thread-safe; one task owns it."""

    def __init__(self, pool: PinnedPool, on_change: Callable[[], None]) -> None:
        """Make an empty set.

        Args:
            pool: the engine's pool.
            on_change: called when blocks were unpinned or published, since requests may wait for that.
        """
        self._pool = pool
        self._on_change = on_change
        self._held: Counter[BlockId] = Counter()

    def __len__(self) -> int:
        return len(self._held)

    def pin(self, block_hashes: HashArray) -> list[BlockId]:
        """Pin the longest resident prefix.

        Args:
            block_hashes: (n, 2) uint64, chained.

        Returns:
            (m,) block ids with m <= n: pinning stops at the first block that is not resident.
        """
        block_ids = self._pool.match(block_hashes)
        self._pool.acquire(block_ids)
        self._held.update(block_ids)
        return block_ids

    def pin_named(self, names: HashArray) -> list[BlockId]:
        """Pin the leading blocks of `names` that are resident, for a transfer that names all blocks which it moves."""
        return self.pin(names)

    def reserve(self, count: int) -> list[BlockId] | None:
        """Pin `count` free blocks, whose content is to be written; None if fewer are available."""
        block_ids = self._pool.allocate(count)
        if block_ids is not None:
            self._held.update(block_ids)
        return block_ids

    def hold(self, block_ids: Sequence[BlockId]) -> None:
        """Pin blocks that a sequence holds too."""
        self._pool.acquire(block_ids)
        self._held.update(block_ids)

    def pass_on(self, block_ids: Sequence[BlockId]) -> None:
        """Drop pins but keep the references, which the caller takes over."""
        self._forget(block_ids)

    def publish(self, block_ids: Sequence[BlockId], block_hashes: HashArray, parent: int | None) -> None:
        """Put pinned blocks with complete content into the prefix cache. They stay pinned.

        Args:
            block_ids: (n,) each the child of the one before it.
            block_hashes: (n, 2) uint64, hashes of these blocks.
            parent: low64 of the first block's parent, None at the root.

        Raises:
            ValueError: the numbers of blocks and hashes differ.
        """
        self._pool.commit(block_ids, block_hashes, parent)
        self._on_change()

    def unpin(self, block_ids: Sequence[BlockId]) -> None:
        """Unpin blocks, given in the order of their sequence; published ones stay cached until they are evicted."""
        self._forget(block_ids)
        self._pool.release(block_ids)
        self._on_change()

    def holders(self) -> dict[BlockId, int]:
        """Count the pins of each block, to check the pool's references."""
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
