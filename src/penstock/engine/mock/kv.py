"""The mock engine's KV memory: for each token it stores a digest of the prefix that ends there, not keys and values.

So every step checks block tables, prefix sharing, chunked prefill, preemption and KV transfers without a model: reading
KV of another prefix is an error, where a real model would only answer nonsense.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.core.errors import EngineError
from penstock.core.types.kv import KvLayout, RankLayout
from penstock.engine.runner import RunnerInfo
from penstock.engine.scheduling.sequences import SequenceTable, StepPlan

Positions = NDArray[np.integer[Any]]

_CELL_BYTES = 8
_BASE = 0x9E3779B97F4A7C15
"""Odd, so that its powers never vanish modulo 2^64; the golden ratio's bits."""


class MockKv:
    """Blocks of `kv_bytes_per_block`, whose first 8 bytes per token are the digest of the prefix that ends there.

    The digest of tokens t is the sum of (t[i] + 1) * base^i modulo 2^64: sums of many prefixes are one array operation.
    """

    def __init__(self, shape: RunnerInfo) -> None:
        self._block_size = shape.block_size
        self.memory = np.zeros((shape.num_blocks, shape.kv_bytes_per_block), dtype=np.uint8)
        """(num_blocks, kv_bytes_per_block); KV transfers read and write it."""
        self.layout = _layout(shape)
        self._cells = self.memory[:, : self.bytes_needed(shape.block_size)].view("<u8")
        powers = np.full(shape.context_length, _BASE, dtype=np.uint64)
        powers[0] = 1
        self._powers = np.cumprod(powers)
        self._digests = np.zeros(0, dtype=np.uint64)  # (slots,), digest of the computed tokens

    @staticmethod
    def bytes_needed(block_size: int) -> int:
        """Return the bytes that the digests of a block take."""
        return block_size * _CELL_BYTES

    def compute(self, plan: StepPlan, table: SequenceTable) -> None:
        """Check the digests of all tokens that the planned tokens attend to, and write those of the planned tokens.

        Raises:
            EngineError: a block holds KV of another prefix.
        """
        if len(self._digests) < len(table.requests):
            self._digests = np.zeros(len(table.requests), dtype=np.uint64)
        for row in range(plan.num_decode, len(plan.slots)):
            self._prefill(table, int(plan.slots[row]), int(plan.num_new[row]))
        slots = plan.slots[: plan.num_decode]
        position = table.num_computed[slots]
        before = self._cells[self._cell_of(table, slots, position - 1)]
        self._expect(before, self._digests[slots], slots)
        digests = before + self._terms(table.token_ids[slots, position], position)
        self._cells[self._cell_of(table, slots, position)] = digests
        self._digests[slots] = digests

    def _prefill(self, table: SequenceTable, slot: int, num_new: int) -> None:
        start = int(table.num_computed[slot])
        position = np.arange(start + num_new)
        digests = np.cumsum(self._terms(table.token_ids[slot, : start + num_new], position))
        cells = self._cell_of(table, np.full(len(position), slot), position)
        self._expect(self._cells[cells][:start], digests[:start], np.full(start, slot))
        self._cells[cells] = digests
        self._digests[slot] = digests[-1]

    def _terms(self, token_ids: NDArray[np.int32], position: Positions) -> NDArray[np.uint64]:
        terms: NDArray[np.uint64] = (token_ids.astype(np.uint64) + np.uint64(1)) * self._powers[position]
        return terms

    def _cell_of(
        self, table: SequenceTable, slots: NDArray[np.int32], position: Positions
    ) -> tuple[NDArray[np.int32], Positions]:
        return table.block_tables[slots, position // self._block_size], position % self._block_size

    def _expect(
        self, found: NDArray[np.uint64], expected: NDArray[np.uint64], slots: NDArray[np.int32]
    ) -> None:
        wrong = np.flatnonzero(found != expected)
        if len(wrong):
            slot = int(slots[wrong[0]])
            raise EngineError(f"slot {slot}: the KV of {len(wrong)} tokens belongs to other prefixes")


def _layout(shape: RunnerInfo) -> KvLayout:
    """Describe a block as tokens of equal size; bytes left at its end are unused and not transferred."""
    token_bytes = shape.kv_bytes_per_block // shape.block_size
    rank = RankLayout(
        layers=(0,),
        heads=(0,),
        num_blocks=shape.num_blocks,
        order="| block layer kv token head",
        strides_bytes=(shape.kv_bytes_per_block, 0, 0, token_bytes, 0),
    )
    return KvLayout(
        num_layers=1,
        num_kv_heads=1,
        head_dim=token_bytes,
        dtype="digests",
        element_bytes=1,
        block_size=shape.block_size,
        ranks=(rank,),
        planes=1,
    )
