"""Buffers from which a store reads blocks, or into which it writes them."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

Bytes = NDArray[np.uint8]
Buffers = Sequence[Any] | Bytes
"""One contiguous buffer (numpy array, memoryview, bytearray) for each block, or an (n, block_bytes) array."""


def block_views(buffers: Buffers, block_bytes: int, *, writable: bool) -> list[Bytes]:
    """View each buffer as (block_bytes,) uint8.

    Raises:
        ValueError: a buffer has another size, is not contiguous, or is read-only although `writable`.
    """
    views = []
    for buffer in buffers:
        memory = memoryview(buffer)
        if not memory.c_contiguous or memory.nbytes != block_bytes or (writable and memory.readonly):
            raise ValueError(
                f"buffers: expected {block_bytes} contiguous{' writable' if writable else ''} bytes for each block, got"
                f" {memory.nbytes} bytes, contiguous: {memory.c_contiguous}, read-only: {memory.readonly}"
            )
        views.append(np.frombuffer(memory, np.uint8))
    return views
