"""Batch slots: the running sequences as columns, for runners and for the scheduler."""

from bisect import insort

import numpy as np
from msgspec.structs import replace
from numpy.typing import NDArray

from penstock.core.ids import BlockId, RequestId
from penstock.core.types.requests import Delta, FinishReason
from penstock.core.wire import PackedTokens
from penstock.engine.scheduling.sequences import Sampled, Sequence, SequenceLimits, SequenceTable, StepPlan
from penstock.kv.pool import BlockPool
from penstock.kv.windows import WindowTables

Int32s = NDArray[np.int32]
Bools = NDArray[np.bool_]


class SequenceSlots:
    """Assigns slots to sequences and keeps their columns. Callers take blocks from the pool and give them back, unless a method says so.

    running:       slots in use, oldest arrival first
    request_ids:   by slot
    num_published: (slots,) int32, leading blocks that are in the prefix cache
    is_fresh:      (slots,) bool, no delta was sent yet
    unbegun:       slots of sequences that no step has computed yet
    windows:       by slot, blocks of the sequence's sliding windows; empty for models with one table of blocks
    in_chunks:     slots whose windows have blocks for chunks of a prompt
    tables:        tables of groups of layers with a window, in place of `windows`; None for models with one table of blocks, and
                   for runners that keep no KV
    """

    def __init__(self, count: int, limits: SequenceLimits, is_eos: Bools, pool: BlockPool) -> None:
        self._pool = pool
        self.tables: WindowTables | None = None
        if limits.groups is not None:
            max_blocks = limits.blocks_for(limits.context_length)
            self.tables = WindowTables(pool, limits.groups, count, max_blocks)
        window_tables = None if self.tables is None else self.tables.block_ids
        self.table = SequenceTable.allocate(count, limits.context_length, limits.block_size, window_tables)
        self.running: list[int] = []
        self.request_ids = [RequestId("")] * count
        self.num_published = np.zeros(count, dtype=np.int32)
        self.is_fresh = np.zeros(count, dtype=np.bool_)
        self.unbegun: set[int] = set()
        self.windows: list[list[BlockId]] = [[] for _ in range(count)]
        self.in_chunks: set[int] = set()
        self._limits = limits
        self._is_eos = is_eos
        self._sequences: list[Sequence | None] = [None] * count
        self._free = list(reversed(range(count)))
        self._end_tokens = np.zeros(count, dtype=np.int32)
        self._stops_after = np.zeros(count, dtype=np.int32)
        self._heeds_eos = np.zeros(count, dtype=np.bool_)
        self._has_stops = np.zeros(count, dtype=np.bool_)

    @property
    def has_free(self) -> bool:
        return bool(self._free)

    def running_array(self) -> Int32s:
        """Copy `running` as (running,) int32."""
        return np.array(self.running, dtype=np.int32)

    def sequence(self, slot: int) -> Sequence:
        """Return the sequence in a slot that is in use."""
        sequence = self._sequences[slot]
        assert sequence is not None, f"slot {slot} is free"
        return sequence

    def assign(self, sequence: Sequence, hits: list[BlockId]) -> int:
        """Put a sequence with its cached blocks into a free slot, and return the slot."""
        table, sampling = self.table, sequence.request.sampling
        known = len(sequence.token_ids)
        slot = sequence.slot = self._free.pop()
        self._sequences[slot] = sequence
        self.request_ids[slot] = sequence.request.request_id
        table.requests[slot] = sequence.request
        table.token_ids[slot, :known] = sequence.token_ids
        table.num_tokens[slot] = known
        table.num_computed[slot] = len(hits) * self._limits.block_size
        table.num_prompt[slot] = sequence.num_prompt
        self.num_published[slot] = len(hits)
        self.is_fresh[slot] = sequence.is_fresh
        if not sequence.has_begun:
            self.unbegun.add(slot)
        self._end_tokens[slot] = sequence.end_tokens
        self._stops_after[slot] = sequence.stops_after
        self._heeds_eos[slot] = not sampling.ignore_eos
        self._has_stops[slot] = bool(sampling.stop_token_ids)
        self.add_blocks(slot, hits)
        insort(self.running, slot, key=lambda other: self.sequence(other).arrival)
        return slot

    def vacate(self, slot: int) -> list[BlockId]:
        """Free a slot. The sequence keeps its tokens, so that it can get a slot again.

        Returns:
            its blocks in order, then those of its windows, for the pool.
        """
        table, sequence = self.table, self.sequence(slot)
        sequence.token_ids = table.token_ids[slot, : table.num_tokens[slot]].copy()
        sequence.is_fresh = bool(self.is_fresh[slot])
        sequence.slot = None
        row = table.block_tables[slot, : table.num_blocks[slot]]
        block_ids: list[BlockId] = [*row.tolist(), *self.take_windows(slot)]
        row[:] = 0
        table.num_blocks[slot] = table.num_tokens[slot] = table.num_computed[slot] = 0
        table.requests[slot] = self._sequences[slot] = None
        self.running.remove(slot)
        self.unbegun.discard(slot)
        self._free.append(slot)
        return block_ids

    def add_blocks(self, slot: int, block_ids: list[BlockId]) -> None:
        start = int(self.table.num_blocks[slot])
        end = start + len(block_ids)
        self.table.block_tables[slot, start:end] = block_ids
        self.table.num_blocks[slot] = end

    def extend(self, slot: int, count: int) -> bool:
        """Append so many blocks of the pool to a slot, in every group of layers; False if the pool has too few."""
        if self.tables is not None and not self.tables.reach(slot, int(self.table.num_blocks[slot]) + count):
            return False
        block_ids = self._pool.allocate(count)
        if block_ids is None:
            return False
        self.add_blocks(slot, block_ids)
        return True

    def publish(self, slots: Int32s) -> None:
        """Put newly full blocks into the pool's prefix cache."""
        num_full = self.table.num_computed[slots] // self._limits.block_size
        for row in np.flatnonzero(num_full > self.num_published[slots]).tolist():
            slot, end = int(slots[row]), int(num_full[row])
            start = int(self.num_published[slot])
            sequence = self.sequence(slot)
            sequence.hash_blocks(self.table.token_ids[slot], end, self._limits)
            hashes = sequence.block_hashes
            block_ids = self.table.block_tables[slot, start:end].tolist()
            self._pool.commit(block_ids, hashes[start:end], int(hashes[start - 1, 0]) if start else None)
            self.num_published[slot] = end
            if self.tables is not None:
                self.tables.advance(slot, end, hashes)

    def add_partial_block(self, slot: int, block_id: BlockId, num_tokens: int) -> None:
        """Append a block whose first `num_tokens` tokens are computed."""
        self.add_blocks(slot, [block_id])
        self.table.num_computed[slot] += num_tokens

    def add_windows(self, slot: int, block_ids: list[BlockId]) -> None:
        """Give a slot the blocks of its windows, for its prompt and its answer."""
        self.windows[slot] = block_ids
        self.in_chunks.add(slot)

    def take_windows(self, slot: int, keep: int = 0) -> list[BlockId]:
        """Take the blocks of a slot's windows but `keep`, which its answer needs."""
        self.in_chunks.discard(slot)
        if self.tables is not None:
            return self.tables.trim(slot, keep) if keep else self.tables.leave(slot)
        blocks = self.windows[slot]
        self.windows[slot] = blocks[:keep]
        return blocks[keep:]

    def keep_window(self, slot: int) -> None:
        """Cache the last window of a slot's full blocks in every group of layers, for requests with the same beginning."""
        if self.tables is not None:
            count = int(self.num_published[slot])
            self.tables.keep(slot, count, self.sequence(slot).block_hashes[:count])

    def append(self, slots: Int32s, token_ids: Int32s) -> tuple[Bools, Bools]:
        """Append one token to each of the slots.

        Returns:
            two (slots,) bool: sequences ended by a stop token, and sequences ended for any reason.
        """
        table = self.table
        num_tokens = table.num_tokens[slots]
        table.token_ids[slots, num_tokens] = token_ids
        num_tokens += 1
        table.num_tokens[slots] = num_tokens
        stopped = self._is_eos[token_ids] & self._heeds_eos[slots]
        for row in np.flatnonzero(self._has_stops[slots]).tolist():
            stop_token_ids = self.sequence(int(slots[row])).request.sampling.stop_token_ids
            stopped[row] |= int(token_ids[row]) in stop_token_ids
        stopped &= num_tokens > self._stops_after[slots]
        return stopped, stopped | (num_tokens >= self._end_tokens[slots])

    def make_deltas(self, slots: Int32s, token_ids: Int32s, stopped: Bools, ended: Bools) -> list[Delta]:
        """Build a delta with one token for each slot, from the arguments and results of `append`."""
        is_plain = ~(ended | self.is_fresh[slots])
        packed = token_ids.astype("<i4", copy=False).tobytes()
        deltas = []
        for index, (slot, plain) in enumerate(zip(slots.tolist(), is_plain.tolist(), strict=True)):
            delta = Delta(
                request_id=self.request_ids[slot],
                token_ids=PackedTokens(packed[4 * index : 4 * index + 4]),
            )
            if not plain:
                delta = replace(
                    delta,
                    finish_reason=_finish_reason(stopped=stopped[index], ended=ended[index]),
                    cached_tokens=self.sequence(slot).cached_tokens if self.is_fresh[slot] else None,
                )
            deltas.append(delta)
        self.is_fresh[slots] = False
        return deltas

    def report(self, plan: StepPlan, sampled: Sampled) -> list[Delta]:
        """Build deltas of the prompts' logprobs, of requests that have not ended."""
        deltas = []
        for row, logprobs in sampled.prompt_logprobs.items():
            slot = int(plan.slots[row])
            if self.table.requests[slot] is not None:
                sequence = self.sequence(slot)
                sequence.reported = max(sequence.reported, logprobs.end)
                deltas.append(Delta(request_id=self.request_ids[slot], prompt_logprobs=(logprobs,)))
        return deltas

    def holders(self) -> dict[BlockId, int]:
        """Count the references to each block, to check the pool's counts."""
        held: dict[BlockId, int] = {}
        for slot in self.running:
            row = self.table.block_tables[slot, : self.table.num_blocks[slot]].tolist()
            for block_id in [*row, *self.windows[slot]]:
                held[block_id] = held.get(block_id, 0) + 1
        for block_id, number in ({} if self.tables is None else self.tables.holders()).items():
            held[block_id] = held.get(block_id, 0) + number
        return held

    def check(self) -> None:
        """Raise AssertionError if the state is inconsistent."""
        table, size = self.table, self._limits.block_size
        in_some_state = sorted([*self.running, *self._free])
        assert in_some_state == list(range(len(self._sequences))), "a slot is lost, or both free and running"
        arrivals = [self.sequence(slot).arrival for slot in self.running]
        assert arrivals == sorted(arrivals), "running slots are not in order of arrival"
        for slot in self.running:
            sequence = self.sequence(slot)
            assert sequence.slot == slot, f"slot {slot}: its sequence thinks it is in {sequence.slot}"
            assert table.requests[slot] is sequence.request, f"slot {slot}: another request is in the table"
            known, computed = int(table.num_tokens[slot]), int(table.num_computed[slot])
            blocks, published = int(table.num_blocks[slot]), int(self.num_published[slot])
            assert 0 <= computed < known <= self._limits.context_length, f"slot {slot}: {computed} of {known}"
            assert computed <= blocks * size, f"slot {slot}: {computed} tokens in {blocks} blocks"
            assert published == computed // size, f"slot {slot}: {published} blocks for {computed} tokens"
            assert not table.block_tables[slot, blocks:].any(), f"slot {slot}: blocks past num_blocks"
            if self.tables is not None:
                self.tables.check(slot, published, blocks)
        for slot in self._free:
            assert self._sequences[slot] is None, f"slot {slot} is free and taken"
            assert table.requests[slot] is None, f"slot {slot} is free and has a request in the table"
            assert not table.num_blocks[slot], f"slot {slot} is free and has blocks"
            assert not self.windows[slot], f"slot {slot} is free and has blocks of windows"


def _finish_reason(*, stopped: bool, ended: bool) -> FinishReason | None:
    if stopped:
        return FinishReason.STOP
    return FinishReason.LENGTH if ended else None
