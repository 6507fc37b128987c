"""One step: the batch as arrays, the KV of new tokens written into their blocks, and attention to the blocks."""

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from penstock.core.native import native
from penstock.engine.paged.memory import Gather, KvMemory
from penstock.engine.paged.models import LayerCall, dense_attention
from penstock.engine.paged.sampling import SamplingColumns, SamplingRows
from penstock.engine.scheduling.sequences import PromptSpan, SequenceTable, StepPlan, prompt_spans

Int64s = NDArray[np.int64]
Int32s = NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class PrefillSpan:
    """Tokens [start, end) of the batch: a prefill chunk of one sequence, whose first `num_cached` tokens are in its blocks.

    block_ids: by block table; (n,) each
    """

    start: int
    end: int
    num_cached: int
    block_ids: tuple[Int32s, ...]


@dataclass(frozen=True, slots=True)
class RowLimits:
    """Which prefill chunks are computed as decode rows, one row per token.

    A chunk of n tokens after m cached ones is, if n <= `tokens` or n (m + n) <= `pairs`.
    """

    tokens: int = 1
    pairs: int = 0


@dataclass(frozen=True, slots=True)
class PromptRows:
    """Prompt tokens whose logprobs are reported.

    tokens:  (n,) index in the batch of the token before each
    targets: (n,) token ids
    spans:   of the plan: each has its own number of rows here, one after another
    """

    tokens: Int64s
    targets: Int64s
    spans: tuple[PromptSpan, ...]


@dataclass(frozen=True, slots=True)
class StepBatch:
    """The rows of one step: decode rows, shortest context first, then prefill spans.

    A decode row is one token that attends to the blocks of its sequence; a short prefill chunk is one row per token.

    tokens:         (3 + tables, bucket) token ids, positions, and the offset and, for each block table, the block where each
                    token's KV is written; columns from `num_tokens` on are padding, whose KV goes to the spare block
    decode_tables:  by block table; (num_decode, longest) block ids each
    decode_lengths: (num_decode,) tokens to attend to, the new one included; ascending except within a chunk
    last_tokens:    (samples,) index in the batch of each sampled row's last token
    sampling:       how to sample them; None: greedy for all
    prompt:         prompt tokens whose logprobs are reported; None without
    """

    num_tokens: int
    num_decode: int
    tokens: Int64s
    decode_tables: tuple[Int32s, ...]
    decode_lengths: Int64s
    prefills: tuple[PrefillSpan, ...]
    last_tokens: Int64s
    sampling: SamplingRows | None
    prompt: PromptRows | None = None


class BatchBuilder:
    """Builds each step's `StepBatch` in reused buffers: a batch is valid until the next one is built."""

    def __init__(
        self, block_size: int, spare_block: int, columns: SamplingColumns, *, rows: RowLimits = RowLimits()
    ) -> None:
        """Make a builder.

        Args:
            block_size: tokens in a block.
            spare_block: block that padding is written to.
            columns: sampling parameters of the sequences.
            rows: which prefill chunks become decode rows.
        """
        self._rows = rows
        self._block_size = block_size
        self._spare_block = spare_block
        self._columns = columns
        self._tokens = np.zeros((0, 0), dtype=np.int64)

    def build(self, plan: StepPlan, table: SequenceTable) -> tuple[StepBatch, Int64s]:
        """Build the batch of a plan.

        Returns:
            the batch, and the (samples,) rows of the plan that it samples, in the batch's order.
        """
        before = table.num_computed[plan.slots]
        pairs = plan.num_new.astype(np.int64) * (before + plan.num_new)
        is_span = (plan.num_new > self._rows.tokens) & (pairs > self._rows.pairs)
        order = np.lexsort((np.where(is_span, 0, before), is_span))
        first_span = len(order) - np.count_nonzero(is_span)
        slots, num_new = plan.slots[order], plan.num_new[order]
        computed = table.num_computed[slots]
        ends = np.cumsum(num_new, dtype=np.int64)
        starts = ends - num_new
        num_tokens = int(ends[-1]) if len(ends) else 0

        of_token = np.repeat(slots, num_new)
        positions = np.arange(num_tokens) + np.repeat(computed - starts, num_new)
        blocks, offsets = np.divmod(positions, self._block_size)
        tables = (table.block_tables, *table.window_tables)
        tokens = self._buffer(3 + len(tables), bucket(num_tokens))
        tokens[0, :num_tokens] = table.token_ids[of_token, positions]
        tokens[1, :num_tokens] = positions
        tokens[2, :num_tokens] = offsets
        for row, block_ids in enumerate(tables, 3):
            tokens[row, :num_tokens] = block_ids[of_token, blocks]
        tokens[:3, num_tokens:] = 0
        tokens[3:, num_tokens:] = self._spare_block

        decode = int(ends[first_span - 1]) if first_span else 0
        lengths = positions[:decode] + 1
        longest = -(-int(lengths.max()) // self._block_size) if decode else 0
        rows = order[plan.samples[order]]
        batch = StepBatch(
            num_tokens=num_tokens,
            num_decode=decode,
            tokens=tokens,
            decode_tables=tuple(
                np.ascontiguousarray(block_ids[of_token[:decode], :longest]) for block_ids in tables
            ),
            decode_lengths=lengths,
            prefills=tuple(
                self._span(table, int(slots[row]), int(starts[row]), int(ends[row]))
                for row in range(first_span, len(slots))
            ),
            last_tokens=ends[plan.samples[order]] - 1,
            sampling=self._columns.rows(table, plan.slots[rows]),
            prompt=_prompt_rows(plan, table, order, starts),
        )
        return batch, rows

    def _span(self, table: SequenceTable, slot: int, start: int, end: int) -> PrefillSpan:
        num_cached = int(table.num_computed[slot])
        num_blocks = -(-(num_cached + end - start) // self._block_size)
        tables = (table.block_tables, *table.window_tables)
        block_ids = tuple(block_ids[slot, :num_blocks].copy() for block_ids in tables)
        return PrefillSpan(start, end, num_cached, block_ids)

    def _buffer(self, rows: int, size: int) -> NDArray[np.int64]:
        """Return (rows, size) of a reused buffer, reallocated only for a step larger than any before."""
        if size > self._tokens.shape[1]:
            self._tokens = np.zeros((rows, size), dtype=np.int64)
        return self._tokens[:, :size]


def bucket(num_tokens: int) -> int:
    """Round a step's tokens up to one of few sizes, above 32 by less than an eighth: 1, 2, 4, 8, 12, ... 64, 72, 80, ..."""
    if num_tokens <= 2:
        return num_tokens
    step = max(4, 1 << max(0, (num_tokens - 1).bit_length() - 4))
    return -(-num_tokens // step) * step


def _prompt_rows(plan: StepPlan, table: SequenceTable, order: Int64s, starts: Int64s) -> PromptRows | None:
    """Find the prompt tokens to report in a batch whose rows are the plan's in `order`, with their first tokens at `starts`."""
    spans = prompt_spans(plan, table)
    if not spans:
        return None
    first = np.empty_like(starts)
    first[order] = starts
    tokens = [np.arange(span.end - span.start) + first[span.row] for span in spans]
    targets = [table.token_ids[span.slot, span.start : span.end] for span in spans]
    return PromptRows(np.concatenate(tokens), np.concatenate(targets).astype(np.int64), tuple(spans))


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


_TILE_TOKENS = 128
"""Prefill queries per attention call. All 512 of a prompt in one call take 1.8 times as long on a CPU core."""


@dataclass(frozen=True, slots=True)
class _Part:
    """A prefill span for one window size and block table. `block_ids` is None if no cached tokens precede it."""

    start: int
    end: int
    block_ids: torch.Tensor | None
    num_keys: int
    mask: torch.Tensor


class PagedStep:
    """An `AttentionStep`: computes all decode rows together and each prefill span alone.

    Layers with the same window and block table share masks.
    """

    def __init__(self, batch: StepBatch, write_at: torch.Tensor, gather: Gather) -> None:
        """Prepare a step.

        Args:
            batch: the step.
            write_at: (1 + tables, tokens) offset and, for each block table, block where each token's KV is written, on the device.
            gather: gathers blocks of the KV memory.
        """
        self._batch = batch
        self._memory = gather.memory
        self._gather = gather
        offsets, *blocks = write_at
        self._write_at = [(of_table, offsets) for of_table in blocks]
        self._native = native_decodes(self._memory)
        self._decode = [self._rows(tables) for tables in batch.decode_tables]
        self._parts: dict[tuple[int, int | None], list[_Part]] = {}

    def attend(
        self,
        call: LayerCall,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        extra: dict[str, Any],
    ) -> torch.Tensor:
        del extra  # checked when the model was loaded
        table, place = self._memory.places[call.layer]
        for memory, new in zip(self._memory.by_token[place], (key, value), strict=True):
            # Gathered rows multiply stale tokens of a reused block by zero. An inf or NaN of one request must not become a
            # NaN of another. Native code does not read stale tokens.
            written = new[0].transpose(0, 1)
            memory.index_put_(self._write_at[table], written if self._native else written.nan_to_num())
        queries = query[0].transpose(0, 1)
        out = torch.empty(queries.shape, dtype=query.dtype, device=query.device)
        if self._batch.num_tokens < len(out):
            out[self._batch.num_tokens :] = 0
        rows = self._batch.num_decode
        if rows:
            self._decode[table].attend(call, place, queries[:rows], out[:rows])
        for part in self._parts_for(table, call.window):
            self._prefill(call, place, part, (query, key, value), out)
        return out[None]

    def _rows(self, tables: NDArray[np.int32]) -> DecodeRows:
        lengths = self._batch.decode_lengths
        if self._native:
            return NativeRows(tables, lengths, self._memory)
        return GatheredRows(tables, lengths, self._gather)

    def _prefill(
        self, call: LayerCall, place: int, part: _Part, new: tuple[torch.Tensor, ...], out: torch.Tensor
    ) -> None:
        query, keys, values = (tensor[:, :, part.start : part.end] for tensor in new)
        if part.block_ids is not None:
            _, kv_heads, _, head_dim = keys.shape
            keys, values = (
                gathered.view(1, -1, kv_heads, head_dim)[:, : part.num_keys].transpose(1, 2)
                for gathered in self._gather(place, part.block_ids)
            )
        of_part = out[part.start : part.end]
        for start in range(0, len(of_part), _TILE_TOKENS):
            end = min(start + _TILE_TOKENS, len(of_part))
            # Keys outside [first, seen) are masked for all queries of the tile.
            seen = part.num_keys - len(of_part) + end
            first = 0 if call.window is None else max(0, seen - (end - start) - call.window + 1)
            mask = part.mask[start:end, first:seen]
            attended = dense_attention(
                call, query[:, :, start:end], keys[:, :, first:seen], values[:, :, first:seen], mask
            )
            of_part[start:end] = attended[0].transpose(0, 1)

    def _parts_for(self, table: int, window: int | None) -> list[_Part]:
        parts = self._parts.get((table, window))
        if parts is None:
            parts = [self._part(span, table, window) for span in self._batch.prefills]
            self._parts[table, window] = parts
        return parts

    def _part(self, span: PrefillSpan, table: int, window: int | None) -> _Part:
        end = span.num_cached + span.end - span.start
        first_kept = max(0, span.num_cached - window + 1) if window is not None else 0
        first_block = first_kept // self._memory.block_size
        skipped = first_block * self._memory.block_size
        at = torch.arange(span.num_cached, end, device=self._memory.device)[:, None]
        of_key = torch.arange(skipped, end, device=self._memory.device)
        mask = of_key <= at
        if window is not None:
            mask &= of_key > at - window
        block_ids = None
        if span.num_cached:
            block_ids = torch.from_numpy(span.block_ids[table][first_block:]).to(self._memory.device)
        return _Part(span.start, span.end, block_ids, end - skipped, mask)
