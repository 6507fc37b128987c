"""The scheduler: plans each step and applies its outcome to the requests.

Continuous batching with chunked prefill: decode rows first, then prefill chunks, within a token budget per step. Prompts are
served oldest first or shortest first, those of several tenants in turns (see `order`). When blocks run out, the newest request is preempted and
computed again later; its blocks stay cached, which makes that cheap. The oldest request always fits, so there is always
progress. A step costs a few array operations over slots; Python runs per row only where a row fills a block or ends.
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from itertools import count

import numpy as np
from msgspec.structs import replace
from numpy.typing import NDArray

from penstock.core.errors import EngineError, Overloaded, PenstockError, RequestError
from penstock.core.ids import BlockId, RequestId
from penstock.core.types.instances import Role
from penstock.core.types.load import Step, WorkerLoad
from penstock.core.types.requests import Delta, FinishReason, Request
from penstock.engine.scheduling.admission import BatchAdmission, Loading, StepBudget
from penstock.engine.scheduling.config import SchedulerConfig
from penstock.engine.scheduling.order import ShortestFirst, WaitingQueue
from penstock.engine.scheduling.sequences import Sampled, Sequence, SequenceLimits, SequenceTable, StepPlan
from penstock.engine.scheduling.slots import Int32s, SequenceSlots
from penstock.kv.eviction import BlockUse
from penstock.kv.groups import GroupEvents
from penstock.kv.manager import KvManager
from penstock.kv.pool import BlockPool
from penstock.kv.retention import Retention


class Scheduler:
    """Owns an engine's requests, its `SequenceTable` and its pool.

    A step is `plan`, the runner's work, then `commit` or `fail`. Between `plan` and `commit` the runner reads the table;
    `submit` and `abort` may be called then and take effect afterwards. The scheduler has no clock: callers enforce
    deadlines. Not thread-safe; one task owns it.
    """

    def __init__(
        self,
        pool: BlockPool,
        limits: SequenceLimits,
        config: SchedulerConfig,
        *,
        eos_token_ids: Iterable[int] = (),
        kv: KvManager | None = None,
    ) -> None:
        """Make a scheduler without requests.

        Args:
            pool: the engine's blocks.
            limits: bounds of every request.
            config: bounds of batch and queue.
            eos_token_ids: end-of-sequence tokens.
            kv: the tiers below the device; None without.
        """
        self._pool = pool
        self._kv = kv
        self._limits = limits
        self._config = config
        is_eos = np.zeros(limits.vocab_size, dtype=np.bool_)
        is_eos[list(eos_token_ids)] = True
        self._arrivals = count()
        self._by_id: dict[RequestId, Sequence] = {}
        self._waiting: WaitingQueue[Sequence] = WaitingQueue()
        self._slots = SequenceSlots(config.max_running_requests, limits, is_eos, pool)
        self._under_way: StepPlan | None = None
        self._aborted_slots: set[int] = set()  # aborted during the current step
        self._admission = BatchAdmission(
            self._waiting, self._slots, pool, limits=limits, config=config, kv=kv
        )
        self.pins, self.partial_blocks = self._admission.pins, self._admission.partial_blocks
        self.operator_pins, self._prefixes = self._admission.operator_pins, self._admission.prefixes
        self._told = None if limits.groups is None else GroupEvents(limits.groups, limits.block_size)
        self._retention = Retention(pool, config.retention)
        self._budget = StepBudget(self._waiting, self._slots, self._admission, config)
        self._loading = Loading(kv, self._slots, limits)
        if kv is not None:
            kv.watch(self._admission.look_again)
        self._steps = self._failed_steps = self._preemptions = 0
        self._prefilled_tokens = self._generated_tokens = 0
        self.assume(Role.AGGREGATED, config)

    @property
    def table(self) -> SequenceTable:
        """The running sequences, for runners."""
        return self._slots.table

    def assume(self, role: Role, config: SchedulerConfig) -> None:
        """Apply the token budget and queue order of a role; the number of slots stays the same."""
        self._config = self._admission.config = self._budget.config = self._prefixes.config = config
        self._waiting.reorder(ShortestFirst(config.ageing) if config.is_shortest_first(role) else None)
        self._admission.look_again()
        self.operator_pins.clear()

    # ---- requests in and out --------------------------------------------------------------------------

    def submit(self, request: Request) -> None:
        """Queue a request.

        Raises:
            RequestError: it can never run here, or the TTL of its KV is too long.
            Overloaded: the queue is full.
        """
        if request.request_id in self._by_id:
            raise RequestError(f"request_id: {request.request_id!r} is under way already; choose another")
        sequence = Sequence.of(
            request, self._limits, arrival=next(self._arrivals), since_tokens=self._prefilled_tokens
        )
        if len(self._waiting) >= self._config.max_waiting_requests:
            raise Overloaded(
                f"{len(self._waiting)} requests wait already, max_waiting_requests; try again later",
                retry_after_s=1.0,
            )
        self._retention.arrive(request)
        self._by_id[request.request_id] = sequence
        self._waiting.push(sequence)
        self._prefixes.look_again()
        if self._waiting.ranked is not None:
            self._admission.look_again()  # it may be the first now

    def abort(self, request_id: RequestId) -> None:
        """Drop a request without a further delta; an unknown id is no error."""
        sequence = self._by_id.pop(request_id, None)
        if sequence is None:
            return
        if sequence.slot is not None and self._under_way is not None:
            self._aborted_slots.add(sequence.slot)
        else:
            self._drop(sequence)

    def give_partial_block(self, request_id: RequestId, block_id: BlockId, num_tokens: int) -> None:
        """Give a pinned block to a request that was just submitted; see `seams.KvPartialBlocks`."""
        sequence = self._by_id.get(request_id)
        if sequence is None or sequence.slot is not None:
            self.pins.unpin([block_id])
        else:
            self.partial_blocks.give(request_id, block_id, num_tokens)

    # ---- one step -------------------------------------------------------------------------------------

    @property
    def has_requests(self) -> bool:
        """Whether any request runs or waits."""
        return bool(self._by_id)

    def plan(self) -> StepPlan | None:
        """Choose what to compute next; None if there is nothing (`take_step` may still return events)."""
        self.check_between_steps()
        self.partial_blocks.free_kept()
        self._publish_arrived()
        table = self.table
        slots = self._slots.running_array()
        remaining = table.num_tokens[slots] - table.num_computed[slots]
        remaining[self._loading.is_loading(slots)] = 0
        num_new, new_slots, new_counts = self._budget.share(slots, remaining)
        kept = self._grow(slots, num_new)
        if kept == len(slots):
            left = self._budget.limits[0] - int(num_new.sum()) - sum(new_counts)
            more_slots, more_counts = self._admission.admit(left)
            new_slots += more_slots
            new_counts += more_counts
            self._prefixes.hold(self._admission.count_free, self._loading.prompts_left)
        else:  # out of blocks: no request was admitted
            slots, num_new, remaining = slots[:kept], num_new[:kept], remaining[:kept]
        is_unstepped = self._loading.is_unstepped(slots)
        is_decode = (remaining == 1) & ~is_unstepped
        is_prefill = ((remaining > 1) | is_unstepped) & (num_new > 0)
        slots = np.concatenate((slots[is_decode], slots[is_prefill], np.array(new_slots, dtype=np.int32)))
        if not len(slots):
            return None
        self._loading.step(slots)
        num_new = np.concatenate(
            (num_new[is_decode], num_new[is_prefill], np.array(new_counts, dtype=np.int32))
        )
        self._under_way = StepPlan(
            slots=slots,
            num_new=num_new,
            num_decode=int(np.count_nonzero(is_decode)),
            samples=table.num_computed[slots] + num_new == table.num_tokens[slots],
        )
        return self._under_way

    def begin(self, plan: StepPlan) -> tuple[RequestId, ...]:
        """List the requests of a plan that no step has computed before, and mark them as begun."""
        unbegun = self._slots.unbegun
        if not unbegun:
            return ()
        begun = [slot for slot in plan.slots.tolist() if slot in unbegun]
        for slot in begun:
            self._slots.sequence(slot).has_begun = True
        unbegun.difference_update(begun)
        return tuple(self._slots.request_ids[slot] for slot in begun)

    def requests_of(self, plan: StepPlan) -> list[RequestId]:
        """List the requests of a plan, including those aborted since."""
        return [self._slots.request_ids[slot] for slot in plan.slots.tolist()]

    def commit(self, plan: StepPlan, sampled: Sampled) -> Step:
        """Apply the runner's results: publish full blocks, append tokens, end finished and failed requests.

        Raises:
            EngineError: a token is not in the vocabulary; nothing was applied.
        """
        samples = plan.samples.copy()
        samples[list(sampled.errors)] = False
        rows = np.flatnonzero(samples)
        token_ids = sampled.token_ids[rows]
        if ((token_ids < 0) | (token_ids >= self._limits.vocab_size)).any():
            raise EngineError(f"sampled a token that is not in the vocabulary of {self._limits.vocab_size}")
        self._under_way = None
        self._steps += 1
        self._prefilled_tokens += int(plan.num_new[plan.num_decode :].sum())
        self.table.num_computed[plan.slots] += plan.num_new
        self._slots.publish(plan.slots)
        if self._aborted_slots:
            rows = rows[np.isin(plan.slots[rows], list(self._aborted_slots), invert=True)]
            self._vacate_aborted()
        self._admission.end_chunks(plan.slots[plan.samples])
        prefilling = self._prefilling(plan)
        failed = self._end_rows(plan, sampled.errors)
        reported = self._slots.report(plan, sampled)
        return self._make_step(failed + reported + self._append(plan, rows, sampled), prefilling)

    def fail(self, plan: StepPlan, error: PenstockError) -> Step:
        """End the requests of a plan whose step failed; nothing that it computed is kept."""
        self._under_way = None
        self._steps += 1
        self._failed_steps += 1
        self._vacate_aborted()
        return self._make_step(self._end_rows(plan, dict.fromkeys(range(len(plan.slots)), error)))

    def take_step(self) -> Step | None:
        """Return what happened outside of steps: KV events, such as those of imported blocks, and pins that ended.

        Returns:
            None if nothing happened.
        """
        has_unreported, self.operator_pins.has_unreported = self.operator_pins.has_unreported, False
        step = self._make_step([])
        return step if step.events or has_unreported else None

    def check_between_steps(self) -> None:
        """Raise AssertionError during a step."""
        assert self._under_way is None, "a step is under way: blocks may move only between steps"

    def reserve(self, count: int) -> list[BlockId] | None:
        """Pin free blocks for a transfer to write; None if running requests will need them."""
        return None if count > self._admission.count_free() else self.pins.reserve(count)

    def load(self) -> WorkerLoad:
        table, pool = self.table, self._pool
        running = self._slots.running_array()
        remaining = table.num_tokens[running] - table.num_computed[running]
        loaded = table.num_tokens[running] - table.num_blocks[running] * self._limits.block_size
        remaining = np.where(self._loading.is_loading(running), loaded, remaining)
        return WorkerLoad(
            running_requests=len(running),
            waiting_requests=len(self._waiting),
            active_blocks=pool.num_active
            - self._loading.count_offloading(self.pins.holders, self._prefixes.holders)
            - self._prefixes.num_taken,
            cached_blocks=pool.num_cached,
            total_blocks=pool.num_blocks,
            queued_prefill_tokens=self._waiting.num_tokens + int(remaining[remaining > 1].sum()),
            context_tokens=int(table.num_computed[running].sum()),
            steps=self._steps,
            preemptions=self._preemptions,
            prefilled_tokens=self._prefilled_tokens,
            prefix_hit_tokens=self._admission.prefix_hit_tokens,
            generated_tokens=self._generated_tokens,
            failed_steps=self._failed_steps,
            kv_tiers=self._loading.counts,
            onboarded_tokens=self._loading.tokens,
            pinned_blocks=self.operator_pins.num_kept,
        )

    def check(self) -> None:
        """Raise AssertionError if the state is inconsistent."""
        self._pool.check()
        self._slots.check()
        self._waiting.check()
        if self._kv is not None:
            self._kv.check()
        waiting = {request_id for request_id, sequence in self._by_id.items() if sequence.slot is None}
        self.partial_blocks.check(waiting)
        self.operator_pins.check()
        self._prefixes.check()
        held = Counter(self._slots.holders())
        held.update(self.pins.holders())
        held.update(self._prefixes.holders())
        if self._kv is not None:
            held.update(self._kv.holders())
        assert held == self._pool.references(), "sequences and pins hold other blocks than the pool thinks"
        known = len(self._by_id) + len(self._aborted_slots)
        assert known == len(self._slots.running) + len(self._waiting), "a request is lost"
        queued = [sequence for sequence in self._by_id.values() if sequence in self._waiting]
        assert all(sequence.slot is None for sequence in queued), "a waiting request has a slot"
        if self._waiting and self._slots.running and self._waiting.ranked is None:
            newest = self._slots.sequence(self._slots.running[-1])
            assert newest.arrival < self._waiting.first.arrival, (
                "an older request waits while a newer one runs"
            )

    # ---- planning -------------------------------------------------------------------------------------

    def _grow(self, slots: Int32s, num_new: Int32s) -> int:
        """Allocate blocks for the rows' new tokens, oldest row first; preempt the newest rows when blocks run out.

        Returns:
            how many of the leading rows still run.
        """
        table = self.table
        ends = table.num_computed[slots] + num_new
        lacking = -(-ends // self._limits.block_size) - table.num_blocks[slots]
        for row in np.flatnonzero(lacking > 0).tolist():
            while row < len(self._slots.running):  # rows admitted in this step come last and fit anyway
                if self._slots.extend(int(slots[row]), int(lacking[row])):
                    break
                if self._prefixes.give_way():
                    continue
                if self.partial_blocks.free_all_given():
                    continue
                if len(self._slots.running) == 1 and self.operator_pins.give_way():
                    continue
                self._preempt(self._slots.running[-1])
        return min(len(self._slots.running), len(slots))

    def _preempt(self, slot: int) -> None:
        """Put a running request back to the front of the queue; its blocks stay cached until they are evicted."""
        sequence = self._slots.sequence(slot)
        self._vacate(slot, use=None)
        self._waiting.push_front(sequence)
        self._preemptions += 1

    def _publish_arrived(self) -> None:
        """Publish blocks that were loaded from lower tiers, and let requests with all of theirs compute the rest."""
        slots, lacking, failed = self._loading.take_arrived(self._prefixes.arrived)
        for slot in failed:
            self._give_up_prefix(slot)
        if slots:
            self._admission.prefix_hit_tokens -= lacking
            self._slots.publish(np.array(slots, dtype=np.int32))

    def _give_up_prefix(self, slot: int) -> None:
        """Let a request go on with what the device has, since a load brought not all that its groups of layers need."""
        sequence, num_blocks = self._slots.sequence(slot), int(self.table.num_blocks[slot])
        self._vacate(slot)
        self._loading.begin_again(self._admission.readmit(sequence, num_blocks * self._limits.block_size))

    # ---- outcomes -------------------------------------------------------------------------------------

    def _append(self, plan: StepPlan, rows: NDArray[np.intp], sampled: Sampled) -> list[Delta]:
        """Append the sampled tokens, build their deltas, and end finished requests."""
        slots, token_ids = plan.slots[rows], sampled.token_ids[rows]
        stopped, ended = self._slots.append(slots, token_ids)
        self._generated_tokens += len(slots)
        deltas = self._slots.make_deltas(slots, token_ids, stopped, ended)
        for row in sampled.logprobs.keys() | sampled.embeddings.keys():
            if (index := int(np.searchsorted(rows, row))) < len(rows) and rows[index] == row:
                logprobs = (sampled.logprobs[row],) if row in sampled.logprobs else ()
                embedding = sampled.embeddings.get(row, b"")
                deltas[index] = replace(deltas[index], logprobs=logprobs, embedding=embedding)
        for slot in slots[ended].tolist():
            del self._by_id[self._slots.request_ids[slot]]
            self._keep_partial_block(slot)
            self._end(slot)
        return deltas

    def _keep_partial_block(self, slot: int) -> None:
        """Keep the last block of a prefill-only request if it is partial, since the prefix cache cannot hold it."""
        request, computed = self.table.requests[slot], int(self.table.num_computed[slot])
        full, tail = divmod(computed, self._limits.block_size)
        if request is not None and request.prefill_only and tail:
            self.partial_blocks.keep(request.request_id, BlockId(int(self.table.block_tables[slot, full])))

    def _prefilling(self, plan: StepPlan) -> tuple[RequestId, ...]:
        """List requests with a prefill chunk in this step whose prompt is not finished."""
        if plan.num_decode == len(plan.slots):
            return ()
        slots = plan.slots[~plan.samples].tolist()
        requests = (self.table.requests[slot] for slot in slots)
        return tuple(request.request_id for request in requests if request is not None)

    def _make_step(self, deltas: list[Delta], prefilling: tuple[RequestId, ...] = ()) -> Step:
        events = self._pool.take_events()
        if self._kv is not None:
            events = self._kv.with_events(events)
        if self._told is not None:
            events = tuple(self._told.translate(events))
        return Step(deltas=tuple(deltas), events=events, load=self.load(), prefilling=prefilling)

    def _end_rows(self, plan: StepPlan, errors: Mapping[int, PenstockError]) -> list[Delta]:
        """End the requests of these rows, each with a last delta that carries its error."""
        deltas = []
        for row, error in errors.items():
            slot = int(plan.slots[row])
            request = self.table.requests[slot]
            if request is None:
                continue  # it was aborted
            del self._by_id[request.request_id]
            self._end(slot)
            deltas.append(
                Delta(request_id=request.request_id, finish_reason=FinishReason.ERROR, error=error.to_info())
            )
        return deltas

    def _drop(self, sequence: Sequence) -> None:
        if sequence.slot is not None:
            self._end(sequence.slot)
        else:
            self._waiting.remove(sequence)
            self._prefixes.end(sequence)
            self.partial_blocks.free_given(sequence.request.request_id)
            self._admission.look_again()

    def _vacate_aborted(self) -> None:
        for slot in self._aborted_slots:
            self._end(slot)
        self._aborted_slots.clear()

    def _end(self, slot: int) -> None:
        """Free the slot and blocks of a request that has ended."""
        self._vacate(slot, self._retention.use(self._slots.sequence(slot).request))

    def _vacate(self, slot: int, use: BlockUse | None = None) -> None:
        """Free a slot and its blocks, at the end of the request's use of them; `use` is None if the request comes back."""
        self._slots.keep_window(slot)
        self._loading.leave(slot)
        self._pool.release(self._slots.vacate(slot), use)
        self._admission.look_again()
