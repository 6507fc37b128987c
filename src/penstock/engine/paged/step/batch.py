"""One step as plain arrays, built from the scheduler's plan without a Python loop over rows.

A `StepBatch` has everything that a forward pass needs and no requests, so it could be sent to other tensor-parallel ranks.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from penstock.engine.paged.step.sampling import SamplingColumns, SamplingRows
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
    """What one step computes: decode rows, shortest context first, then prefill spans.

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
