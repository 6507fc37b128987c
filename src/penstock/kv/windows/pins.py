"""Pins of a pool with several groups of layers: a pinned prefix has its last window with it."""

from collections.abc import Callable, Sequence

from penstock.core.ids import BlockId
from penstock.core.wire import HashArray
from penstock.kv.pool.pins import Pins
from penstock.kv.pool.pool import BlockPool
from penstock.kv.windows.prefixes import WindowPrefixes


class WindowPins(Pins):
    """Pins blocks of the first group, and with the last block of the longest usable prefix the windows that end there.

    The windows are unpinned with that block. Callers see the first group's blocks alone.
    """

    def __init__(self, pool: BlockPool, prefixes: WindowPrefixes, on_change: Callable[[], None]) -> None:
        """Make an empty set; `prefixes` are those of the pool."""
        super().__init__(pool, on_change)
        self._prefixes = prefixes
        self._windows: dict[BlockId, list[list[BlockId]]] = {}
        """By a prefix's last block: the windows that are pinned with it, once for each pin of the prefix."""

    def pin(self, block_hashes: HashArray) -> list[BlockId]:
        """Pin the longest resident prefix, and the windows of the longest one that a request could use."""
        block_ids = super().pin(block_hashes)
        end = self._prefixes.longest(block_hashes, len(block_ids))
        if end:
            windows = [each for held in self._prefixes.windows(block_hashes, end) for each in held]
            self.hold(windows)
            self._windows.setdefault(block_ids[end - 1], []).append(windows)
        return block_ids

    def pin_named(self, names: HashArray) -> list[BlockId]:
        """Pin the leading blocks of `names` that are resident, those of windows as named."""
        return super().pin(names)

    def pass_on(self, block_ids: Sequence[BlockId]) -> None:
        """Drop pins but keep the references; windows are unpinned."""
        super().pass_on(block_ids)
        self._end_windows(block_ids)

    def unpin(self, block_ids: Sequence[BlockId]) -> None:
        """Unpin blocks, and the windows that were pinned with them."""
        super().unpin(block_ids)
        self._end_windows(block_ids)

    def _end_windows(self, block_ids: Sequence[BlockId]) -> None:
        for block_id in block_ids:
            pinned = self._windows.get(block_id)
            while pinned and len(pinned) > self._held.get(block_id, 0):
                super().unpin(pinned.pop())
            if pinned is not None and not pinned:
                del self._windows[block_id]
