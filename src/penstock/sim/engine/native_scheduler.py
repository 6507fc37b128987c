"""The jump engine's scheduler in native code: a fifth of the time of its Python reference."""

from collections.abc import Iterable
from itertools import count

from penstock.core.ids import BlockId, RequestId
from penstock.core.native import native
from penstock.core.types.instances import Role
from penstock.core.types.load import WorkerLoad
from penstock.core.types.requests import Delta, FinishReason, Request
from penstock.core.types.steps import Step
from penstock.core.wire import PackedTokens, num_tokens
from penstock.engine.scheduling.config import SchedulerConfig
from penstock.kv.pool.pins import Pins
from penstock.kv.pool.pool import BlockPool
from penstock.kv.tiers.onboarding import Onboarding
from penstock.kv.tiers.tiers import TieredPool
from penstock.sim.engine.bounds import check_bounds, check_fits
from penstock.sim.engine.jump_plan import JumpPlan
from penstock.sim.engine.positions import packed_positions
from penstock.sim.engine.scheduler import JumpScheduler
from penstock.sim.workload.prompt import StreamOf

_HASH_BYTES = 16
_NativeDelta = tuple[int, int, int, bool, int | None]


def make_scheduler(
    pool: BlockPool | TieredPool,
    context_length: int,
    config: SchedulerConfig,
    stream_of: StreamOf,
    onboarding: Onboarding | None,
) -> "JumpScheduler | NativeScheduler":
    """Make the native scheduler, or its Python reference for pools with lower tiers, which the native one lacks."""
    if isinstance(pool, BlockPool) and pool.native is not None:
        return NativeScheduler(pool, context_length, config, stream_of)
    return JumpScheduler(pool, context_length, config, stream_of, onboarding)


class NativeScheduler:
    """Same as `JumpScheduler`, on a native pool. One task owns it."""

    def __init__(
        self, pool: BlockPool, context_length: int, config: SchedulerConfig, stream_of: StreamOf
    ) -> None:
        """Create it without requests; see `JumpScheduler`."""
        check_bounds(config)
        assert native is not None, "there is a native pool"
        self._pool = pool
        self._context_length = context_length
        self._config = config
        self._stream_of = stream_of
        self._positions = packed_positions(context_length)
        self._states = native.JumpScheduler(
            pool.native,
            pool.block_size,
            config.max_batch_tokens,
            config.prompt_budget,
            config.max_running_requests,
        )
        self.pins = Pins(pool, self._states.look_again)
        """Blocks pinned for KV transfers."""
        self._arrivals = count()
        self._numbers: dict[RequestId, int] = {}
        self._ids: dict[int, RequestId] = {}
        self.assume(Role.AGGREGATED)

    def assume(self, role: Role) -> None:
        """Set the queue order of a role."""
        config = self._config
        self._states.reorder(config.ageing if config.is_shortest_first(role) else None)

    def submit(self, request: Request) -> None:
        """Queue a request.

        Raises:
            RequestError: the request can never run here.
            Overloaded: the queue is full.
        """
        known = num_tokens(request.token_ids)
        check_fits(known, self._states.num_waiting, self._context_length, self._config)
        number, num_prompt = next(self._arrivals), known - request.num_emitted
        end_tokens = min(num_prompt + request.sampling.max_tokens, self._context_length)
        prompt_bytes = num_prompt // self._pool.block_size * _HASH_BYTES
        names = request.block_hashes[:prompt_bytes]  # the stream names blocks past the prompt
        tokens, stream = (num_prompt, known), self._stream_of(request)
        self._states.submit(number, tokens, end_tokens, names, stream, request.prefill_only)
        self._numbers[request.request_id] = number
        self._ids[number] = request.request_id

    def abort(self, request_id: RequestId) -> None:
        """Drop a request without another delta; a running one's blocks are freed at the next commit or plan."""
        number = self._numbers.pop(request_id, None)
        if number is not None:
            del self._ids[number]
            self._states.abort(number)

    @property
    def wants_plan(self) -> bool:
        """Whether the next plan may differ from the current one: a request may be admitted or was dropped."""
        wants_plan: bool = self._states.wants_plan
        return wants_plan

    def plan(self) -> JumpPlan | None:
        """Plan the next jump; None if there is nothing to do."""
        plan = self._states.plan()
        return None if plan is None else JumpPlan(*plan)

    def commit(self, steps: int) -> Step | None:
        """Commit the first `steps` steps of the plan; None if there is nothing to deliver."""
        deltas, prefilling, has_news = self._states.commit(steps)
        events = self._pool.take_events()
        if not (has_news or events):
            return None
        ids = tuple([self._ids[number] for number in prefilling])
        return Step(deltas=self._deltas(deltas), events=events, prefilling=ids)

    def settle(self, plan: JumpPlan, steps: int) -> None:
        """Commit the first `steps` decode steps while the next step runs; that step gets its blocks."""
        self._states.settle(steps)
        plan.steps -= steps
        plan.context += steps * plan.batch

    def so_far(self, plan: JumpPlan, steps: int) -> Step:
        """Settle, and deliver the tokens."""
        self.settle(plan, steps)
        return Step(deltas=self._deltas(self._states.so_far()), events=self._pool.take_events())

    def take_step(self) -> Step | None:
        """Give the events that belong to no step: blocks moved between tiers."""
        events = self._pool.take_events()
        return Step(events=events) if events else None

    def reserve(self, count: int) -> list[BlockId] | None:
        """Reserve blocks for an incoming KV transfer; the plan must be settled. None if running requests need the blocks soon."""
        if count + self._states.blocks_reserved > self._pool.num_available:
            return None
        return self.pins.reserve(count)

    def load(self, steps: int = 0) -> WorkerLoad:
        """Give the load after `steps` steps of the running plan."""
        (
            running,
            waiting,
            active_blocks,
            queued_prefill_tokens,
            context_tokens,
            done,
            preemptions,
            prefilled_tokens,
            prefix_hit_tokens,
            generated_tokens,
        ) = self._states.load(steps)
        return WorkerLoad(
            running_requests=running,
            waiting_requests=waiting,
            active_blocks=active_blocks,
            cached_blocks=self._pool.num_cached,
            total_blocks=self._pool.num_blocks,
            queued_prefill_tokens=queued_prefill_tokens,
            context_tokens=context_tokens,
            steps=done,
            preemptions=preemptions,
            prefilled_tokens=prefilled_tokens,
            prefix_hit_tokens=prefix_hit_tokens,
            generated_tokens=generated_tokens,
        )

    def check(self) -> None:
        """Raise AssertionError if the state is inconsistent."""
        self._pool.check()
        self._states.check()
        held = self.pins.holders()
        for block_id, references in self._states.held().items():
            held[block_id] = held.get(block_id, 0) + references
        assert held == self._pool.references(), "sequences and pins hold other blocks than the pool thinks"
        assert self._ids == {number: request_id for request_id, number in self._numbers.items()}, (
            "requests: each has a number"
        )

    def _deltas(self, deltas: Iterable[_NativeDelta]) -> tuple[Delta, ...]:
        """Make deltas; each token id is its position."""
        return tuple([self._delta(*part) for part in deltas])

    def _delta(self, number: int, begin: int, end: int, is_end: bool, cached_tokens: int | None) -> Delta:  # noqa: FBT001 - fields of a tuple
        request_id = self._ids[number]
        if is_end:
            del self._ids[number], self._numbers[request_id]
        return Delta(
            request_id=request_id,
            token_ids=PackedTokens(self._positions[4 * begin : 4 * end]),
            finish_reason=FinishReason.LENGTH if is_end else None,
            cached_tokens=cached_tokens,
        )
