"""The exact engine: the real scheduler and pool, with steps that only take time."""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass

import numpy as np

from penstock.core.ids import BlockId, RequestId
from penstock.core.types.instances import EngineInfo, Role
from penstock.core.types.load import Step, WorkerLoad
from penstock.core.types.requests import Request
from penstock.core.wire import HashArray
from penstock.engine.batched import BatchedEngine
from penstock.engine.runner import RunnerInfo
from penstock.engine.scheduling.config import SchedulerConfig
from penstock.kv.loads import PrefixLoads
from penstock.kv.manager import KvManager
from penstock.kv.pool import BlockPool
from penstock.perf.latency import LatencyModel
from penstock.seams.kv import KvLoad, KvRun, KvSource
from penstock.sim.engine_timing import (
    DecodePrices,
    HostPace,
    LowerTier,
    TimingRunner,
    no_memory,
    prefill_price,
    timed_kv_manager,
)
from penstock.sim.scheduler import JumpPlan, JumpScheduler
from penstock.sim.workload import StreamOf


@dataclass(slots=True)
class _Jump:
    """The running jump: the first `steps` steps of a plan, since `start_s`, at the pace of its start."""

    plan: JumpPlan
    start_s: float
    steps: int
    factor: float
    timer: asyncio.TimerHandle


class JumpEngine:
    """An `Engine` with `KvBlocks` on virtual time. It ignores deadlines (the worker enforces them) and stop conditions."""

    def __init__(
        self,
        latency: LatencyModel,
        info: RunnerInfo,
        config: SchedulerConfig,
        stream_of: StreamOf,
        *,
        pace: HostPace | None = None,
        prices: DecodePrices | None = None,
        lower_tiers: Sequence[LowerTier] = (),
    ) -> None:
        """Create the engine; `start` starts it.

        Args:
            latency: gives the time of each step.
            info: the simulated model.
            config: scheduler settings; a step must hold one token of every running request.
            stream_of: gives the block names of a request.
            pace: speed of the host; None for a constant one.
            prices: decode sums of the same latency model; equal workers may share them.
            lower_tiers: KV tiers below the device.
        """
        self._latency = latency
        self._prices = prices or DecodePrices(latency, info.context_length)
        self._pace = pace or HostPace()
        price = prefill_price(latency, lower_tiers)
        self.pool = BlockPool(
            info.num_blocks, info.block_size, config.eviction, price=price, tenant_share=config.tenant_share
        )
        """The block pool, for reports and checks."""
        self.kv = timed_kv_manager(self.pool, lower_tiers, latency, self._pace, self._interrupt)
        """The tiers below the device; None without."""
        if self.kv is None:
            self._prefix_loads = PrefixLoads((), info.block_size, self._compute_s)
        else:
            self._prefix_loads = self.kv.prefix_loads
        self._pace.watch(self._on_pace)  # after the tiers, whose loads the next plan takes in
        kv_tokens = info.windows.tokens_beside(info.num_blocks, config.prompt_budget, info.block_size)
        context_length = min(info.context_length, kv_tokens)
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
            interleaves_tenants=True,
            lower_tier_blocks=0 if self.kv is None else self.kv.num_own,
            kv_holders=() if self.kv is None else self.kv.shared,
        )
        self._memory = no_memory(info)
        self._scheduler = JumpScheduler(
            self.pool, context_length, config, stream_of, self.kv, windows=info.windows
        )
        self._loop = asyncio.get_running_loop()
        self._jump: _Jump | None = None
        self._is_late = False  # the running jump's time is over, but the host is stopped
        self._step: Step | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._closed = False

    async def start(self) -> EngineInfo:
        return self._info

    def submit(self, request: Request) -> None:
        """Queue a request; `steps` yields its tokens.

        Raises:
            RequestError: the request can never run here.
            Overloaded: the queue is full.
        """
        self._scheduler.submit(request)
        self._interrupt()

    def abort(self, request_id: RequestId) -> None:
        """Drop a request; its blocks are freed at the end of the running step."""
        self._scheduler.abort(request_id)
        self._interrupt()

    def assume(self, role: Role) -> EngineInfo:
        """Set the queue order of a role."""
        self._scheduler.assume(role)
        return self._info

    async def steps(self) -> AsyncIterator[Step]:
        """Yield one step per event."""
        while not self._closed:
            step, self._step = self._step, None
            if step is None and (self._jump is not None or not self._begin()):
                step = self._scheduler.take_step() if self._jump is None else None
                if step is None:
                    self._waiter = self._loop.create_future()
                    await self._waiter
            if step is not None:
                yield step

    def load(self) -> WorkerLoad:
        jump = self._jump
        if jump is None or jump.steps == 1:
            return self._scheduler.load()
        return self._scheduler.load(self._steps_begun(jump) - 1)

    def so_far(self) -> Step | None:
        """Give the undelivered results of finished steps of the running jump; None without any.

        Called before a fault, since an engine that runs every step has delivered them by then.
        """
        jump = self._jump
        done = 0 if jump is None else self._steps_begun(jump) - 1
        if jump is None or not done:
            return None
        self._take_out(jump, done)
        return self._scheduler.so_far(jump.plan, done)

    def kv_memory(self) -> Sequence[Sequence[object]]:
        return self._memory

    def pin(self, block_hashes: HashArray) -> list[BlockId]:
        self._settle()
        return self._scheduler.pins.pin(block_hashes)

    def reserve(self, count: int) -> list[BlockId] | None:
        self._settle()
        return self._scheduler.reserve(count)

    def publish(self, block_ids: Sequence[BlockId], block_hashes: HashArray, parent: int | None) -> None:
        self._settle()  # its cache events go out with the next step
        self._scheduler.pins.publish(block_ids, block_hashes, parent)
        self._interrupt()

    def unpin(self, block_ids: Sequence[BlockId]) -> None:
        self._scheduler.pins.unpin(block_ids)
        self._interrupt()

    def find_runs(self, block_hashes: HashArray, num_before: int, peer: KvSource) -> list[KvRun]:
        return self._prefix_loads.find(block_hashes, num_before, peer)

    def load_runs(
        self,
        runs: Sequence[KvRun],
        targets: Sequence[BlockId],
        peer: KvSource,
        done: Callable[[int], None],
        on_arrived: Callable[[int], None] = lambda _num_blocks: None,
    ) -> KvLoad:
        return self._prefix_loads.load(runs, targets, peer, done, on_arrived)

    async def close(self) -> None:
        self._closed = True
        self._is_late = False
        if self.kv is not None:
            await self.kv.close()
        if self._jump is not None:
            self._jump.timer.cancel()
            self._jump = None
        self._wake()

    def check(self) -> None:
        """Raise AssertionError if the state is inconsistent."""
        self._scheduler.check()

    def _compute_s(self, new_tokens: int, cached_tokens: int) -> float:
        return self._pace.factor * self._latency.prefill_s(new_tokens, cached_tokens)

    def _begin(self) -> bool:
        """Start the next jump; False if there is nothing to do."""
        plan = self._scheduler.plan()
        if plan is None:
            return False
        now_s, factor = self._loop.time(), self._pace.factor
        timer = self._loop.call_at(now_s + factor * self._price_s(plan, plan.steps), self._on_time)
        self._jump = _Jump(plan, now_s, plan.steps, factor, timer)
        return True

    def _price_s(self, plan: JumpPlan, steps: int) -> float:
        if plan.chunks is None:
            return self._prices.total_s(plan.batch, plan.context, steps)
        return self._latency.mixed_step_s(plan.chunks, plan.batch, plan.context)

    def _interrupt(self) -> None:
        """End the jump after the current step if the next plan may differ."""
        if self._jump is None:
            self._wake()
        elif self._scheduler.wants_plan:
            self._cut_short(self._jump)

    def _settle(self) -> None:
        """Apply finished steps to the pool, and end the jump after the current step.

        The rest of the jump may need blocks that are reserved now.
        """
        jump = self._jump
        if jump is None or jump.steps == 1:
            return
        done = self._steps_begun(jump) - 1
        if done:
            plan = jump.plan
            self._take_out(jump, done)
            self._scheduler.settle(plan, done)
        self._cut_short(jump)

    def _take_out(self, jump: _Jump, done: int) -> None:
        """Remove `done` finished steps from the running jump."""
        jump.start_s += jump.factor * self._price_s(jump.plan, done)
        jump.steps -= done

    def _cut_short(self, jump: _Jump) -> None:
        """End the running jump after its current step."""
        steps = self._steps_begun(jump)
        if steps < jump.steps:
            jump.steps = steps
            jump.timer.cancel()
            end_s = jump.start_s + jump.factor * self._price_s(jump.plan, steps)
            jump.timer = self._loop.call_at(end_s, self._on_time)

    def _on_pace(self) -> None:
        """Handle a change of the host's speed; the current step keeps its speed."""
        if self._is_late:
            self._on_time()
        elif self._jump is not None:
            self._cut_short(self._jump)

    def _on_time(self) -> None:
        """Commit the finished jump and start the next."""
        jump = self._jump
        assert jump is not None, "called at its end"
        self._is_late = not self._pace.is_going
        if self._is_late:
            return
        self._jump = None
        self._step = self._scheduler.commit(jump.steps)
        if self._step is not None or not self._begin():
            self._wake()

    def _steps_begun(self, jump: _Jump) -> int:
        """Count the steps finished or running."""
        if jump.steps == 1:
            return 1
        passed_s = (self._loop.time() - jump.start_s) / jump.factor
        return self._prices.steps_until(jump.plan.batch, jump.plan.context, passed_s, jump.steps)

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


class ExactEngine(BatchedEngine):
    """A `BatchedEngine` on a `TimingRunner`: the reference of the jump engine."""

    def __init__(
        self,
        latency: LatencyModel,
        info: RunnerInfo,
        config: SchedulerConfig,
        pace: HostPace | None = None,
        stream_of: StreamOf | None = None,
        *,
        lower_tiers: Sequence[LowerTier] = (),
    ) -> None:
        """Create the engine; `start` starts it.

        Args:
            latency: gives the time of each step.
            info: the simulated model.
            config: scheduler settings.
            pace: speed of the host; None for a constant one.
            stream_of: gives the names of output blocks; None hashes the tokens.
            lower_tiers: KV tiers below the device.
        """
        self._latency = latency
        self._pace = pace or HostPace()
        self._lower_tiers = lower_tiers
        price = prefill_price(latency, lower_tiers)
        super().__init__(TimingRunner(latency, info, self._pace), config, price=price)
        self._block_size = info.block_size
        self._stream_of = stream_of

    async def start(self) -> EngineInfo:
        """Start the engine without transfer of partial blocks, which the jump engine lacks too."""
        info = await super().start()
        self.scheduler.partial_blocks.keeps_any = False
        return info

    def submit(self, request: Request) -> None:
        super().submit(request)
        if self._stream_of is None:
            return
        sequence = self.scheduler._by_id[request.request_id]
        first, end = len(sequence.block_hashes), sequence.end_tokens // self._block_size
        if end > first:
            names = self._stream_of(request).block_hashes(self._block_size, first, end)
            sequence.block_hashes = np.concatenate((sequence.block_hashes, names))

    def so_far(self) -> None:
        """Do nothing: every step is delivered at its end."""

    def check(self) -> None:
        """Raise AssertionError if the state is inconsistent."""
        self.scheduler.check()

    def _compute_s(self, new_tokens: int, cached_tokens: int) -> float:
        return self._pace.factor * self._latency.prefill_s(new_tokens, cached_tokens)

    async def _make_kv(self, pool: BlockPool, runner: RunnerInfo) -> KvManager | None:  # noqa: ARG002 - sizes are those given
        return timed_kv_manager(pool, self._lower_tiers, self._latency, self._pace, self._wake.set)
