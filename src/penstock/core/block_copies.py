"""Hashes of blocks as calls take them, and the copies that one worker holds of a block."""

import numpy as np

from penstock.core.wire import HashArray

Hashes = HashArray | bytes
"""(n,) uint64, of any stride, or those packed."""
Copies = tuple[int, ...]
"""Of one block on one worker, by tier."""


COPIES_MAX = 4095


def as_list(hashes: Hashes) -> list[int]:
    """Give hashes as Python's numbers.

    Raises:
        TypeError: they are none of what `Hashes` names.
    """
    if isinstance(hashes, bytes | bytearray | memoryview):
        return np.frombuffer(hashes, dtype="<u8").tolist()  # type: ignore[no-any-return]
    if hashes.dtype != np.uint64 or hashes.ndim != 1:
        raise TypeError("hashes: must be uint64 in one dimension, or those packed as bytes")
    return hashes.tolist()  # type: ignore[no-any-return]
