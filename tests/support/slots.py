"""Blocks for tests of slot files and packs: content that follows from the hash, so that any block can be checked."""

import numpy as np
from numpy.typing import NDArray

from penstock.core.hashing import block_hashes
from penstock.core.wire import HashArray
from penstock.kv.block_store import Namespace

BLOCK_BYTES = 8192
NAMESPACE = Namespace(model_digest="5eed", dtype="bfloat16", layout="layers", block_size=4)


def chain(count: int, first: int = 0) -> HashArray:
    """Give the (count, 2) hashes of a sequence that begins with token `first`."""
    return block_hashes(np.arange(first * 100_000, first * 100_000 + count * 4, dtype=np.int32), 4)


def content(hashes: HashArray, block_bytes: int = BLOCK_BYTES) -> NDArray[np.uint8]:
    """Give the (n, block_bytes) content that blocks of these hashes have in tests."""
    words = block_bytes // 8 + 1
    mixed = hashes[:, :1] * np.uint64(0x9E3779B97F4A7C15) + hashes[:, 1:]
    rows = mixed + np.arange(words, dtype=np.uint64) * np.uint64(0xBF58476D1CE4E5B9)
    return np.ascontiguousarray(rows.view(np.uint8)[:, :block_bytes])


def targets(count: int, block_bytes: int = BLOCK_BYTES) -> NDArray[np.uint8]:
    return np.zeros((count, block_bytes), np.uint8)
