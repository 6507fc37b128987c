"""Admission of waiting requests into the batch, in queue order, as soon as blocks and a slot are free."""

from collections.abc import Callable, Mapping
from collections.abc import Sequence as SequenceOf

import numpy as np
from numpy.typing import NDArray

from penstock.core.ids import BlockId
from penstock.core.types.load import KvTierCounts
from penstock.engine.scheduling.config import SchedulerConfig
from penstock.engine.scheduling.order import WaitingQueue
from penstock.engine.scheduling.prefixes import CachedPrefix, PartialBlocks, Prefixes
from penstock.engine.scheduling.sequences import Sequence, SequenceLimits
from penstock.engine.scheduling.slots import Int32s, SequenceSlots
from penstock.kv.loader import Arrival
from penstock.kv.manager import KvManager
from penstock.kv.operator_pins import OperatorPins
from penstock.kv.pool import BlockPool, Pins
from penstock.kv.windows import WindowPins


class BatchAdmission:
    """Gives waiting sequences a slot, their cached blocks, and blocks for their first chunk.

    One scheduler owns it and shares its queue, slots and pool with it.
    """

    def __init__(
        self,
        waiting: WaitingQueue[Sequence],
        slots: SequenceSlots,
        pool: BlockPool,
        *,
        limits: SequenceLimits,
        config: SchedulerConfig,
        kv: KvManager | None,
    ) -> None:
        self.config = config
        self.prefixes = Prefixes(waiting, pool, kv, limits, config)
        """Cached blocks of waiting requests."""
        windows = self.prefixes.windows
        self.pins = (
            Pins(pool, self.look_again) if windows is None else WindowPins(pool, windows, self.look_again)
        )
        """Blocks pinned for KV transfers and by operators."""
        self.partial_blocks = PartialBlocks(self.pins)
        """Pinned partial blocks, which have no hash."""
        self.operator_pins = OperatorPins(pool, self.pins, config.retention)
        """Prefixes that operators keep."""
        self.prefix_hit_tokens = 0
        """Tokens found in the prefix cache, since start."""
        self._waiting = waiting
        self._slots = slots
        self._pool = pool
        self._limits = limits
        self._kv = kv
        self._is_blocked = False  # the first request did not fit, and no block was freed since

    def look_again(self) -> None:
        """Try to admit again in the next step: blocks were freed, or another request is first."""
        self._is_blocked = False
        self.prefixes.look_again()

    def admit(self, budget: int, *, before: float | None = None) -> tuple[list[int], list[int]]:
        """Move waiting requests into the batch, in queue order, while they fit.

        A request fits if there are blocks for all its known tokens and one more, beyond the blocks that running prefills
        still need and one block of growth for each running request. Otherwise it would soon be preempted.

        Args:
            budget: tokens left in this step.
            before: admit only requests of a lower rank than this; None: any.

        Returns:
            slots of the admitted requests, and the tokens that each computes in this step.
        """
        slots: list[int] = []
        counts: list[int] = []
        if not self._waiting or self._is_blocked or budget <= 0 or not self._slots.has_free:
            return slots, counts
        self._waiting.rank_new(self.prefixes.lacking)
        reserved = self.blocks_reserved()
        _, prompt_budget = self.config.step_limits(self._waiting.turn_tokens)
        while self._waiting and budget > 0 and self._slots.has_free:
            sequence = self._waiting.first
            if before is not None and sequence.rank is not None and sequence.rank >= before:
                break
            size, known = self._limits.block_size, len(sequence.token_ids)
            cached = self.prefixes.find(sequence)
            hits = cached.hits
            given_tokens = 0 if cached.runs else self._given_tokens(sequence, (known - 1) // size - len(hits))
            windows = self.prefixes.window_blocks(sequence, len(hits) + cached.num_lower)
            needed = known // size + 1 - len(hits) - len(cached.targets or ()) - bool(given_tokens) + windows
            free = self._pool.num_available - self._pool.count_idle(hits)
            if cached.windows:
                held = [block_id for group in cached.windows for block_id in group]
                free -= self._pool.count_idle(held)
                # alone it shares them with nobody: each falls behind the window before another takes its place
                needed -= 0 if self._slots.running else len(held)
            if needed + reserved > free:
                if self.prefixes.give_way(sequence):
                    continue
                if self.partial_blocks.free_all_given():
                    continue
                if not self._slots.running and self.operator_pins.give_way():
                    continue  # nothing else would free blocks
                self._is_blocked = True
                break
            if cached.runs:
                slot = self._admit_loading(sequence, cached, windows)
            else:
                lacking = known - len(hits) * size - given_tokens
                count = min(budget, prompt_budget, lacking)
                slot = self._admit(sequence, cached, windows, given_tokens, count)
                self._waiting.note(sequence, lacking - count)
                budget -= count
                slots.append(slot)
                counts.append(count)
            reserved += 1 + known // size + 1 - int(self._slots.table.num_blocks[slot])
            if self._slots.tables is not None:
                reserved += self._slots.tables.num_owed(slot)
        return slots, counts

    def count_free(self) -> int:
        """Count the blocks that running requests will not need."""
        return self._pool.num_available - self.blocks_reserved()

    def blocks_reserved(self) -> int:
        """Count the blocks that running requests will need: for the rest of their prefill, and one more each."""
        running, table = self._slots.running_array(), self._slots.table
        lacking = table.num_tokens[running] // self._limits.block_size + 1 - table.num_blocks[running]
        reserved = len(running) + int(np.maximum(lacking, 0).sum())
        if self._slots.tables is not None:
            reserved += sum(map(self._slots.tables.num_owed, self._slots.running))
        return reserved

    def end_chunks(self, slots: NDArray[np.int32]) -> None:
        """Free the blocks that windows needed for a prompt's chunks alone, of requests that sample their first token."""
        if not self._slots.in_chunks:
            return
        windows, size = self._limits.windows, self._limits.block_size
        for slot in self._slots.in_chunks.intersection(slots.tolist()):
            end_tokens = self._slots.sequence(slot).end_tokens
            freed = self._slots.take_windows(slot, windows.blocks(end_tokens, 1, size))
            if freed:
                self._pool.release(freed)
                self.look_again()

    def _given_tokens(self, sequence: Sequence, lacking: int) -> int:
        """Count the computed tokens in a request's given partial block; free a block that is of no use.

        With `lacking` full blocks missing, or with more tokens than the request has after its full blocks, it is of no use.
        """
        given_tokens = self.partial_blocks.given_tokens(sequence.request.request_id)
        if lacking or given_tokens > (len(sequence.token_ids) - 1) % self._limits.block_size:
            self.partial_blocks.free_given(sequence.request.request_id)
            return 0
        return given_tokens

    def readmit(self, sequence: Sequence, expected: int) -> int:
        """Give a request whose load of `expected` tokens has failed, and that has just left its slot, one again with what the device has."""
        self.prefix_hit_tokens -= expected
        sequence.is_short = True
        if not sequence.has_begun:
            sequence.cached_tokens = None
        self._waiting.push_front(sequence)
        cached = self.prefixes.find(sequence)
        windows = self.prefixes.window_blocks(sequence, len(cached.hits))
        return self._admit(sequence, cached, windows, given_tokens=0, num_new=0)

    def _admit(
        self, sequence: Sequence, found: CachedPrefix, windows: int, given_tokens: int, num_new: int
    ) -> int:
        """Give a waiting request a slot, its cached blocks, and blocks for its first `num_new` tokens."""
        hits = found.hits
        cached = len(hits) * self._limits.block_size
        slot = self._assign_slot(sequence, found, cached, windows)
        if given_tokens:
            block_id = self.partial_blocks.take_given(sequence.request.request_id)
            self._slots.add_partial_block(slot, block_id, given_tokens)
        lacking = self._limits.blocks_for(cached + given_tokens + num_new) - len(hits) - bool(given_tokens)
        block_ids = self._pool.allocate(lacking)
        assert block_ids is not None, "admitted without room"
        self._slots.add_blocks(slot, block_ids)
        if self._slots.tables is not None:
            has_all = self._slots.tables.reach(slot, int(self._slots.table.num_blocks[slot]))
            assert has_all, "admitted without room"
        return slot

    def _assign_slot(self, sequence: Sequence, found: CachedPrefix, cached: int, windows: int) -> int:
        """Give a waiting request a slot, its cached blocks on the device and `windows` blocks; it need not compute `cached` tokens."""
        hits = found.hits
        self._waiting.remove(sequence)
        self._pool.acquire(hits)
        for held in found.windows:
            self._pool.acquire(held)
        self.prefixes.pass_on(sequence)
        self.prefix_hit_tokens += cached
        if sequence.cached_tokens is None:
            sequence.cached_tokens = min(cached, sequence.num_prompt)
        slot = self._slots.assign(sequence, hits)
        if windows and (found.end is None or not found.runs):
            self._add_windows(slot, sequence, found, windows)
        return slot

    def _add_windows(
        self,
        slot: int,
        sequence: Sequence,
        found: CachedPrefix,
        windows: int,
        loading: SequenceOf[BlockId] = (),
    ) -> None:
        """Give a slot `windows` blocks for its windows, those of its prefix included: on the device, or `loading`."""
        tables, prefixes = self._slots.tables, self.prefixes.windows
        num_held = sum(map(len, found.windows)) + len(loading)
        spare = self._pool.allocate(max(windows - num_held, 0))
        assert spare is not None, "admitted without room"
        if tables is None or prefixes is None or found.end is None:
            self._slots.add_windows(slot, spare)
            return
        self._slots.in_chunks.add(slot)
        held = prefixes.by_group(loading, found.end) if found.runs else found.windows
        tables.admit(slot, spare, held, found.end, are_hits=not found.runs)
        known, size = len(sequence.token_ids), self._limits.block_size
        for end in (found.num_found, (known - 1) // size, known // size):
            if end > found.end:
                tables.keep_at(slot, end)

    def _admit_loading(self, sequence: Sequence, cached: CachedPrefix, windows: int) -> int:
        """Give a waiting request a slot and load its blocks from lower tiers; it computes once they have arrived."""
        assert self._kv is not None, "found runs"
        size, request_id = self._limits.block_size, sequence.request.request_id
        self.partial_blocks.free_given(request_id)
        if sequence.cached_tokens is None and cached.targets is None:
            lacking = sequence.num_prompt - len(cached.hits) * size
            self._kv.count(cached.runs, min(cached.num_lower * size, lacking))
        num_cached = (len(cached.hits) + cached.num_lower) * size
        slot = self._assign_slot(sequence, cached, num_cached, windows)
        if cached.end is not None:
            tokens = cached.num_lower * size
            targets = self._kv.begin(request_id, cached.runs, whole_tokens=tokens)
            self._slots.add_blocks(slot, targets[: cached.num_lower])
            self._add_windows(slot, sequence, cached, windows, targets[cached.num_lower :])
            return slot
        targets = self._kv.begin(request_id, cached.runs) if cached.targets is None else cached.targets
        self._slots.add_blocks(slot, targets)
        return slot


class StepBudget:
    """Shares the budget of each step of one scheduler among its requests."""

    def __init__(
        self,
        waiting: WaitingQueue[Sequence],
        slots: SequenceSlots,
        admission: BatchAdmission,
        config: SchedulerConfig,
    ) -> None:
        self.config = config
        self._waiting = waiting
        self._slots = slots
        self._admission = admission

    @property
    def limits(self) -> tuple[int, int]:
        """Most tokens of the next step, and of one prompt in it."""
        return self.config.step_limits(self._waiting.turn_tokens)

    def share(self, slots: Int32s, remaining: Int32s) -> tuple[Int32s, list[int], list[int]]:
        """Distribute the token budget: one token for each decode row, the rest to prefill rows in order.

        Decode rows never exceed the budget: a request is admitted only if a token is left after one for each row.

        Returns:
            tokens of each row; where prompts are ranked also the slots admitted before some running prefill, and their tokens.
        """
        decode = remaining == 1
        left = self.limits[0] - int(np.count_nonzero(decode))
        if self._waiting.ranked is not None:
            return self._share_by_turn(slots, remaining, left)
        prefill = np.where(remaining > 1, np.minimum(remaining, self.config.prompt_budget), 0)
        before = np.cumsum(prefill) - prefill
        shared: Int32s = (decode + np.clip(left - before, 0, prefill)).astype(np.int32)
        return shared, [], []

    def _share_by_turn(
        self, slots: Int32s, remaining: Int32s, left: int
    ) -> tuple[Int32s, list[int], list[int]]:
        """Distribute like `share`, with waiting and running prompts ranked in one order."""
        ranked = self._waiting.ranked
        assert ranked is not None, "asked only where prompts are ranked"
        order, (_, prompt_budget) = ranked.order, self.limits
        shared = (remaining == 1).astype(np.int32)
        new_slots: list[int] = []
        new_counts: list[int] = []
        lacking = [(row, int(remaining[row])) for row in np.flatnonzero(remaining > 1).tolist()]
        if not lacking and not self._waiting:
            order.on_idle()
        sequences = [self._slots.sequence(int(slots[row])) for row, _ in lacking]
        ranks = [
            (order.rank(sequence, tokens), row, tokens, sequence)
            for sequence, (row, tokens) in zip(sequences, lacking, strict=True)
        ]
        for rank, row, tokens, sequence in sorted(ranks, key=lambda each: each[:2]):
            more_slots, more_counts = self._admission.admit(left, before=rank)
            new_slots += more_slots
            new_counts += more_counts
            left -= sum(more_counts)
            shared[row] = min(left, prompt_budget, tokens)
            left -= int(shared[row])
            order.note(sequence, tokens - int(shared[row]))
        return shared, new_slots, new_counts


class Loading:
    """The slots of one scheduler that wait for lower tiers. Without such tiers nothing ever waits."""

    def __init__(self, kv: KvManager | None, slots: SequenceSlots, limits: SequenceLimits) -> None:
        self._kv = kv
        self._slots = slots
        self._limits = limits
        self._unstepped: set[int] = set()

    @property
    def tokens(self) -> tuple[int, ...]:
        """Prompt tokens found in each lower `Tier`, host first; empty without tiers."""
        return () if self._kv is None else self._kv.tokens

    @property
    def counts(self) -> tuple[KvTierCounts, ...]:
        """What each tier keeps, and has done since start; empty without tiers."""
        return () if self._kv is None else self._kv.counts

    def is_loading(self, slots: Int32s) -> NDArray[np.bool_]:
        """Mask the slots whose prefix is still being loaded."""
        if self._kv is None:
            return np.zeros(len(slots), dtype=np.bool_)
        is_under_way, ids = self._kv.is_under_way, self._slots.request_ids
        return np.array([is_under_way(ids[slot]) for slot in slots.tolist()], dtype=np.bool_)

    def prompts_left(self) -> list[tuple[int, int]]:
        """List what is left to compute of running prompts once their prefixes are loaded, as (tokens, tokens before them)."""
        table, slots = self._slots.table, self._slots.running_array()
        loaded = table.num_blocks[slots] * self._limits.block_size
        computed = np.where(self.is_loading(slots), loaded, table.num_computed[slots])
        left = table.num_tokens[slots] - computed
        return list(zip(left[left > 1].tolist(), computed[left > 1].tolist(), strict=True))

    def is_unstepped(self, slots: Int32s) -> NDArray[np.bool_]:
        """Mask the slots whose prefix was loaded and that no step has computed since: their first step is a prefill row."""
        if not self._unstepped:
            return np.zeros(len(slots), dtype=np.bool_)
        return np.isin(slots, list(self._unstepped))

    def step(self, slots: Int32s) -> None:
        """Tell which slots the next step computes."""
        if self._unstepped:
            self._unstepped.difference_update(slots.tolist())

    def count_offloading(self, *others: Callable[[], Mapping[BlockId, int]]) -> int:
        """Count the device blocks that are held for an offload alone, by no running request and none of the other holders."""
        held = set() if self._kv is None else set(self._kv.offloading())
        if held:
            for holders in (self._slots.holders, *others):
                held.difference_update(holders())
        return len(held)

    def begin_again(self, slot: int) -> None:
        """Tell of a slot that was given again to a request whose load has failed."""
        self._unstepped.add(slot)

    def take_arrived(self, waiting: Callable[[Arrival], None]) -> tuple[list[int], int, list[int]]:
        """Count what was loaded as computed, also of loads that go on.

        Args:
            waiting: called with what has arrived of requests that still wait.

        Returns:
            the slots of which more was loaded since the last call, the tokens that loads which have ended did not bring, and
            the slots whose load is of no use, in a model with several groups of layers: they need all of it.
        """
        arrived: list[int] = []
        failed: list[int] = []
        lacking = 0
        if self._kv is None:
            return arrived, lacking, failed
        slot_of = {self._slots.request_ids[slot]: slot for slot in self._slots.running}
        table, size = self._slots.table, self._limits.block_size
        for arrival in self._kv.take_arrived():
            slot = slot_of.get(arrival.request_id)
            if slot is None:
                waiting(arrival)
                continue
            if self._slots.tables is not None:
                num_lower = int(table.num_blocks[slot] - self._slots.num_published[slot])
                if arrival.num_blocks < num_lower + self._slots.tables.num_blocks(slot):
                    failed.append(slot)
                    continue
                table.num_computed[slot] = table.num_blocks[slot] * size
            else:
                start = int(table.num_computed[slot]) // size
                table.block_tables[slot, start : start + arrival.num_blocks] = arrival.block_ids
                table.num_computed[slot] += arrival.num_blocks * size
            arrived.append(slot)
            if not arrival.is_over:
                continue
            expected = int(table.num_blocks[slot]) * size
            lacking += expected - int(table.num_computed[slot])
            sequence = self._slots.sequence(slot)
            if sequence.cached_tokens is not None:
                sequence.cached_tokens = min(sequence.cached_tokens, int(table.num_computed[slot]))
            self._unstepped.add(slot)
        return arrived, lacking, failed

    def leave(self, slot: int) -> None:
        """Cancel the load of a slot that is about to be freed, and offload its full blocks."""
        if self._kv is None:
            return
        self._unstepped.discard(slot)
        self._kv.cancel(self._slots.request_ids[slot])
        count = int(self._slots.num_published[slot])
        if count:
            hashes, tables = self._slots.sequence(slot).block_hashes[:count], self._slots.tables
            self._kv.offload(hashes, [] if tables is None else list(tables.kept(slot, hashes)))
