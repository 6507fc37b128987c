"""Attention over paged KV, plugged into transformers' models by their own attention interface.

The model is called with `paged_step=...`, a keyword that its layers hand down to the attention function: the
state of a step travels with the call, so any number of engines can share a process.
"""

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

from penstock.engine.paged.batch import PrefillSpan, StepBatch
from penstock.engine.paged.memory import KvMemory

ATTENTION = "penstock_paged"
"""Name of the attention implementation. It has no mask function, so transformers builds no masks for it."""

_GROUP_GROWTH = 1.25
_GROUP_BYTES = 4 << 20
"""Keys (or values) that one gather of decode rows may fill: near the size of a core's caches."""


@dataclass(frozen=True, slots=True)
class LayerCall:
    """What a model's layer asks of its attention, beside the tensors."""

    layer: int
    scale: float
    window: int | None
    softcap: float | None


class AttentionStep(Protocol):
    """What handles the attention calls of one forward pass."""

    def attend(
        self,
        call: LayerCall,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        extra: dict[str, Any],
    ) -> torch.Tensor:
        """Compute one layer.

        Args:
            call: which layer, and how.
            query: (1, heads, tokens, head_dim), rotated.
            key: (1, kv_heads, tokens, head_dim), rotated.
            value: as `key`.
            extra: what else the model passed.

        Returns:
            (1, tokens, heads, head_dim)
        """
        ...


def _attention_function(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    paged_step: AttentionStep,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **extra: Any,
) -> tuple[torch.Tensor, None]:
    scale = scaling if scaling is not None else query.shape[-1] ** -0.5
    call = LayerCall(module.layer_idx, scale, sliding_window, softcap)
    if attention_mask is not None:
        extra["attention_mask"] = attention_mask
    return paged_step.attend(call, query, key, value, extra), None


AttentionInterface.register(ATTENTION, _attention_function)


@dataclass(frozen=True, slots=True)
class _DecodeGroup:
    """Decode rows [start, end) of similar length: their blocks, flat, and which tokens of them count (None: all)."""

    start: int
    end: int
    block_ids: torch.Tensor
    num_keys: int
    mask: torch.Tensor | None


@dataclass(frozen=True, slots=True)
class _PrefillPart:
    """Tokens [start, end) of one sequence. `block_ids` is None where nothing before them is to be read."""

    start: int
    end: int
    block_ids: torch.Tensor | None
    num_keys: int
    mask: torch.Tensor | None


class Gather:
    """Copies blocks together, into memory that is kept: fresh memory for each call costs ten times the copy."""

    def __init__(self, memory: KvMemory) -> None:
        self._memory = memory
        self._scratch = torch.empty(2, 0, 0)

    def __call__(self, layer: int, block_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return keys and values of the blocks, (n, block elements) each; valid until the next call."""
        keys, values = self._memory.by_block[layer]
        count = len(block_ids)
        if count > self._scratch.shape[1]:
            self._scratch = keys.new_empty(2, count, keys.shape[1])
        to_keys, to_values = self._scratch[0, :count], self._scratch[1, :count]
        torch.index_select(keys, 0, block_ids, out=to_keys)
        torch.index_select(values, 0, block_ids, out=to_values)
        return to_keys, to_values


class PagedStep:
    """The attention of one step: writes the new tokens' KV into their blocks, then attends to the blocks.

    Decode rows are computed together, in a few groups of similar context length; each prefill span by itself.
    What layers with the same window share (tables, masks) is made once.
    """

    def __init__(self, batch: StepBatch, write_at: torch.Tensor, memory: KvMemory, gather: Gather) -> None:
        """Prepare a step.

        Args:
            batch: what is computed.
            write_at: (2, tokens) block and offset of each token's keys and values, on the device.
            memory: where the blocks are.
            gather: copies them together.
        """
        self._batch = batch
        self._memory = memory
        self._gather = gather
        self._device = write_at.device
        self._at = tuple(write_at)
        self._parts: dict[int | None, tuple[list[_DecodeGroup], list[_PrefillPart]]] = {}

    def attend(
        self,
        call: LayerCall,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        extra: dict[str, Any],
    ) -> torch.Tensor:
        del extra  # checked once, when the model was loaded
        keys, values = self._memory.by_token[call.layer]
        new_keys, new_values = key[0].transpose(0, 1), value[0].transpose(0, 1)
        keys.index_put_(self._at, new_keys)
        values.index_put_(self._at, new_values)
        _, heads, num_tokens, head_dim = query.shape
        out = query.new_zeros(1, num_tokens, heads, head_dim)
        groups, parts = self._parts.get(call.window) or self._prepare(call.window)
        for group in groups:
            self._decode(call, group, query, out)
        for part in parts:
            self._prefill(call, part, (query, key, value), out)
        return out

    def _decode(self, call: LayerCall, group: _DecodeGroup, query: torch.Tensor, out: torch.Tensor) -> None:
        rows = group.end - group.start
        kv_heads, head_dim = self._memory.shape.num_kv_heads, self._memory.shape.head_dim
        keys, values = (
            gathered.view(rows, -1, kv_heads, head_dim)[:, : group.num_keys].transpose(1, 2)
            for gathered in self._gather(call.layer, group.block_ids)
        )
        of_group = query[0, :, group.start : group.end].transpose(0, 1).reshape(rows, kv_heads, -1, head_dim)
        out[0, group.start : group.end] = _attention(call, of_group, keys, values, group.mask).view(
            rows, -1, head_dim
        )

    def _prefill(
        self, call: LayerCall, part: _PrefillPart, new: tuple[torch.Tensor, ...], out: torch.Tensor
    ) -> None:
        query, key, value = (tensor[:, :, part.start : part.end] for tensor in new)
        if part.block_ids is None:
            keys, values = key, value
        else:
            kv_heads, head_dim = self._memory.shape.num_kv_heads, self._memory.shape.head_dim
            keys, values = (
                gathered.view(1, -1, kv_heads, head_dim)[:, : part.num_keys].transpose(1, 2)
                for gathered in self._gather(call.layer, part.block_ids)
            )
        attended = _attention(call, query, keys, values, part.mask)
        out[0, part.start : part.end] = attended[0].transpose(0, 1)

    def _prepare(self, window: int | None) -> tuple[list[_DecodeGroup], list[_PrefillPart]]:
        parts = (
            self._decode_groups(window),
            [self._prefill_part(span, window) for span in self._batch.prefills],
        )
        self._parts[window] = parts
        return parts

    def _decode_groups(self, window: int | None) -> list[_DecodeGroup]:
        batch, block_size = self._batch, self._memory.block_size
        if not batch.num_decode:
            return []
        lengths = batch.decode_lengths.astype(np.int64)
        first = np.maximum(lengths - (window or lengths), 0) // block_size
        num_blocks = -(-lengths // block_size) - first
        groups = []
        for start, end in _similar(num_blocks, self._memory.by_block[0][0][0].nbytes):
            width = int(num_blocks[start:end].max())
            columns = first[start:end, None] + np.arange(width)
            last_column = batch.decode_tables.shape[1] - 1
            tables = np.take_along_axis(
                batch.decode_tables[start:end], np.minimum(columns, last_column), axis=1
            )
            after = lengths[start:end] - first[start:end] * block_size
            before = np.maximum(after - (window or 1 << 62), 0)
            num_keys, mask = int(after.max()), None
            if int(after.min()) < num_keys or before.any():
                at = torch.arange(num_keys, device=self._device)
                mask = at < self._put(after)[:, None]
                if window is not None:
                    mask &= at >= self._put(before)[:, None]
                mask = mask[:, None, None]
            groups.append(_DecodeGroup(start, end, self._put(tables.ravel()), num_keys, mask))
        return groups

    def _put(self, array: NDArray[Any]) -> torch.Tensor:
        return torch.from_numpy(array).to(self._device)

    def _prefill_part(self, span: PrefillSpan, window: int | None) -> _PrefillPart:
        num_tokens = span.end - span.start
        at = torch.arange(span.num_cached, span.num_cached + num_tokens, device=self._device)
        first = 0
        if window is not None:
            first = max(0, span.num_cached - window + 1) // self._memory.block_size
        skipped = first * self._memory.block_size
        num_keys = span.num_cached + num_tokens - skipped
        of_key = torch.arange(skipped, skipped + num_keys, device=at.device)
        mask = of_key <= at[:, None]
        if window is not None:
            mask &= of_key > at[:, None] - window
        block_ids = self._put(span.block_ids[first:]) if span.num_cached else None
        return _PrefillPart(span.start, span.end, block_ids, num_keys, mask)


def _similar(num_blocks: NDArray[np.int64], block_bytes: int) -> list[tuple[int, int]]:
    """Cut ascending rows into runs whose padding to the longest is small, and whose blocks fill the caches once."""
    sizes = np.ceil(np.log(num_blocks) / np.log(_GROUP_GROWTH))
    cuts = [*(np.flatnonzero(np.diff(sizes)) + 1).tolist(), len(num_blocks)]
    runs, start = [], 0
    for cut in cuts:
        rows = max(1, _GROUP_BYTES // (int(num_blocks[cut - 1]) * block_bytes))
        runs += [(at, min(at + rows, cut)) for at in range(start, cut, rows)]
        start = cut
    return runs


def _attention(
    call: LayerCall, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, mask: torch.Tensor | None
) -> torch.Tensor:
    """Attend (n, heads, queries, head_dim) to (n, kv_heads, keys, head_dim); `mask` is true where to look."""
    grouped = query.shape[1] != keys.shape[1]
    if call.softcap is None:
        return scaled_dot_product_attention(
            query, keys, values, attn_mask=mask, scale=call.scale, enable_gqa=grouped
        )
    if grouped:
        times = query.shape[1] // keys.shape[1]
        keys, values = keys.repeat_interleave(times, 1), values.repeat_interleave(times, 1)
    scores = torch.tanh(query @ keys.transpose(-1, -2) * (call.scale / call.softcap)) * call.softcap
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf)
    return torch.softmax(scores.float(), -1).to(query.dtype) @ values
