"""The jump engine's scheduler: like `penstock.engine.scheduling.scheduler`, with many decode steps in one plan.

Its state is native. It has the same rules of admission, growth, preemption and publishing as `Scheduler`, so that both
admit the same requests at the same steps.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from itertools import count
from weakref import proxy

import numpy as np

from penstock.core.errors import Overloaded, RequestError
from penstock.core.ids import BlockId, RequestId
from penstock.core.native import native
from penstock.core.types.events import KvEvent
from penstock.core.types.instances import Role
from penstock.core.types.load import Step, WorkerLoad
from penstock.core.types.requests import Delta, FinishReason, Request
from penstock.core.wire import PackedTokens, num_tokens, unpack_hashes
from penstock.engine.scheduling.config import SchedulerConfig
from penstock.kv.groups import ONE_TABLE, Windows
from penstock.kv.loads import leading_runs
from penstock.kv.manager import KvManager
from penstock.kv.pool import BlockPool, Pins
from penstock.kv.retention import Retention
from penstock.seams.kv import KvRun
from penstock.sim.workload import StreamOf


def check_bounds(config: SchedulerConfig) -> None:
    """Check that a step can hold one token of every running request.

    Raises:
        ValueError: max_running_requests > max_batch_tokens.
    """
    if config.max_running_requests > config.max_batch_tokens:
        raise ValueError(
            f"max_running_requests: must be <= max_batch_tokens, got {config.max_running_requests} and {config.max_batch_tokens}"
        )


def check_fits(known: int, num_waiting: int, context_length: int, config: SchedulerConfig) -> None:
    """Check that a request of `known` tokens can run, and that the queue has room.

    Raises:
        RequestError: the request can never run.
        Overloaded: the queue is full.
    """
    if known >= context_length:
        raise RequestError(
            f"prompt of {known} tokens: must be < {context_length}, the context and all KV blocks",
            param="prompt",
        )
    if num_waiting >= config.max_waiting_requests:
        raise Overloaded(
            f"{num_waiting} requests wait already, max_waiting_requests; try again later", retry_after_s=1.0
        )


_HASH_BYTES = 16
_NativeDelta = tuple[int, int, int, bool, int | None]


@dataclass(slots=True)
class JumpPlan:
    """Either `steps` decode steps, or one step with prefill chunks and decode.

    batch:   decoding sequences, including prompts that lack only their last token, which cost the same
    context: sum of their tokens at the first step
    chunks:  (tokens to compute, tokens before them) of the other prompts; None for decode steps
    """

    steps: int
    batch: int
    context: int
    chunks: list[tuple[int, int]] | None


@lru_cache(maxsize=1)
def _packed_positions(end: int) -> bytes:
    """Pack 0 .. end - 1 as int32; outputs are slices of it and need no array of their own."""
    return np.arange(end, dtype="<i4").tobytes()


class _Tiers:
    """Answers the native scheduler about lower tiers. Requests are named by their number."""

    def __init__(self, kv: KvManager) -> None:
        self._kv = kv
        self._runs: list[KvRun] = []
        self._ahead: list[tuple[int, int]] = []
        self._prefetched: dict[int, list[KvRun]] = {}

    def find(
        self, hashes: bytes, hits: list[BlockId], known_tokens: int, ahead: list[tuple[int, int]]
    ) -> int:
        """Count the blocks after `hits` that are worth loading, where the engine computes `ahead` before."""
        self._ahead = ahead
        self._runs = self._kv.choose_runs(unpack_hashes(hashes).reshape(-1, 2), hits, known_tokens, ahead)
        return sum(run.num_blocks for run in self._runs)

    def load(self, number: int, prompt_tokens: int | None) -> list[BlockId]:
        """Start to load what `find` found last; counts up to `prompt_tokens` of it, None counts nothing."""
        if prompt_tokens is not None:
            self._kv.count(self._runs, prompt_tokens)
        return self._kv.begin(RequestId(str(number)), self._runs)

    def prefetch(self, number: int) -> list[BlockId]:
        """Start to load what `find` found last for a request that waits."""
        self._prefetched[number] = self._runs
        self._kv.count_prefetch(self._runs)
        return self._kv.begin(RequestId(str(number)), self._runs, self._ahead)

    def use_prefetch(self, number: int, prompt_tokens: int | None) -> None:
        """Count up to `prompt_tokens` of what was prefetched for a request that is admitted; None counts nothing."""
        runs = self._prefetched.pop(number, [])
        if prompt_tokens is not None:
            self._kv.count(runs, prompt_tokens)

    def end_prefetch(self, number: int) -> None:
        """Cancel the prefetch of a request that waits."""
        self._kv.count_wasted(self._prefetched.pop(number, []))
        self.cancel(number)

    def cancel(self, number: int) -> None:
        self._kv.cancel(RequestId(str(number)))

    def offload(self, hashes: bytes) -> None:
        """Keep a prefix of a request that leaves the batch."""
        self._kv.offload(unpack_hashes(hashes).reshape(-1, 2))

    def take_arrived(self) -> list[tuple[int, list[BlockId]]]:
        """Return the requests whose load has ended, and the blocks that have come."""
        arrived = []
        for arrival in self._kv.take_arrived():
            number = int(arrival.request_id)
            if number in self._prefetched:
                self._prefetched[number] = leading_runs(self._prefetched[number], arrival.num_blocks)
            arrived.append((number, list(arrival.block_ids)))
        return arrived


class JumpScheduler:
    """Owns an engine's requests and pool. Each plan is committed before the next one. One task owns it."""

    def __init__(
        self,
        pool: BlockPool,
        context_length: int,
        config: SchedulerConfig,
        stream_of: StreamOf,
        kv: KvManager | None = None,
        *,
        windows: Windows = ONE_TABLE,
    ) -> None:
        """Create it without requests.

        Args:
            pool: the engine's block pool.
            context_length: most tokens of a request.
            config: a step must hold one token of every running request.
            stream_of: gives the block names of a request.
            kv: the tiers below the same pool; None without.
            windows: the model's sliding windows with blocks of their own.
        """
        check_bounds(config)
        assert native is not None, "without native code engines run every step"
        self._pool = pool
        self._kv = kv
        self._tiers = None if kv is None else _Tiers(kv)
        self._context_length = context_length
        self._config = config
        self._stream_of = stream_of
        self._positions = _packed_positions(context_length)
        # The state cannot own its tiers: they know the engine, and the garbage collector sees no cycle through native code.
        tiers = (None, 0) if self._tiers is None else (proxy(self._tiers), config.prefetched_requests)
        self._states = native.JumpScheduler(
            pool.native,
            pool.block_size,
            config.max_batch_tokens,
            config.prompt_budget,
            config.max_running_requests,
            *tiers,
            windows.layers,
            windows.whole_layers,
        )
        self.pins = Pins(pool, self._states.look_again)
        """Blocks pinned for KV transfers."""
        if kv is not None:
            kv.watch(self._states.look_again)
        self._retention = Retention(pool, config.retention)
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
            RequestError: the request can never run here, or the TTL of its KV is too long.
            Overloaded: the queue is full.
        """
        self._retention.arrive(request)
        known = num_tokens(request.token_ids)
        check_fits(known, self._states.num_waiting, self._context_length, self._config)
        number, num_prompt = next(self._arrivals), known - request.num_emitted
        end_tokens = min(num_prompt + request.sampling.max_tokens, self._context_length)
        prompt_bytes = num_prompt // self._pool.block_size * _HASH_BYTES
        names = request.block_hashes[:prompt_bytes]  # the stream names blocks past the prompt
        tokens, stream = (num_prompt, known), self._stream_of(request)
        self._states.submit(
            number, tokens, end_tokens, names, stream, request.prefill_only, self._retention.hints(request)
        )
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
        has_arrived = self._kv is not None and self._kv.has_arrived
        return has_arrived or bool(self._states.wants_plan)

    def plan(self) -> JumpPlan | None:
        """Plan the next jump; None if there is nothing to do."""
        self._states.set_now(self._retention.time())
        plan = self._states.plan()
        return None if plan is None else JumpPlan(*plan)

    def commit(self, steps: int) -> Step | None:
        """Commit the first `steps` steps of the plan; None if there is nothing to deliver."""
        self._states.set_now(self._retention.time())
        deltas, prefilling, has_changed = self._states.commit(steps)
        events = self._take_events()
        if not (has_changed or events):
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
        return Step(deltas=self._deltas(self._states.so_far()), events=self._take_events())

    def take_step(self) -> Step | None:
        """Give the events that belong to no step: blocks moved between tiers."""
        events = self._take_events()
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
            onboarded_tokens=() if self._kv is None else self._kv.tokens,
        )

    def check(self) -> None:
        """Raise AssertionError if the state is inconsistent."""
        self._pool.check()
        self._states.check()
        held = self.pins.holders()
        if self._kv is not None:
            self._kv.check()
            held.update(self._kv.holders())
        for block_id, references in self._states.held().items():
            held[block_id] = held.get(block_id, 0) + references
        assert held == self._pool.references(), "sequences and pins hold other blocks than the pool thinks"
        assert self._ids == {number: request_id for request_id, number in self._numbers.items()}, (
            "requests: each has a number"
        )

    def _take_events(self) -> tuple[KvEvent, ...]:
        events = self._pool.take_events()
        return events if self._kv is None else self._kv.with_events(events)

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
