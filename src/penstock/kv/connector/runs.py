"""Where the tiers keep the leading blocks of a prefix."""

from collections.abc import Callable, Sequence
from typing import TypeVar

from penstock.core.wire import HashArray

T = TypeVar("T")


def leading_runs(
    tiers: Sequence[T], locate: Callable[[T, HashArray], int], block_hashes: HashArray
) -> list[tuple[T, int, int]]:
    """Find consecutive runs of leading blocks: (tier, first block, block after the last). The nearest tier that has a block brings it.

    Args:
        tiers: nearest first.
        locate: counts the leading blocks that a tier keeps.
        block_hashes: (n, 2) uint64.
    """
    runs: list[tuple[T, int, int]] = []
    depth = 0
    while depth < len(block_hashes):
        rest = block_hashes[depth:]
        found = next(((tier, count) for tier in tiers if (count := locate(tier, rest))), None)
        if found is None:
            break
        runs.append((found[0], depth, depth + found[1]))
        depth += found[1]
    return runs
