"""Argument types of the prefix index and the event log: block hashes, and copies of a block per tier."""

import numpy as np

from penstock.core.wire import HashArray

Hashes = HashArray | bytes
"""(n,) uint64 of any stride, or the same as packed little-endian bytes."""
Copies = tuple[int, ...]
"""How many copies of one block a worker holds in each `Tier`, device first."""
COPIES_MAX = 4095
"""The index counts copies up to here: 12 bits for each tier."""


def as_list(hashes: Hashes) -> list[int]:
    """Convert hashes to a list of Python ints.

    Raises:
        TypeError: `hashes` is neither bytes nor a one-dimensional uint64 array.
    """
    if isinstance(hashes, bytes | bytearray | memoryview):
        return np.frombuffer(hashes, dtype="<u8").tolist()  # type: ignore[no-any-return]
    if hashes.dtype != np.uint64 or hashes.ndim != 1:
        raise TypeError("hashes: must be uint64 in one dimension, or those packed as bytes")
    return hashes.tolist()  # type: ignore[no-any-return]
