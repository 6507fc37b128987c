"""The jump engine's scheduler: like `penstock.engine.scheduling.scheduler`, with many decode steps in one plan.

It has the same rules of admission, growth, preemption and publishing as `Scheduler`, so that both admit the same requests
at the same steps. `NativeScheduler` is its native version.
"""

from itertools import count

from penstock.core.ids import BlockId, RequestId
from penstock.core.types.instances import Role
from penstock.core.types.load import WorkerLoad
from penstock.core.types.requests import Delta, FinishReason, Request
from penstock.core.types.steps import Step
from penstock.core.wire import PackedTokens, num_tokens
from penstock.engine.scheduling.config import SchedulerConfig
from penstock.engine.scheduling.queue import WaitingQueue
from penstock.engine.scheduling.shortest_first_queue import ShortestFirstQueue
from penstock.kv.pool.pins import Pins
from penstock.kv.pool.pool import BlockPool
from penstock.kv.tiers.onboarding import Onboarding
from penstock.kv.tiers.tiers import TieredPool
from penstock.sim.engine.admission import JumpAdmission
from penstock.sim.engine.batch import Batch, SimSequence, give_blocks
from penstock.sim.engine.bounds import check_bounds, check_fits
from penstock.sim.engine.jump_plan import JumpPlan
from penstock.sim.engine.positions import packed_positions
from penstock.sim.workload.prompt import StreamOf


class JumpScheduler:
    """Owns an engine's requests and pool. Each plan is committed before the next one. One task owns it."""

    def __init__(
        self,
        pool: BlockPool | TieredPool,
        context_length: int,
        config: SchedulerConfig,
        stream_of: StreamOf,
        onboarding: Onboarding | None = None,
    ) -> None:
        """Create it without requests.

        Args:
            pool: the engine's block pool.
            context_length: most tokens of a request.
            config: a step must hold one token of every running request.
            stream_of: gives the block names of a request.
            onboarding: onboarding of the same pool; None without lower tiers.
        """
        check_bounds(config)
        self._pool = pool
        self._size = pool.block_size
        self._context_length = context_length
        self._config = config
        self._stream_of = stream_of
        self._onboarding = onboarding
        self._positions = packed_positions(context_length)
        self._arrivals = count()
        self._by_id: dict[RequestId, SimSequence] = {}
        self._waiting: WaitingQueue[SimSequence] = WaitingQueue()
        self._clock_tokens = (
            0  # prefilled tokens as the exact scheduler counts them: a prompt's last token counts as decode
        )
        self._batch = Batch(pool.block_size)
        self._admission = JumpAdmission(
            self._waiting, self._batch, pool, config=config, onboarding=onboarding
        )
        self.pins = Pins(pool, self._admission.look_again)
        """Blocks pinned for KV transfers."""
        self._aborted: list[SimSequence] = []
        self._deltas: list[Delta] = []
        self._prompts: list[tuple[SimSequence, int]] = []  # prompts of the plan, with their tokens to compute
        self._num_singles = 0  # number of `_prompts` that lack only their last token
        self._steps = self._preemptions = 0
        self._prefilled_tokens = self._generated_tokens = 0
        self.assume(Role.AGGREGATED)

    def assume(self, role: Role) -> None:
        """Set the queue order of a role."""
        is_shortest_first = self._config.is_shortest_first(role)
        self._waiting.reorder(ShortestFirstQueue(self._config.ageing) if is_shortest_first else None)
        self._admission.look_again()

    # ---- requests in and out ----------------------------------------------------------------------------

    def submit(self, request: Request) -> None:
        """Queue a request.

        Raises:
            RequestError: the request can never run here.
            Overloaded: the queue is full.
        """
        known = num_tokens(request.token_ids)
        check_fits(known, len(self._waiting), self._context_length, self._config)
        stream = self._stream_of(request)
        sequence = SimSequence.of(
            request, stream, self._context_length, block_size=self._size, arrival=next(self._arrivals)
        )
        sequence.since_tokens = self._clock_tokens
        self._by_id[request.request_id] = sequence
        self._waiting.push(sequence)
        if self._waiting.shortest_first is not None:
            self._admission.look_again()  # it may be first in the queue

    def abort(self, request_id: RequestId) -> None:
        """Drop a request without another delta; a running one's blocks are freed at the next commit or plan."""
        sequence = self._by_id.pop(request_id, None)
        if sequence is None:
            return
        self._admission.look_again()
        if sequence in self._waiting:
            self._waiting.remove(sequence)
        else:
            sequence.is_aborted = True
            self._aborted.append(sequence)

    @property
    def wants_plan(self) -> bool:
        """Whether the next plan may differ from the current one: a request may be admitted or was dropped."""
        return bool(self._aborted) or self._has_arrived() or self._admission.may_admit()

    # ---- one plan ---------------------------------------------------------------------------------------

    def plan(self) -> JumpPlan | None:
        """Plan the next jump; None if there is nothing to do."""
        if self._aborted:
            self._drop_aborted()
        if self._onboarding is not None and self._onboarding.has_arrived:
            self._take_arrived()
        batch = self._batch
        budget = self._config.max_batch_tokens - batch.num_decoding
        prompts: list[tuple[SimSequence, int]] = []
        admitted: list[tuple[SimSequence, int]] = []
        if batch.prefilling and self._waiting.shortest_first is None:
            budget = self._share_budget(budget, prompts)
        elif batch.prefilling:
            budget = self._share_by_turn(budget, prompts, admitted)
        num_running = len(batch.running)
        self._grow(prompts)
        if len(batch.running) < num_running:  # out of blocks
            prompts = [(s, new) for s, new in prompts if s.blocks]
        singles = [s for s, _ in prompts if s.known - s.computed == 1] if prompts else []
        if len(batch.running) == num_running:
            admitted += self._admission.admit(budget)
        self._prompts = prompts = prompts + admitted
        self._num_singles = len(singles)
        decoding, context = batch.num_decoding, batch.context_tokens(batch.tick)
        if prompts:
            chunks = [(new, s.computed) for s, new in prompts if s not in singles]
            return JumpPlan(1, decoding + len(singles), context + sum(s.known for s in singles), chunks)
        if not decoding:
            return None
        # A request preempted now may be admitted again in the next step.
        return JumpPlan(1 if self._admission.may_admit() else self._longest_jump(), decoding, context, None)

    def commit(self, steps: int) -> Step | None:
        """Commit the first `steps` steps of the plan; None if there is nothing to deliver."""
        prompts = self._prompts
        self._advance(steps)
        for sequence, new in prompts:
            self._take_prompt(sequence, new)
            self._clock_tokens += new
        self._clock_tokens -= self._num_singles
        while (ended := self._batch.ended()) is not None:
            self._finish(ended)
        has_news = bool(self._deltas or self._aborted or prompts)
        prefilling = tuple(
            [
                s.request.request_id
                for s, _ in prompts
                if s.request.prefill_only and s.joined is None and s.blocks and not s.is_aborted
            ]
        )
        if self._aborted:
            self._drop_aborted()
        deltas, self._deltas = self._deltas, []
        events = self._pool.take_events()
        if not (has_news or events):
            return None
        return Step(deltas=tuple(deltas), events=events, prefilling=prefilling)

    def settle(self, plan: JumpPlan, steps: int) -> None:
        """Commit the first `steps` decode steps while the next step runs; that step gets its blocks."""
        batch = self._batch
        self._steps += steps
        self._generated_tokens += steps * batch.num_decoding
        give_blocks(self._pool, batch.beginning(batch.tick + 1, steps))
        batch.tick += steps
        plan.steps -= steps
        plan.context += steps * plan.batch

    def so_far(self, plan: JumpPlan, steps: int) -> Step:
        """Settle, and deliver the tokens."""
        self.settle(plan, steps)
        batch = self._batch
        for sequence in batch.running:
            if sequence.joined is not None and not sequence.is_aborted:
                self._tell(sequence, sequence.known + batch.tick - sequence.joined, None)
        deltas, self._deltas = self._deltas, []
        return Step(deltas=tuple(deltas), events=self._pool.take_events())

    def take_step(self) -> Step | None:
        """Give the events that belong to no step: blocks moved between tiers."""
        events = self._pool.take_events()
        return Step(events=events) if events else None

    def reserve(self, count: int) -> list[BlockId] | None:
        """Reserve blocks for an incoming KV transfer; the plan must be settled. None if running requests need the blocks soon."""
        if count + self._admission.blocks_reserved() > self._pool.num_available:
            return None
        return self.pins.reserve(count)

    def load(self, steps: int = 0) -> WorkerLoad:
        """Give the load after `steps` steps of the running plan."""
        pool, batch = self._pool, self._batch
        prefilling = batch.prefilling
        onboarding = batch.onboarding
        return WorkerLoad(
            running_requests=len(batch.running),
            waiting_requests=len(self._waiting),
            active_blocks=pool.num_active + (batch.blocks_due(batch.tick + 1, steps) if steps else 0),
            cached_blocks=pool.num_cached,
            total_blocks=pool.num_blocks,
            queued_prefill_tokens=self._waiting.num_tokens
            + (sum(s.known - s.computed for s in prefilling) if prefilling else 0)
            + (sum(s.known - len(s.blocks) * self._size for s in onboarding) if onboarding else 0),
            context_tokens=batch.context_tokens(batch.tick + steps)
            + (sum(s.computed for s in prefilling) if prefilling else 0)
            + (sum(s.computed for s in onboarding) if onboarding else 0),
            steps=self._steps + steps,
            preemptions=self._preemptions,
            prefilled_tokens=self._prefilled_tokens,
            prefix_hit_tokens=self._admission.prefix_hit_tokens,
            generated_tokens=self._generated_tokens + steps * batch.num_decoding,
            onboarded_tokens=() if self._onboarding is None else self._onboarding.tokens,
        )

    def check(self) -> None:
        """Raise AssertionError if the state is inconsistent."""
        self._pool.check()
        held = self.pins.holders()
        for sequence in self._batch.running:
            for block_id in sequence.blocks:
                held[block_id] = held.get(block_id, 0) + 1
        assert held == self._pool.references(), "sequences and pins hold other blocks than the pool thinks"
        self._batch.check()
        if self._onboarding is not None:
            self._onboarding.check()
        self._waiting.check()
        assert len(self._batch.running) <= self._config.max_running_requests, "running: bounded"

    # ---- planning ---------------------------------------------------------------------------------------

    def _share_budget(self, budget: int, prompts: list[tuple[SimSequence, int]]) -> int:
        """Split the step's token budget over prompts, oldest first; prompts that lack one token always get it."""
        budget -= sum(s.known - s.computed == 1 for s in self._batch.prefilling)
        for sequence in self._batch.prefilling:
            lacking = sequence.known - sequence.computed
            if lacking == 1:
                prompts.append((sequence, 1))
            elif budget > 0:
                new = min(budget, self._config.prompt_budget, lacking)
                budget -= new
                prompts.append((sequence, new))
        return budget

    def _share_by_turn(
        self,
        budget: int,
        prompts: list[tuple[SimSequence, int]],
        admitted: list[tuple[SimSequence, int]],
    ) -> int:
        """Split like `_share_budget`, with waiting and running prompts in one order; may admit some."""
        shortest_first, prefilling = self._waiting.shortest_first, tuple(self._batch.prefilling)
        assert shortest_first is not None, "asked only with shortest prompts first"
        shares = {s.arrival: 1 for s in prefilling if s.known - s.computed == 1}
        budget -= len(shares)
        lacking = [(s, s.known - s.computed) for s in prefilling if s.arrival not in shares]
        for rank, arrival, tokens in sorted(
            (shortest_first.rank_of(s, left), s.arrival, left) for s, left in lacking
        ):
            more = self._admission.admit(budget, before=rank)
            admitted += more
            budget -= sum(new for _, new in more)
            shares[arrival] = min(budget, self._config.prompt_budget, tokens)
            budget -= shares[arrival]
        prompts += [(s, shares[s.arrival]) for s in prefilling if shares[s.arrival]]
        return budget

    def _longest_jump(self) -> int:
        """Count the steps until a request ends or blocks run out; the first step has its blocks."""
        batch = self._batch
        steps = batch.next_end() - batch.tick
        available = self._pool.num_available
        if batch.blocks_due(batch.tick + 1, steps - 1) <= available:
            return steps
        low, high = 1, steps  # possible, impossible
        while high - low > 1:
            middle = (low + high) // 2
            if batch.blocks_due(batch.tick + 1, middle - 1) <= available:
                low = middle
            else:
                high = middle
        return low

    def _grow(self, prompts: list[tuple[SimSequence, int]]) -> None:
        """Allocate every running sequence's blocks of the next step; preempts the newest when blocks run out."""
        batch, size = self._batch, self._size
        lacking = [(s, -(-(s.computed + new) // size) - len(s.blocks)) for s, new in prompts]
        lacking += batch.beginning(batch.tick)
        if not lacking:
            return
        if sum([blocks for _, blocks in lacking]) <= self._pool.num_available:
            give_blocks(self._pool, lacking)
            return
        needs = dict(lacking)
        for sequence in tuple(batch.running):
            needed = needs.get(sequence, 0)
            while needed > 0 and sequence.blocks:
                if needed <= self._pool.num_available:
                    give_blocks(self._pool, [(sequence, needed)])
                    break
                self._preempt(batch.running[-1])

    def _has_arrived(self) -> bool:
        return self._onboarding is not None and self._onboarding.has_arrived

    def _take_arrived(self) -> None:
        """Publish fetched blocks and move their sequences to prefill."""
        assert self._onboarding is not None, "something arrived"
        for request_id in self._onboarding.take_arrived():
            sequence = self._by_id[request_id]
            sequence.computed = len(sequence.blocks) * self._size
            self._publish(sequence, sequence.computed)
            self._batch.has_arrived(sequence)

    def _preempt(self, sequence: SimSequence) -> None:
        """Move a running sequence back to the front of the queue."""
        self._leave(sequence)
        self._waiting.push_front(sequence)
        self._preemptions += 1

    # ---- outcomes ---------------------------------------------------------------------------------------

    def _advance(self, steps: int) -> None:
        """Advance decoding sequences; allocates the blocks of all steps but the first."""
        batch = self._batch
        self._steps += steps
        self._generated_tokens += steps * batch.num_decoding
        if steps > 1:
            give_blocks(self._pool, batch.beginning(batch.tick + 1, steps - 1))
        batch.tick += steps

    def _take_prompt(self, sequence: SimSequence, new: int) -> None:
        sequence.computed += new
        self._prefilled_tokens += new
        self._publish(sequence, sequence.computed)
        if sequence.computed < sequence.known or sequence.is_aborted:
            return
        self._batch.join(sequence)
        self._generated_tokens += 1
        if sequence.known < sequence.end_tokens:
            self._tell(sequence, sequence.known, None)

    def _publish(self, sequence: SimSequence, computed: int) -> None:
        start, end = sequence.published, computed // self._size
        if end > start:
            hashes = sequence.names_between(start, end, self._size)
            self._pool.commit(sequence.blocks[start:end], hashes, sequence.parent)
            sequence.published, sequence.parent = end, int(hashes[-1, 0])

    def _finish(self, sequence: SimSequence) -> None:
        del self._by_id[sequence.request.request_id]
        self._leave(sequence)
        self._tell(sequence, sequence.known, FinishReason.LENGTH)

    def _leave(self, sequence: SimSequence) -> None:
        """Remove a sequence from the batch and free its blocks."""
        self._batch.leave(sequence)
        if self._onboarding is not None:
            self._onboarding.cancel(sequence.request.request_id)
        self._publish(sequence, sequence.computed)
        self._pool.release(sequence.blocks)
        sequence.blocks = []
        sequence.published = sequence.computed = 0
        sequence.parent = None
        self._admission.look_again()

    def _drop_aborted(self) -> None:
        for sequence in self._aborted:
            self._leave(sequence)
        self._aborted.clear()

    def _tell(self, sequence: SimSequence, known: int, reason: FinishReason | None) -> None:
        """Emit the unsent output tokens up to `known`; each token id is its position."""
        num_sent, sequence.num_sent = sequence.num_sent, known - sequence.num_prompt
        self._deltas.append(
            Delta(
                request_id=sequence.request.request_id,
                token_ids=PackedTokens(self._positions[4 * num_sent : 4 * sequence.num_sent]),
                finish_reason=reason,
                cached_tokens=sequence.cached_tokens if sequence.is_fresh else None,
            )
        )
        sequence.is_fresh = False
