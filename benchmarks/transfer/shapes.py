"""Shapes of transfers: lists of equal ranges, scattered at random over a pool on both sides."""

from dataclasses import dataclass

import numpy as np

from penstock.core.descriptors import OffsetArray

POOL_BYTES = 256 << 20
"""On each side: far more than a CPU cache."""
SEED = 0


@dataclass(frozen=True, slots=True)
class Shape:
    """`count` ranges of `size_bytes` each."""

    name: str
    count: int
    size_bytes: int

    @property
    def num_bytes(self) -> int:
        return self.count * self.size_bytes

    def blocks(self) -> tuple[OffsetArray, OffsetArray]:
        """Draw which blocks of the pool, here and there; the peer's driver draws the same."""
        random = np.random.default_rng(SEED)
        slots = POOL_BYTES // self.size_bytes
        here, there = (random.permutation(slots)[: self.count].astype(np.uint64) for _ in range(2))
        return here, there


SHAPES = (
    Shape("1x128MiB", 1, 128 << 20),
    Shape("2048x32KiB", 2048, 32 << 10),
    Shape("512x256KiB", 512, 256 << 10),
    Shape("128x1MiB", 128, 1 << 20),
)
SMALL = Shape("4KiB", 1, 4096)
