"""The engine around every runner: scheduler, block pool and step loop."""

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from time import perf_counter
from typing import Protocol

import numpy as np
from msgspec.structs import replace

from penstock.core import log
from penstock.core.errors import EngineError, Overloaded, PenstockError, RequestError, StepFailed, Unavailable
from penstock.core.hashing import DEFAULT_KEY
from penstock.core.ids import BlockId, RequestId
from penstock.core.types.instances import EngineInfo, Role
from penstock.core.types.kv import KvAction, KvReport
from penstock.core.types.load import Step, WorkerLoad
from penstock.core.types.requests import Delta, FinishReason, Request
from penstock.core.wire import HashArray
from penstock.engine.kv_tiers import TierMaker
from penstock.engine.runner import Runner, RunnerInfo, end_tokens_within, probe_prefill
from penstock.engine.scheduling.config import SchedulerConfig
from penstock.engine.scheduling.scheduler import Scheduler
from penstock.engine.scheduling.sequences import SequenceLimits, StepPlan
from penstock.kv.eviction import PrefillPrice
from penstock.kv.load_or_compute import BreakEven, MeasuredPrefill
from penstock.kv.loads import PrefixLoads
from penstock.kv.manager import KvManager
from penstock.kv.operator_pins import KvActions
from penstock.kv.pool import BlockPool
from penstock.kv.windows import WindowPrefixes
from penstock.seams.kv import KvLoad, KvNames, KvRun, KvSource

TIMEOUT_S = 10.0
"""Half a second is the longest that a grammar within llguidance's limits takes, and its tokenizer takes another; the rest is waiting."""
_log = log.get_logger()


class Preparer(Protocol):
    """Prepares some requests before the queue takes them, such as by compiling a grammar: on a thread, for seconds at most."""

    def is_ready(self, request: Request) -> bool:
        """Say whether a request needs no preparation. Called on the event loop; returns at once."""
        ...

    def prepare(self, request: Request) -> None:
        """Prepare a request. Called on a thread.

        Raises:
            PenstockError: the request cannot be computed.
        """
        ...


@dataclass(slots=True)
class _Preparing:
    request: Request
    future: asyncio.Future[None]
    timer: asyncio.TimerHandle


class Preparations:
    """Prepares requests one after another, on a thread of its own. One event loop owns it."""

    def __init__(
        self, preparer: Preparer, on_done: Callable[[Request, PenstockError | None], None], waiting_max: int
    ) -> None:
        """Make it.

        Args:
            preparer: does the work.
            on_done: called with each request that is prepared, or with why it cannot be.
            waiting_max: requests under way.
        """
        self._preparer = preparer
        self._on_done = on_done
        self._waiting_max = waiting_max
        self._under_way: dict[RequestId, _Preparing] = {}
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="penstock-prepare")

    def __len__(self) -> int:
        return len(self._under_way)

    def is_ready(self, request: Request) -> bool:
        return self._preparer.is_ready(request)

    def begin(self, request: Request) -> None:
        """Prepare a request.

        Raises:
            RequestError: its id is under way already.
            Overloaded: too many are.
        """
        if request.request_id in self._under_way:
            raise RequestError(f"request_id: {request.request_id!r} is under way already; choose another")
        if len(self._under_way) >= self._waiting_max:
            raise Overloaded(
                f"{self._waiting_max} requests wait for their grammar already; try again later",
                retry_after_s=1.0,
            )
        loop = asyncio.get_running_loop()
        future = loop.run_in_executor(self._thread, self._preparer.prepare, request)
        preparing = _Preparing(request, future, loop.call_later(TIMEOUT_S, self._expire, request.request_id))
        self._under_way[request.request_id] = preparing
        future.add_done_callback(lambda _: self._end(preparing))

    def abort(self, request_id: RequestId) -> bool:
        """Drop a request; False if it is not here."""
        preparing = self._under_way.pop(request_id, None)
        if preparing is None:
            return False
        preparing.timer.cancel()
        preparing.future.cancel()
        return True

    def close(self) -> None:
        """Drop all requests. Safe twice."""
        for request_id in tuple(self._under_way):
            self.abort(request_id)
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _expire(self, request_id: RequestId) -> None:
        request = self._under_way[request_id].request
        self.abort(request_id)
        self._on_done(
            request,
            RequestError(
                f"response_format: was not compiled within {TIMEOUT_S:g} s; simplify it, or try again later",
                param="response_format",
            ),
        )

    def _end(self, preparing: _Preparing) -> None:
        request = preparing.request
        if self._under_way.get(request.request_id) is not preparing:
            if not preparing.future.cancelled():
                preparing.future.exception()  # nobody waits for it any more
            return
        del self._under_way[request.request_id]
        preparing.timer.cancel()
        error = preparing.future.exception()
        if error is not None and not isinstance(error, PenstockError):
            _log.error("request_not_prepared", request_id=request.request_id, **log.cause(error))
            error = EngineError(f"request {request.request_id}: could not be prepared: {error!r}")
        self._on_done(request, error)


class BatchedEngine:
    """Implements `Engine`, `Announcing`, `KvBlocks`, `KvPartialBlocks`, `KvManaged` and `RoleAware` over a runner.

    A failed step ends the requests of its batch with `StepFailed`, so that routers retry them on other workers.
    `failed_steps_max` failed steps in a row end the engine, unless one request was in all of them: then the request is
    suspected, not the device. Not thread-safe: call everything on one event loop.
    """

    def __init__(
        self,
        runner: Runner,
        config: SchedulerConfig | None = None,
        *,
        hash_key: bytes = DEFAULT_KEY,
        make_tiers: TierMaker | None = None,
        price: PrefillPrice | None = None,
        preparer: Preparer | None = None,
    ) -> None:
        """Make an engine; `start` loads the model.

        Args:
            runner: computes the steps.
            config: bounds of batch and queue.
            hash_key: the deployment's key for block hashes.
            make_tiers: makes the tiers below the device; None without.
            price: what a lost block costs, for eviction; None is that of an 8B model on an H100, about.
            preparer: prepares constrained requests before they are queued; None where none are taken.
        """
        self.by_role: Mapping[Role, SchedulerConfig] = {}
        """Scheduler settings of roles that differ from `config`. The number of batch slots stays that of `config`."""
        self._runner = runner
        self._make_tiers = make_tiers
        self._price = price
        self._kv: KvManager | None = None
        self._prefill = MeasuredPrefill()
        self._prefix_loads = PrefixLoads()
        self._break_even: BreakEven | None = None
        self.tier_lines: tuple[str, ...] = ()
        """What speed each KV tier needs and has, as probes at the start have measured."""
        self._tier_speeds: Sequence[float | None] = ()
        """Bytes per second of loads, probed at the start."""
        self._own = self._config = config or SchedulerConfig()
        self._hash_key = hash_key
        self._windows: WindowPrefixes | None = None
        """Of groups of layers with block tables of their own; None for one table."""
        self._started: tuple[EngineInfo, BlockPool, Scheduler] | None = None
        self._preparations = (
            None
            if preparer is None
            else Preparations(preparer, self._queue_prepared, self._config.max_waiting_requests)
        )
        self._refused: list[Delta] = []
        """Last deltas of requests that could not be prepared or queued, for the next step."""
        self._wake = asyncio.Event()
        self._closed = False
        self._failed_steps = 0  # in a row
        self._in_all_failed: set[RequestId] = set()
        """Requests in the batch of every failed step since the last good one."""
        self._on_begun: Callable[[Sequence[RequestId]], None] | None = None

    async def start(self) -> EngineInfo:
        """Load the model; further calls return the same info.

        Raises:
            ConfigError: the model or a setting cannot work.
        """
        if self._started is not None:
            return self._started[0]
        runner = await self._runner.start()
        limits = SequenceLimits(
            block_size=runner.block_size,
            model_context_length=runner.context_length,
            kv_tokens=runner.windows.tokens_beside(
                runner.num_blocks, self._config.prompt_budget, runner.block_size
            ),
            vocab_size=runner.vocab_size,
            hash_key=self._hash_key,
            windows=runner.windows,
            groups=runner.groups,
        )
        pool = BlockPool(
            runner.num_blocks,
            runner.block_size,
            self._config.eviction,
            price=self._price,
            tenant_share=self._config.tenant_share,
        )
        self._kv = await self._make_kv(pool, runner)
        if self._kv is not None:
            self._prefill, self._prefix_loads = self._kv.prefill, self._kv.prefix_loads
        else:
            self._prefix_loads = PrefixLoads((), runner.block_size, self._compute_s)
        eos_token_ids = end_tokens_within(runner.vocab_size, runner.eos_token_ids)
        scheduler = Scheduler(pool, limits, self._config, eos_token_ids=eos_token_ids, kv=self._kv)
        scheduler.operator_pins.on_change = self._wake.set
        scheduler.partial_blocks.keeps_any = runner.groups is None
        self._windows = None if runner.groups is None else WindowPrefixes(pool, runner.groups)
        await self._say_break_even(runner, limits)
        info = EngineInfo(
            block_size=runner.block_size,
            total_blocks=runner.num_blocks,
            context_length=limits.context_length,
            max_batch_tokens=self._config.max_batch_tokens,
            max_running_requests=self._config.max_running_requests,
            prompts_at_once=self._config.prompts_at_once,
            kv_bytes_per_block=runner.kv_bytes_per_block,
            kv_layout=runner.kv_layout,
            kv_by_chunk=True,
            interleaves_tenants=True,
            lower_tier_blocks=0 if self._kv is None else self._kv.num_own,
            kv_holders=() if self._kv is None else self._kv.shared,
            embedding_size=runner.embedding_size,
            structured_outputs=runner.structured_outputs,
            sampling_fields=runner.sampling_fields,
        )
        self._started = info, pool, scheduler
        return info

    def submit(self, request: Request) -> None:
        """Queue a request; `steps` yields its tokens.

        Raises:
            RequestError: it can never run here.
            Overloaded: the queue is full.
            Unavailable: the engine is closed.
        """
        if self._closed:
            raise Unavailable("the engine is closed; try another worker")
        if self._preparations is not None and not self._preparations.is_ready(request):
            self._preparations.begin(request)
            return
        self.scheduler.submit(request)
        self._wake.set()

    def abort(self, request_id: RequestId) -> None:
        if self._preparations is not None and self._preparations.abort(request_id):
            return
        self.scheduler.abort(request_id)
        self._wake.set()  # another request may wait for its blocks

    async def steps(self) -> AsyncIterator[Step]:
        """Yield what each step changed, until `close`.

        Raises:
            EngineError: `failed_steps_max` steps failed in a row.
        """
        scheduler = self.scheduler
        while not self._closed:
            if self._refused:
                refused, self._refused = tuple(self._refused), []
                yield Step(deltas=refused, load=self.load())
                continue
            plan = scheduler.plan()
            if plan is not None:
                await self._announce(scheduler.begin(plan))
                step: Step | None = await self._run(scheduler, plan)
            else:
                step = scheduler.take_step()
            if step is not None:
                yield step
            else:
                self._wake.clear()
                await self._wake.wait()

    def announce(self, listener: Callable[[Sequence[RequestId]], None]) -> None:
        self._on_begun = listener

    def load(self) -> WorkerLoad:
        load = self.scheduler.load()
        if not self._preparations:
            return load
        return replace(load, waiting_requests=load.waiting_requests + len(self._preparations))

    async def close(self) -> None:
        """Wait for the current step and release everything; requests get no further delta. Safe twice."""
        self._closed = True
        self._wake.set()
        if self._preparations is not None:
            self._preparations.close()
        if self._started is not None:
            self.scheduler.operator_pins.clear()
        if self._kv is not None:
            await self._kv.close()
        await self._runner.close()

    def assume(self, role: Role) -> EngineInfo:
        """Apply the batch limits and queue order of a role."""
        assert self._started is not None, "used before start"
        info, pool, scheduler = self._started
        config = self._config = self.by_role.get(role, self._own)
        scheduler.assume(role, config)
        info = replace(info, max_batch_tokens=config.max_batch_tokens, prompts_at_once=config.prompts_at_once)
        self._started = info, pool, scheduler
        return info

    def kv_memory(self) -> Sequence[Sequence[object]]:
        return self._runner.kv_memory()

    @property
    def has_kv_groups(self) -> bool:
        return self._windows is not None

    def kv_names(self, block_hashes: HashArray) -> KvNames:
        if self._windows is None:
            return KvNames(block_hashes, np.zeros(0, np.uint64), len(block_hashes))
        return self._windows.moved(block_hashes)

    def pin(self, block_hashes: HashArray) -> list[BlockId]:
        return self.scheduler.pins.pin_named(block_hashes)

    def reserve(self, count: int) -> list[BlockId] | None:
        return self.scheduler.reserve(count)

    def publish(self, block_ids: Sequence[BlockId], block_hashes: HashArray, parent: int | None) -> None:
        self.scheduler.pins.publish(block_ids, block_hashes, parent)
        self._wake.set()

    def unpin(self, block_ids: Sequence[BlockId]) -> None:
        self.scheduler.pins.unpin(block_ids)
        self._wake.set()

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

    def claim_partial_block(self, request_id: RequestId) -> BlockId | None:
        return self.scheduler.partial_blocks.claim(request_id)

    def give_partial_block(self, request_id: RequestId, block_id: BlockId, num_tokens: int) -> None:
        self.scheduler.give_partial_block(request_id, block_id, num_tokens)

    def act(self, action: KvAction) -> KvReport:
        """Act on the cache for an operator."""
        scheduler = self.scheduler
        report = KvActions(self.pool, scheduler.operator_pins, self.clear_cache).act(action)
        scheduler.operator_pins.has_unreported = True
        self._wake.set()
        return report

    def clear_cache(self) -> None:
        """Empty the prefix cache; blocks of running requests stay theirs."""
        self.scheduler.operator_pins.clear()
        self.pool.reset()
        if self._kv is not None:
            self._kv.clear()
        self._wake.set()

    @property
    def kv(self) -> KvManager | None:
        """The tiers below the device, for tests and reports; None without."""
        return self._kv

    @property
    def scheduler(self) -> Scheduler:
        """For tests and reports."""
        assert self._started is not None, "used before start"
        return self._started[2]

    @property
    def pool(self) -> BlockPool:
        """For tests and reports."""
        assert self._started is not None, "used before start"
        return self._started[1]

    def _queue_prepared(self, request: Request, error: PenstockError | None) -> None:
        """Queue a prepared request, or end it with the error of its preparation."""
        if error is None:
            try:
                self.scheduler.submit(request)
            except PenstockError as refused:
                error = refused
        if error is not None:
            self._refused.append(
                Delta(request_id=request.request_id, finish_reason=FinishReason.ERROR, error=error.to_info())
            )
        self._wake.set()

    async def _make_kv(self, pool: BlockPool, runner: RunnerInfo) -> KvManager | None:
        """Make the manager of the tiers below the device; None without tiers."""
        if self._make_tiers is None:
            return None
        # on a thread: memory is taken, files are opened, and weights may be read for their digest
        tiers = await asyncio.to_thread(self._make_tiers, runner, self._runner.kv_memory())
        self._tier_speeds = await asyncio.to_thread(lambda: [tier.probe() for tier in tiers])
        kv = KvManager(pool, tiers, self._wake.set, groups=runner.groups)
        given = self._price or PrefillPrice()

        def set_price(token_s: float, load_s: float) -> None:
            pool.set_price(PrefillPrice(token_s, given.deeper_s / given.token_s * token_s, load_s))

        self._break_even = BreakEven(kv.tiers, kv.prefill, pool.block_size, set_price)
        return kv

    async def _say_break_even(self, runner: RunnerInfo, limits: SequenceLimits) -> None:
        """Say by short probes what speed each tier needs."""
        if self._break_even is None:
            return
        token_s = await probe_prefill(self._runner, runner, limits, self._config)
        if token_s:
            self.tier_lines = self._break_even.probed(token_s, self._tier_speeds)

    def _compute_s(self, new_tokens: int, cached_tokens: int) -> float | None:  # noqa: ARG002 - depth is not measured
        return self._prefill.seconds(new_tokens) if self._prefill.is_known else None

    async def _announce(self, begun: Sequence[RequestId]) -> None:
        if begun and self._on_begun is not None:
            self._on_begun(begun)
            await asyncio.sleep(0)  # one turn of the loop sends it, before a step that may crash the process

    async def _run(self, scheduler: Scheduler, plan: StepPlan) -> Step:
        try:
            started_s = perf_counter()
            sampled = await self._runner.run(plan, scheduler.table)
            step_s, num_tokens = perf_counter() - started_s, int(plan.num_new[plan.num_decode :].sum())
            self._prefill.measure(
                num_tokens,
                step_s,
                decode_rows=plan.num_decode,
                context_tokens=int(scheduler.table.num_computed[plan.slots[: plan.num_decode]].sum()),
            )
            if self._break_even is not None:
                self._break_even.computed(num_tokens)
            step = scheduler.commit(plan, sampled)
        except Exception as error:  # noqa: BLE001 - any error of a runner ends the requests of the step
            return self._fail(scheduler, plan, error)
        self._failed_steps = 0
        return step

    def _fail(self, scheduler: Scheduler, plan: StepPlan, error: Exception) -> Step:
        """End the requests of a failed step.

        Raises:
            EngineError: `failed_steps_max` steps in a row failed, and no request was in all of them.
        """
        computed = set(scheduler.requests_of(plan))
        self._in_all_failed = self._in_all_failed & computed if self._failed_steps else computed
        self._failed_steps += 1
        _log.error(
            "step_failed", requests=len(plan.slots), failed_steps=self._failed_steps, **log.cause(error)
        )
        problem = error.message if isinstance(error, PenstockError) else f"{type(error).__name__}: {error}"
        if self._failed_steps >= self._config.failed_steps_max and not self._in_all_failed:
            raise EngineError(
                f"{self._failed_steps} steps in a row failed, the last one with {problem}"
            ) from error
        return scheduler.fail(plan, StepFailed(f"the step that computed this request failed: {problem}"))
