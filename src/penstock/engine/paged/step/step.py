"""The attention of one step: write the new tokens' KV into their blocks, then attend to the blocks."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from penstock.engine.paged.memory import Gather
from penstock.engine.paged.model.attention import LayerCall, dense_attention
from penstock.engine.paged.step.batch import PrefillSpan, StepBatch
from penstock.engine.paged.step.decoding import DecodeRows, GatheredRows, NativeRows, native_decodes

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
