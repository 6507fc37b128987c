"""Admission to a tier: blocks that one request alone has used are not worth a write."""

import numpy as np
from numpy.typing import NDArray

from penstock.core.wire import HashArray

_ENTRIES = 1 << 20


class SeenBlocks:
    """Remembers about a million hashes of blocks in 4 MiB, the newer ones. Not thread-safe.

    Each hash has one place and leaves a 32-bit mark there. So a block counts as seen by mistake once in four billion, and is
    forgotten when another one takes its place.
    """

    def __init__(self, entries: int = _ENTRIES) -> None:
        """Begin with nothing seen; `entries` is a power of two."""
        self._marks: NDArray[np.uint32] = np.zeros(entries, np.uint32)
        self._mask = np.uint64(entries - 1)

    def see(self, block_hashes: HashArray) -> int:
        """Count the leading blocks of a prefix that were seen before, and remember all of them.

        Args:
            block_hashes: (n, 2) uint64.
        """
        places = block_hashes[:, 0] & self._mask
        marks = (block_hashes[:, 1] >> np.uint64(32)).astype(np.uint32) | np.uint32(1)
        is_new = self._marks[places] != marks
        self._marks[places] = marks
        return int(is_new.argmax()) if is_new.any() else len(block_hashes)
