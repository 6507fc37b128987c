"""A mock engine with KV in any layout over any ranks, checked on every read, for tests of KV transfers.

The content of each head of each token of each layer depends on the prefix that ends there and on layer and head. So a
missing or misplaced piece fails the step that reads it.
"""

from collections.abc import Sequence
from dataclasses import replace

import msgspec
import numpy as np
from numpy.typing import NDArray

from penstock.core.errors import EngineError
from penstock.core.types.kv import DIMENSIONS, KvLayout, RankLayout
from penstock.core.wire import TokenArray
from penstock.engine.batched import BatchedEngine
from penstock.engine.mock import MockConfig, MockRunner
from penstock.engine.runner import RunnerInfo
from penstock.engine.scheduling.config import SchedulerConfig
from penstock.engine.scheduling.sequences import Sampled, SequenceTable, StepPlan

Bytes = NDArray[np.uint8]

_BASE = np.uint64(0x9E3779B97F4A7C15)
_PLACE = np.uint64(0xBF58476D1CE4E5B9)


class LaidOutRank:
    """One rank's regions, and all of them as one array with the dimensions in the order of `DIMENSIONS`."""

    def __init__(self, layout: KvLayout, rank: RankLayout) -> None:
        """Allocate memory for a rank without gaps."""
        assert rank.strides_bytes == (), "without gaps"
        before, after = (side.split() for side in rank.order.split("|"))
        extents = dict(
            zip(
                DIMENSIONS,
                (len(rank.layers), layout.planes, rank.num_blocks, layout.block_size, len(rank.heads)),
                strict=True,
            )
        )
        order = [*before, *after]
        every = np.zeros(
            (*(extents[word] for word in order), layout.head_dim * layout.element_bytes), dtype=np.uint8
        )
        self.regions = tuple(every.reshape(int(np.prod([extents[word] for word in before])), -1))
        self.view: Bytes = every.transpose(*(order.index(word) for word in DIMENSIONS), len(order))
        """(layers, planes, blocks, tokens, heads, bytes of a head)."""
        self.rank = rank


class LaidOutKv:
    """Like `MockKv`, in any layout."""

    def __init__(self, layout: KvLayout) -> None:
        self.layout = layout
        self.ranks = [LaidOutRank(layout, rank) for rank in layout.ranks]

    def compute(self, plan: StepPlan, table: SequenceTable) -> None:
        """Check the KV that the planned tokens attend to, and write theirs.

        Raises:
            EngineError: the content of a head of a token is wrong.
        """
        size = self.layout.block_size
        for slot, num_new in zip(plan.slots.tolist(), plan.num_new.tolist(), strict=True):
            start = int(table.num_computed[slot])
            position = np.arange(start + num_new)
            digests = _digests(table.token_ids[slot, : start + num_new])
            blocks = table.block_tables[slot, position // size]
            for rank in self.ranks:
                content = self._content(rank.rank, digests)
                found = rank.view[:, :, blocks, position % size]
                wrong = np.count_nonzero((found[:, :, :start] != content[:, :, :start]).any(axis=-1))
                if wrong:
                    raise EngineError(f"slot {slot}: {wrong} heads of tokens are not those of its prefix")
                rank.view[:, :, blocks[start:], position[start:] % size] = content[:, :, start:]

    def holds(self, token_ids: TokenArray, block_ids: Sequence[int]) -> bool:
        """Say whether these full blocks hold the KV of the tokens."""
        size = self.layout.block_size
        position = np.arange(len(block_ids) * size)
        blocks = np.array(block_ids, dtype=np.intp)[position // size]
        digests = _digests(token_ids[: len(position)])
        return all(
            np.array_equal(rank.view[:, :, blocks, position % size], self._content(rank.rank, digests))
            for rank in self.ranks
        )

    def _content(self, rank: RankLayout, digests: NDArray[np.uint64]) -> Bytes:
        """Return the expected (layers, planes, tokens, heads, bytes of a head)."""
        layers, heads = np.array(rank.layers, np.uint64), np.array(rank.heads, np.uint64)
        planes = np.arange(self.layout.planes, dtype=np.uint64)
        place = (layers[:, None] * np.uint64(64) + planes)[:, :, None] * np.uint64(256) + heads
        words = (digests[None, None, :, None] + place[:, :, None, :] * _PLACE) * _BASE
        head_bytes = self.layout.head_dim * self.layout.element_bytes
        copies = -(-head_bytes // 8)
        repeated = np.repeat(words[..., None], copies, axis=-1) + np.arange(copies, dtype=np.uint64)
        return np.ascontiguousarray(repeated).view(np.uint8)[..., :head_bytes]


def _digests(token_ids: TokenArray) -> NDArray[np.uint64]:
    """Return a digest of each prefix of the tokens."""
    weights = np.arange(len(token_ids), dtype=np.uint64) * _BASE + np.uint64(1)
    return np.cumsum((token_ids.astype(np.uint64) + np.uint64(1)) * weights, dtype=np.uint64)


class _LaidOutRunner(MockRunner):
    def __init__(self, shape: RunnerInfo, config: MockConfig, layout: KvLayout) -> None:
        super().__init__(shape, config)
        self._laid_out = LaidOutKv(layout)

    async def start(self) -> RunnerInfo:
        shape = await super().start()
        layout = self._laid_out.layout
        block_bytes = layout.num_layers * layout.planes * layout.num_kv_heads * layout.block_size
        return replace(
            shape,
            kv_layout=layout,
            kv_bytes_per_block=block_bytes * layout.head_dim * layout.element_bytes,
        )

    async def run(self, plan: StepPlan, table: SequenceTable) -> Sampled:
        self._laid_out.compute(plan, table)
        return await super().run(plan, table)

    def kv_memory(self) -> Sequence[Sequence[object]]:
        return [rank.regions for rank in self._laid_out.ranks]


def laid_out_engine(
    layout: KvLayout, shape: RunnerInfo, config: MockConfig, scheduler: SchedulerConfig
) -> BatchedEngine:
    """Make an engine; every rank of `layout` gets the number of blocks of `shape`."""
    ranks = tuple(msgspec.structs.replace(rank, num_blocks=shape.num_blocks) for rank in layout.ranks)
    runner = _LaidOutRunner(shape, config, msgspec.structs.replace(layout, ranks=ranks))
    return BatchedEngine(runner, scheduler)
