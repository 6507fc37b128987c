"""Requests through one block pool, one after another, and the prefill seconds that its cache saves."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache

import numpy as np

from penstock.core.ids import BlockId
from penstock.core.wire import HashArray
from penstock.kv.eviction import BlockUse, EvictionPolicy, PrefillPrice
from penstock.kv.pool import BlockPool
from penstock.sim.trace import PREFIX_BLOCK_TOKENS, TraceRow

_ODD = np.uint64(0x9E3779B97F4A7C15)
_USE = BlockUse()

PrefillSeconds = Callable[[int, int], float]
"""Seconds to compute so many tokens after so many cached ones."""


@dataclass
class Prompts:
    """Requests by their blocks, and what computing each of them takes."""

    rows: Sequence[TraceRow]
    prefill_s: PrefillSeconds
    names: list[HashArray] = field(init=False)
    """(blocks, 2) of each request."""
    alone_s: list[float] = field(init=False)
    """Seconds of each request without a cache."""

    def __post_init__(self) -> None:
        self.prefill_s = cache(self.prefill_s)
        self.names = [block_names(row.prefix_ids) for row in self.rows]
        self.alone_s = [self.prefill_s(row.input_tokens, 0) for row in self.rows]

    def saved(self, hits: Sequence[int]) -> float:
        """Give the share of prefill seconds saved, in percent, with so many cached blocks of each request."""
        return 100 * (1 - sum(self.left_s(hits)) / sum(self.alone_s))

    def left_s(self, hits: Sequence[int]) -> list[float]:
        """Give the seconds to compute each request's rest; the last token of a prompt is always computed."""
        left = []
        for row, blocks in zip(self.rows, hits, strict=True):
            cached = min(blocks * PREFIX_BLOCK_TOKENS, row.input_tokens - 1)
            left.append(self.prefill_s(row.input_tokens - cached, cached))
        return left


def replay(prompts: Prompts, num_blocks: int, policy: EvictionPolicy, price: PrefillPrice) -> list[int]:
    """Give the cached blocks of each request; each has ended before the next begins."""
    pool = BlockPool(num_blocks, PREFIX_BLOCK_TOKENS, policy, price=price)
    hits = []
    for names in prompts.names:
        held = pool.match(names)
        hits.append(len(held))
        serve(pool, names, held)
    pool.check()
    return hits


def serve(pool: BlockPool, names: HashArray, held: list[BlockId]) -> bool:
    """Cache the blocks of a request from its begin to its end; `held` are cached already. False if the pool is too small."""
    pool.acquire(held)
    taken = pool.allocate(len(names) - len(held))
    if taken is None:
        pool.release(held, _USE)
        return False
    pool.commit(taken, names[len(held) :], int(names[len(held) - 1, 0]) if held else None)
    pool.release(held + taken, _USE)
    pool.take_events()
    return True


def block_names(ids: Sequence[int]) -> HashArray:
    """Name blocks by their ids.

    Returns:
        (n, 2) uint64, as block hashes.
    """
    numbers = (np.array(ids, dtype=np.uint64) + np.uint64(1)) * _ODD
    return np.stack([numbers, ~numbers], axis=1)
