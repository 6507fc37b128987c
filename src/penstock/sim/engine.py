"""A simulated engine that jumps: what a batch decodes between two events is one sum, however many steps it is.

It plans as `penstock.engine.scheduler` does, step by step while prompts are computed, and from event to event
while the batch only decodes: until a request ends, one arrives that may join, one is aborted, or blocks run
out. Tokens are delivered in bulk: the first one at its moment, the others with the last. `ExactEngine` is the
oracle: both give every request the same first and last moment.
"""

import asyncio
from collections import OrderedDict
from collections.abc import AsyncIterator
from dataclasses import dataclass
from itertools import count

import numpy as np

from penstock.core.errors import Overloaded, RequestError
from penstock.core.ids import RequestId
from penstock.core.types import Delta, EngineInfo, FinishReason, Request, Step, WorkerLoad
from penstock.core.wire import HashArray, PackedTokens, num_tokens, unpack_hashes
from penstock.engine.runner import RunnerInfo
from penstock.engine.scheduler import SchedulerConfig
from penstock.kv.pool import BlockPool
from penstock.perf.latency import LatencyModel
from penstock.sim.batch import Batch, SimSequence
from penstock.sim.prices import DecodePrices
from penstock.sim.prompt import StreamOf


@dataclass(slots=True)
class _Under:
    """What is under way: `steps` decode steps from `start_s`, or one step with `chunks` of prompts."""

    start_s: float
    steps: int
    context_tokens: int
    chunks: list[tuple[SimSequence, int]]
    timer: asyncio.TimerHandle


class JumpEngine:
    """An `Engine` on virtual time. Deadlines are the worker's business; nothing stops a text early."""

    def __init__(
        self,
        latency: LatencyModel,
        info: RunnerInfo,
        config: SchedulerConfig,
        stream_of: StreamOf,
        prices: DecodePrices | None = None,
    ) -> None:
        """Start nothing.

        Args:
            latency: prices each step.
            info: the simulated model.
            config: the scheduler's; its batch holds every running request in one step.
            stream_of: names a request's blocks.
            prices: of the same latency; workers that are alike may share them.
        """
        if config.max_running_requests > config.max_batch_tokens:
            raise ValueError(
                f"max_running_requests: must be <= max_batch_tokens, got {config.max_running_requests} and {config.max_batch_tokens}"
            )
        self._latency = latency
        self._config = config
        self._size = info.block_size
        self._context_length = min(info.context_length, info.num_blocks * info.block_size)
        self._prices = prices or DecodePrices(latency, info.context_length)
        self._stream_of = stream_of
        self._pool = BlockPool(info.num_blocks, info.block_size)
        self._loop = asyncio.get_running_loop()
        self._arrivals = count()
        self._by_id: dict[RequestId, SimSequence] = {}
        self._waiting: OrderedDict[RequestId, SimSequence] = OrderedDict()
        self._waiting_tokens = 0
        self._batch = Batch(info.block_size)
        self._head_blocked = False
        self._under: _Under | None = None
        self._is_planned = False
        self._aborted: list[SimSequence] = []
        self._deltas: list[Delta] = []
        self._has_news = False
        self._waiter: asyncio.Future[None] | None = None
        self._closed = False
        self._steps = self._preemptions = 0
        self._prefilled_tokens = self._prefix_hit_tokens = self._generated_tokens = 0

    async def start(self) -> EngineInfo:
        return EngineInfo(
            block_size=self._size,
            total_blocks=self._pool.num_blocks,
            context_length=self._context_length,
            max_batch_tokens=self._config.max_batch_tokens,
            max_running_requests=self._config.max_running_requests,
        )

    def submit(self, request: Request) -> None:
        """Queue a request; its tokens come out of `steps`.

        Raises:
            RequestError: it can never run here.
            Overloaded: the queue is full.
        """
        known = num_tokens(request.token_ids)
        if known >= self._context_length:
            raise RequestError(
                f"prompt of {known} tokens: must be < {self._context_length}, the context and all KV blocks",
                param="prompt",
            )
        if len(self._waiting) >= self._config.max_waiting_requests:
            raise Overloaded(
                f"{len(self._waiting)} requests wait already, max_waiting_requests; try again later",
                retry_after_s=1.0,
            )
        num_prompt = known - request.num_emitted
        sequence = SimSequence(
            request=request,
            arrival=next(self._arrivals),
            known=known,
            num_prompt=num_prompt,
            end_tokens=min(num_prompt + request.sampling.max_tokens, self._context_length),
            told=request.num_emitted,
        )
        self._by_id[request.request_id] = self._waiting[request.request_id] = sequence
        self._waiting_tokens += known
        self._interrupt()

    def abort(self, request_id: RequestId) -> None:
        """Free the request's blocks by the end of the step under way."""
        sequence = self._by_id.pop(request_id, None)
        if sequence is None:
            return
        if request_id in self._waiting:
            del self._waiting[request_id]
            self._waiting_tokens -= sequence.known
            self._head_blocked = False
        else:
            sequence.is_aborted = True
            self._aborted.append(sequence)
            self._head_blocked = False
        self._interrupt()

    async def steps(self) -> AsyncIterator[Step]:
        """Yield what each event changed."""
        while not self._closed:
            if self._has_news:
                self._has_news = False
                deltas, self._deltas = self._deltas, []
                yield Step(deltas=tuple(deltas), events=self._pool.take_events())
            else:
                self._waiter = self._loop.create_future()
                await self._waiter

    def load(self) -> WorkerLoad:
        under, pool = self._under, self._pool
        batch = self._batch
        done = 0 if under is None or under.chunks else self._steps_begun(under) - 1
        grown = batch.blocks_due(batch.tick + 1, done)
        return WorkerLoad(
            running_requests=len(self._batch.running),
            waiting_requests=len(self._waiting),
            active_blocks=pool.num_active + grown,
            cached_blocks=pool.num_cached,
            total_blocks=pool.num_blocks,
            queued_prefill_tokens=self._waiting_tokens
            + sum(s.known - s.computed for s in self._batch.prefilling),
            context_tokens=batch.context_tokens(batch.tick + done)
            + sum(s.computed for s in batch.prefilling),
            steps=self._steps,
            preemptions=self._preemptions,
            prefilled_tokens=self._prefilled_tokens,
            prefix_hit_tokens=self._prefix_hit_tokens,
            generated_tokens=self._generated_tokens,
        )

    async def close(self) -> None:
        self._closed = True
        if self._under is not None:
            self._under.timer.cancel()
            self._under = None
        self._wake()

    def check(self) -> None:
        """Raise AssertionError where the state contradicts itself."""
        self._pool.check()
        held: dict[int, int] = {}
        for sequence in self._batch.running:
            for block_id in sequence.blocks:
                held[block_id] = held.get(block_id, 0) + 1
        assert held == self._pool.references(), "sequences hold other blocks than the pool thinks"
        self._batch.check()
        assert self._waiting_tokens == sum(s.known for s in self._waiting.values()), (
            "waiting tokens: summed up"
        )
        assert len(self._batch.running) <= self._config.max_running_requests, "running: bounded"

    # ---- planning ---------------------------------------------------------------------------------------

    def _interrupt(self) -> None:
        """See to it that the next plan comes after the step under way."""
        under = self._under
        if under is None:
            if not self._is_planned:
                self._is_planned = True
                self._loop.call_soon(self._plan)
        elif not under.chunks and under.steps > 1 and (self._aborted or self._may_admit()):
            steps = self._steps_begun(under)
            if steps < under.steps:
                under.steps = steps
                under.timer.cancel()
                seconds = self._prices.total_s(self._batch.num_decoding, under.context_tokens, steps)
                under.timer = self._loop.call_at(under.start_s + seconds, self._commit)

    def _may_admit(self) -> bool:
        return bool(
            self._waiting
            and not self._head_blocked
            and len(self._batch.running) < self._config.max_running_requests
        )

    def _plan(self) -> None:
        """Begin the next step or jump; the twin of `Scheduler.plan`."""
        self._is_planned = False
        if self._closed or self._under is not None:
            return
        self._drop_aborted()
        last = [s for s in self._batch.prefilling if s.known - s.computed == 1]
        budget = self._config.max_batch_tokens - self._batch.num_decoding - len(last)
        chunks: list[tuple[SimSequence, int]] = []
        for sequence in self._batch.prefilling:
            if sequence in last:
                chunks.append((sequence, 1))
                continue
            new = min(budget, sequence.known - sequence.computed)
            budget -= new
            if new:
                chunks.append((sequence, new))
        num_running = len(self._batch.running)
        self._grow(chunks)
        if len(self._batch.running) == num_running:
            if self._may_admit() and budget > 0:
                chunks += self._admit(budget)
        else:
            chunks = [(s, new) for s, new in chunks if s.blocks]
        if self._batch.running:
            self._begin(chunks, [s for s in last if s.blocks])

    def _begin(self, chunks: list[tuple[SimSequence, int]], last: list[SimSequence]) -> None:
        """Start the clock; the `last` of the chunks are a prompt's last token, which costs what decoding does."""
        batch = self._batch.num_decoding
        context = self._batch.context_tokens(self._batch.tick)
        now_s, steps = self._loop.time(), 1
        if chunks:
            prompts = (
                [(new, s.computed) for s, new in chunks if s not in last]
                if last
                else [(new, s.computed) for s, new in chunks]
            )
            seconds = self._latency.mixed_step_s(
                prompts, batch + len(last), context + sum(s.known for s in last)
            )
        else:
            steps = self._longest_jump()
            seconds = self._prices.total_s(batch, context, steps)
        timer = self._loop.call_at(now_s + seconds, self._commit)
        self._under = _Under(now_s, steps, context, chunks, timer)

    def _longest_jump(self) -> int:
        """Count the steps until a request ends, or blocks run out; those of the first step are there already."""
        batch = self._batch
        steps = batch.next_end() - batch.tick
        available = self._pool.num_available
        if available < batch.num_decoding * (steps // self._size + 1):
            due = 0
            for ahead in range(1, steps):
                due += len(batch.beginning(batch.tick + ahead))
                if due > available:
                    return ahead
        return steps

    def _grow(self, chunks: list[tuple[SimSequence, int]]) -> None:
        """Give every running sequence the blocks of its next step; the newest are preempted where none are left."""
        due = self._batch.beginning(self._batch.tick)
        lacking = {s: -(-(s.computed + new) // self._size) - len(s.blocks) for s, new in chunks}
        if len(due) + sum(lacking.values()) <= self._pool.num_available:
            for sequence in due:
                self._extend(sequence, 1)
            for sequence, blocks in lacking.items():
                self._extend(sequence, blocks)
            return
        for sequence in tuple(self._batch.running):
            needed = lacking.get(sequence, 1 if sequence in due else 0)
            while needed > 0 and sequence.blocks:
                if needed <= self._pool.num_available:
                    self._extend(sequence, needed)
                    break
                self._preempt(self._batch.running[-1])

    def _extend(self, sequence: SimSequence, blocks: int) -> None:
        taken = self._pool.allocate(blocks)
        assert taken is not None, "counted before"
        sequence.blocks += taken

    def _admit(self, budget: int) -> list[tuple[SimSequence, int]]:
        """Take waiting sequences in, oldest first, while there is room; the twin of `Scheduler._admit`."""
        admitted: list[tuple[SimSequence, int]] = []
        pool, size = self._pool, self._size
        reserved = len(self._batch.running) + len(self._batch.beginning(self._batch.tick + 1))
        reserved += sum(max(s.known // size + 1 - len(s.blocks), 0) for s in self._batch.prefilling)
        while self._waiting and budget > 0 and len(self._batch.running) < self._config.max_running_requests:
            sequence = next(iter(self._waiting.values()))
            known = sequence.known
            cacheable = (known - 1) // size
            hits = pool.match(self._hashes(sequence, 0, cacheable))
            room = pool.num_available - pool.count_idle(hits)
            if self._batch.running and known // size + 1 - len(hits) + reserved > room:
                self._head_blocked = True
                break
            cached = len(hits) * size
            new = min(budget, known - cached)
            self._waiting.popitem(last=False)
            self._waiting_tokens -= known
            pool.acquire(hits)
            sequence.blocks = hits
            sequence.published = len(hits)
            sequence.computed = cached
            if sequence.cached_tokens is None:
                sequence.cached_tokens = min(cached, sequence.num_prompt)
            self._prefix_hit_tokens += cached
            self._extend(sequence, -(-(cached + new) // size) - len(hits))
            self._batch.admit(sequence)
            reserved += 1 + known // size + 1 - len(sequence.blocks)
            budget -= new
            admitted.append((sequence, new))
        return admitted

    def _preempt(self, sequence: SimSequence) -> None:
        """Put a running sequence back to the front of the queue."""
        self._leave(sequence)
        self._waiting[sequence.request.request_id] = sequence
        self._waiting.move_to_end(sequence.request.request_id, last=False)
        self._waiting_tokens += sequence.known
        self._preemptions += 1

    # ---- outcomes ---------------------------------------------------------------------------------------

    def _commit(self) -> None:
        """Take over what was under way, tell what came of it, and plan on."""
        under, self._under = self._under, None
        assert under is not None, "called at its end"
        self._advance(under)
        for sequence, new in under.chunks:
            self._take_chunk(sequence, new)
        for sequence in self._batch.ended():
            self._finish(sequence)
        self._drop_aborted()
        self._has_news = True
        self._wake()
        self._is_planned = True
        self._loop.call_soon(self._plan)

    def _advance(self, under: _Under) -> None:
        """Do the decoding's part of the steps: the blocks of all but the first are taken here."""
        steps = under.steps
        self._steps += steps
        batch = self._batch
        self._generated_tokens += steps * batch.num_decoding
        for ahead in range(1, min(steps, self._size + 1)):
            times = (steps - 1 - ahead) // self._size + 1
            for sequence in batch.beginning(batch.tick + ahead):
                self._extend(sequence, times)
        batch.tick += steps

    def _take_chunk(self, sequence: SimSequence, new: int) -> None:
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
            first = max(start - 1, 0)
            hashes = self._hashes(sequence, first, end)
            parent = int(hashes[0, 0]) if start else None
            self._pool.commit(sequence.blocks[start:end], hashes[start - first :], parent)
            sequence.published = end

    def _hashes(self, sequence: SimSequence, start: int, end: int) -> HashArray:
        """Name blocks: the request's own as far as it has them, the stream's for what is answered."""
        given = unpack_hashes(sequence.request.block_hashes).reshape(-1, 2)
        if end <= len(given):
            return given[start:end]
        split = max(start, len(given))
        more = self._stream_of(sequence.request).block_hashes(self._size, split, end)
        return np.concatenate((given[start:split], more))

    def _finish(self, sequence: SimSequence) -> None:
        del self._by_id[sequence.request.request_id]
        self._leave(sequence)
        self._tell(sequence, sequence.known, FinishReason.LENGTH)

    def _leave(self, sequence: SimSequence) -> None:
        """Take a sequence out of the batch, and give its blocks back."""
        self._batch.leave(sequence)
        self._publish(sequence, sequence.computed)
        self._pool.release(sequence.blocks)
        sequence.blocks = []
        sequence.published = sequence.computed = 0
        self._head_blocked = False

    def _drop_aborted(self) -> None:
        for sequence in self._aborted:
            self._leave(sequence)
        self._aborted.clear()

    def _tell(self, sequence: SimSequence, known: int, reason: FinishReason | None) -> None:
        """Send the output tokens up to `known` that were not sent; each token is its position."""
        told, sequence.told = sequence.told, known - sequence.num_prompt
        self._deltas.append(
            Delta(
                request_id=sequence.request.request_id,
                token_ids=PackedTokens(np.arange(told, sequence.told, dtype="<i4").tobytes()),
                finish_reason=reason,
                cached_tokens=sequence.cached_tokens if sequence.is_fresh else None,
            )
        )
        sequence.is_fresh = False

    # ---- time ---------------------------------------------------------------------------------------------

    def _steps_begun(self, under: _Under) -> int:
        """Count the steps of a jump that are done or under way now."""
        passed_s = self._loop.time() - under.start_s
        return self._prices.steps_until(self._batch.num_decoding, under.context_tokens, passed_s, under.steps)

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
