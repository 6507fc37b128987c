"""A simulated engine that jumps: what a batch decodes between two events is one sum, however many steps it is.

It goes step by step while prompts are computed, and from event to event while the batch only decodes: until a
request ends, one arrives that may join, one is aborted, or blocks run out. Tokens are delivered in bulk: the first
one at its moment, the others with the last, or before a fault (`so_far`). `ExactEngine` is the oracle: both give every request the same first
and last moment.
"""

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass

from penstock.core.ids import BlockId, RequestId
from penstock.core.types.instances import EngineInfo, Role
from penstock.core.types.load import WorkerLoad
from penstock.core.types.requests import Request
from penstock.core.types.steps import Step
from penstock.core.wire import HashArray
from penstock.engine.runner import RunnerInfo
from penstock.engine.scheduling.config import SchedulerConfig
from penstock.perf.latency import LatencyModel
from penstock.sim.engine.jump_plan import JumpPlan
from penstock.sim.engine.native_scheduler import make_scheduler
from penstock.sim.engine.prices import DecodePrices
from penstock.sim.engine.tier_copier import TimedTierCopier
from penstock.sim.engine.timing import Pace, no_memory
from penstock.sim.workload.prompt import StreamOf


@dataclass(slots=True)
class _Under:
    """What is under way: the first `steps` steps of a plan, since `start_s`, at the pace of that moment."""

    plan: JumpPlan
    start_s: float
    steps: int
    factor: float
    timer: asyncio.TimerHandle


class JumpEngine:
    """An `Engine` with `KvBlocks` on virtual time. Deadlines are the worker's business; nothing stops a text early."""

    def __init__(
        self,
        latency: LatencyModel,
        info: RunnerInfo,
        config: SchedulerConfig,
        stream_of: StreamOf,
        *,
        pace: Pace | None = None,
        prices: DecodePrices | None = None,
    ) -> None:
        """Start nothing.

        Args:
            latency: prices each step.
            info: the simulated model.
            config: the scheduler's; its batch holds every running request in one step.
            stream_of: names a request's blocks.
            pace: the host's; None for one that is never disturbed.
            prices: of the same latency; workers that are alike may share them.
        """
        self._latency = latency
        self._prices = prices or DecodePrices(latency, info.context_length)
        self._pace = pace or Pace()
        self._copier = TimedTierCopier(latency, info.block_size, self._pace) if info.lower_blocks else None
        self._pace.watch(self._on_pace)  # after the mover, whose news the next plan takes in
        context_length = min(info.context_length, info.num_blocks * info.block_size)
        self._info = EngineInfo(
            block_size=info.block_size,
            total_blocks=info.num_blocks,
            context_length=context_length,
            max_batch_tokens=config.max_batch_tokens,
            max_running_requests=config.max_running_requests,
            prompts_at_once=config.prompts_at_once,
            kv_bytes_per_block=info.kv_bytes_per_block,
            kv_layout=info.kv_layout,
            kv_by_chunk=True,
            lower_tier_blocks=sum(count for _, count in info.lower_blocks),
        )
        self._memory = no_memory(info)
        self.pool, onboarding = info.make_pool(self._copier, self._interrupt)
        """For reports and checks."""
        self._scheduler = make_scheduler(self.pool, context_length, config, stream_of, onboarding)
        self._loop = asyncio.get_running_loop()
        self._under: _Under | None = None
        self._is_late = False  # what is under way has had its time, and the host stands still
        self._step: Step | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._closed = False

    async def start(self) -> EngineInfo:
        return self._info

    def submit(self, request: Request) -> None:
        """Queue a request; its tokens come out of `steps`.

        Raises:
            RequestError: it can never run here.
            Overloaded: the queue is full.
        """
        self._scheduler.submit(request)
        self._interrupt()

    def abort(self, request_id: RequestId) -> None:
        """Free the request's blocks by the end of the step under way."""
        self._scheduler.abort(request_id)
        self._interrupt()

    def assume(self, role: Role) -> EngineInfo:
        """Order what waits as a worker of this role does."""
        self._scheduler.assume(role)
        return self._info

    async def steps(self) -> AsyncIterator[Step]:
        """Yield what each event changed."""
        while not self._closed:
            step, self._step = self._step, None
            if step is None and (self._under is not None or not self._begin()):
                step = self._scheduler.take_step() if self._under is None else None
                if step is None:
                    self._waiter = self._loop.create_future()
                    await self._waiter
            if step is not None:
                yield step

    def load(self) -> WorkerLoad:
        under = self._under
        if under is None or under.steps == 1:
            return self._scheduler.load()
        return self._scheduler.load(self._steps_begun(under) - 1)

    def so_far(self) -> Step | None:
        """Give what came of the steps that are done and was to be told later; None where that is nothing.

        For faults: what an engine that takes every step had told before them.
        """
        under = self._under
        done = 0 if under is None else self._steps_begun(under) - 1
        if under is None or not done:
            return None
        self._take_out(under, done)
        return self._scheduler.so_far(under.plan, done)

    def kv_memory(self) -> Sequence[Sequence[object]]:
        return self._memory

    def pin(self, block_hashes: HashArray) -> list[BlockId]:
        self._settle()
        return self._scheduler.pins.pin(block_hashes)

    def reserve(self, count: int) -> list[BlockId] | None:
        self._settle()
        return self._scheduler.reserve(count)

    def publish(self, block_ids: Sequence[BlockId], block_hashes: HashArray, parent: int | None) -> None:
        self._settle()  # what is told of the blocks comes with the next step
        self._scheduler.pins.publish(block_ids, block_hashes, parent)
        self._interrupt()

    def unpin(self, block_ids: Sequence[BlockId]) -> None:
        self._scheduler.pins.unpin(block_ids)
        self._interrupt()

    async def close(self) -> None:
        self._closed = True
        self._is_late = False
        if self._copier is not None:
            self._copier.close()
        if self._under is not None:
            self._under.timer.cancel()
            self._under = None
        self._wake()

    def check(self) -> None:
        """Raise AssertionError where the state contradicts itself."""
        self._scheduler.check()

    def _begin(self) -> bool:
        """Start the clock of what comes next; False where there is nothing to do."""
        plan = self._scheduler.plan()
        if plan is None:
            return False
        now_s, factor = self._loop.time(), self._pace.factor
        timer = self._loop.call_at(now_s + factor * self._price_s(plan, plan.steps), self._on_time)
        self._under = _Under(plan, now_s, plan.steps, factor, timer)
        return True

    def _price_s(self, plan: JumpPlan, steps: int) -> float:
        if plan.chunks is None:
            return self._prices.total_s(plan.batch, plan.context, steps)
        return self._latency.mixed_step_s(plan.chunks, plan.batch, plan.context)

    def _interrupt(self) -> None:
        """See to it that the next plan comes after the step under way, if it could be another one."""
        if self._under is None:
            self._wake()
        elif self._scheduler.wants_plan:
            self._cut_short(self._under)

    def _settle(self) -> None:
        """Have the pool be as after each step by itself, and the next plan come after the step under way.

        Blocks that are held for others are no longer there for the rest of a jump.
        """
        under = self._under
        if under is None or under.steps == 1:
            return
        done = self._steps_begun(under) - 1
        if done:
            plan = under.plan
            self._take_out(under, done)
            self._scheduler.settle(plan, done)
        self._cut_short(under)

    def _take_out(self, under: _Under, done: int) -> None:
        """Have what is under way begin so many steps later: they are done."""
        under.start_s += under.factor * self._price_s(under.plan, done)
        under.steps -= done

    def _cut_short(self, under: _Under) -> None:
        """Let what is under way end with its present step."""
        steps = self._steps_begun(under)
        if steps < under.steps:
            under.steps = steps
            under.timer.cancel()
            end_s = under.start_s + under.factor * self._price_s(under.plan, steps)
            under.timer = self._loop.call_at(end_s, self._on_time)

    def _on_pace(self) -> None:
        """Note that the host runs at another speed, has stopped or goes on: a step ends as it began."""
        if self._is_late:
            self._on_time()
        elif self._under is not None:
            self._cut_short(self._under)

    def _on_time(self) -> None:
        """Take over what was under way, and go on."""
        under = self._under
        assert under is not None, "called at its end"
        self._is_late = not self._pace.is_going
        if self._is_late:
            return
        self._under = None
        self._step = self._scheduler.commit(under.steps)
        if self._step is not None or not self._begin():
            self._wake()

    def _steps_begun(self, under: _Under) -> int:
        """Count the steps that are done or under way now."""
        if under.steps == 1:
            return 1
        passed_s = (self._loop.time() - under.start_s) / under.factor
        return self._prices.steps_until(under.plan.batch, under.plan.context, passed_s, under.steps)

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
