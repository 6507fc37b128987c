"""Attention of decode rows: one query per row over the blocks of its sequence, in two implementations.

`NativeRows` reads the blocks in place. `GatheredRows` is its reference in PyTorch, for any device: it gathers the blocks of
rows with similar length and attends to the copies.
"""

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from penstock.core.native import native
from penstock.engine.paged.memory import Gather, KvMemory
from penstock.engine.paged.model.attention import LayerCall, dense_attention
from penstock.engine.paged.step.batch import RowLimits

_HEAD_DIM_STEP = 16
_NATIVE_VIEWS = {torch.float32: torch.float32, torch.bfloat16: torch.uint16}
_NATIVE_ROW_TOKENS = 8
"""Chunks of up to this many tokens are faster as decode rows. After 2,300 cached tokens (12 layers, 2 kv heads of 32), on one
EPYC core: 1.7 ms instead of 5 for one token, 3 instead of 6 for four, 6 instead of 7 for eight; no gain beyond."""
_NATIVE_ROW_PRODUCTS = 1 << 21
"""Chunks of up to this many query-key products in a layer are faster as decode rows, which take fewer calls. With 20 layers of
2 query heads of 32, on the same core, they save 1 ms for 16 tokens after 0 or 600 cached, 2 ms for 64 after 0, 1 ms for 128
after 256, and nothing for 24 after 1,200 or 128 after 600."""
_GROUP_GROWTH = 1.25
_GROUP_BYTES = 4 << 20
"""Bytes of keys (or of values) in one gather of decode rows: about the size of a core's caches."""


class DecodeRows(Protocol):
    """The decode rows of one step, in one block table. Blocks behind a layer's window are not read."""

    def attend(self, call: LayerCall, place: int, query: torch.Tensor, out: torch.Tensor) -> None:
        """Compute one layer.

        Args:
            call: parameters.
            place: of the layer in a block.
            query: (rows, heads, head_dim).
            out: as `query`, contiguous; receives the result.
        """
        ...


def native_decodes(memory: KvMemory) -> bool:
    """Say whether the native kernel supports this memory. It uses one thread, so the engine must use one too."""
    return (
        native is not None
        and memory.device.type == "cpu"
        and torch.get_num_threads() == 1
        and memory.shape.dtype in _NATIVE_VIEWS
        and memory.shape.head_dim % _HEAD_DIM_STEP == 0
    )


def row_limits(memory: KvMemory, num_heads: int) -> RowLimits:
    """Return which prefill chunks are faster as decode rows in a model with `num_heads` query heads."""
    if not native_decodes(memory):
        return RowLimits()
    pairs = _NATIVE_ROW_PRODUCTS // (num_heads * memory.shape.head_dim)
    return RowLimits(_NATIVE_ROW_TOKENS, pairs)


class NativeRows:
    def __init__(self, tables: NDArray[np.int32], lengths: NDArray[np.int64], memory: KvMemory) -> None:
        """Prepare a step.

        Args:
            tables: (rows, longest) block ids.
            lengths: (rows,) tokens to attend to.
            memory: KV memory for which `native_decodes` is True.
        """
        self._tables = tables
        self._lengths = lengths
        self._view = _NATIVE_VIEWS[memory.shape.dtype]
        self._storage = memory.storage.view(self._view).numpy()

    def attend(self, call: LayerCall, place: int, query: torch.Tensor, out: torch.Tensor) -> None:
        assert native is not None
        native.decode_attention(
            query.contiguous().view(self._view).numpy(),
            self._storage,
            place,
            self._tables,
            self._lengths,
            out.view(self._view).numpy(),
            call.window or 0,
            call.scale,
            call.softcap or 0.0,
        )


@dataclass(frozen=True, slots=True)
class _Group:
    """Rows [start, end) of similar length: their block ids, flat, and a mask of the tokens to attend to (None: all)."""

    start: int
    end: int
    block_ids: torch.Tensor
    num_keys: int
    mask: torch.Tensor | None


class GatheredRows:
    def __init__(self, tables: NDArray[np.int32], lengths: NDArray[np.int64], gather: Gather) -> None:
        """Prepare a step.

        Args:
            tables: (rows, longest) block ids.
            lengths: (rows,) tokens to attend to, ascending.
            gather: copies the blocks.
        """
        self._tables = tables
        self._lengths = lengths
        self._gather = gather
        self._memory = gather.memory
        self._groups: dict[int | None, list[_Group]] = {}  # by window; layers with the same window share them

    def attend(self, call: LayerCall, place: int, query: torch.Tensor, out: torch.Tensor) -> None:
        groups = self._groups.get(call.window)
        if groups is None:
            groups = self._groups[call.window] = self._cut(call.window)
        kv_heads, head_dim = self._memory.shape.num_kv_heads, self._memory.shape.head_dim
        for group in groups:
            rows = group.end - group.start
            keys, values = (
                gathered.view(rows, -1, kv_heads, head_dim)[:, : group.num_keys].transpose(1, 2)
                for gathered in self._gather(place, group.block_ids)
            )
            grouped = query[group.start : group.end].reshape(rows, kv_heads, -1, head_dim)
            attended = dense_attention(call, grouped, keys, values, group.mask)
            out[group.start : group.end] = attended.view(rows, -1, head_dim)

    def _cut(self, window: int | None) -> list[_Group]:
        block_size = self._memory.block_size
        first_kept = np.maximum(self._lengths - (window or self._lengths), 0)
        first_block = first_kept // block_size
        num_blocks = -(-self._lengths // block_size) - first_block
        groups = []
        for start, end in _similar(num_blocks, self._memory.by_block[0][0][0].nbytes):
            columns = first_block[start:end, None] + np.arange(num_blocks[start:end].max())
            tables = np.take_along_axis(
                self._tables[start:end], np.minimum(columns, self._tables.shape[1] - 1), axis=1
            )
            skipped = first_block[start:end] * block_size
            kept_from, kept_to = first_kept[start:end] - skipped, self._lengths[start:end] - skipped
            num_keys, mask = int(kept_to.max()), None
            if kept_to.min() < num_keys or kept_from.any():
                at = torch.arange(num_keys, device=self._memory.device)
                mask = (at >= self._put(kept_from)[:, None]) & (at < self._put(kept_to)[:, None])
                mask = mask[:, None, None]
            groups.append(_Group(start, end, self._put(tables.ravel()), num_keys, mask))
        return groups

    def _put(self, array: NDArray[Any]) -> torch.Tensor:
        return torch.from_numpy(array).to(self._memory.device)


def _similar(num_blocks: NDArray[np.int64], block_bytes: int) -> list[tuple[int, int]]:
    """Cut rows, in order, into groups with similar numbers of blocks, for little padding, that each fit into `_GROUP_BYTES`."""
    sizes = np.ceil(np.log(num_blocks) / np.log(_GROUP_GROWTH))
    runs, start = [], 0
    for cut in [*(np.flatnonzero(np.diff(sizes)) + 1).tolist(), len(num_blocks)]:
        rows = max(1, _GROUP_BYTES // (int(num_blocks[start:cut].max()) * block_bytes))
        runs += [(at, min(at + rows, cut)) for at in range(start, cut, rows)]
        start = cut
    return runs
