"""Makes steps of streams: what all streams bring in one turn of the event loop is one step."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Iterable, Iterator
from contextlib import aclosing
from dataclasses import dataclass
from itertools import repeat

from penstock.core import log
from penstock.core.errors import EngineError, Overloaded, PenstockError, RequestError, StepFailed, Unavailable
from penstock.core.hashing import DEFAULT_KEY
from penstock.core.ids import RequestId
from penstock.core.types.events import AllBlocksCleared, BlockRemoved, BlockStored, KvEvent
from penstock.core.types.instances import EngineInfo
from penstock.core.types.load import Step, WorkerLoad
from penstock.core.types.requests import Delta, FinishReason, KvHandle, Request, TokenLogprob
from penstock.core.wire import pack_tokens
from penstock.engine.scheduling.sequences import Sequence, SequenceLimits
from penstock.engine.streams.backend import Backend, Call, Output

_log = log.get_logger()

KV_TTL_S = 300.0
"""How long a prefill may wait for its decode worker: SGLang's own limit, `SGLANG_DISAGGREGATION_WAITING_TIMEOUT`."""
_STATS_EVERY_S = 1.0
_RETRY_AFTER_S = 1.0


class _Pending:
    """What one call has brought since the last step."""

    __slots__ = ("cached_tokens", "error", "finish_reason", "kv", "logprobs", "token_ids")

    def __init__(self) -> None:
        self.token_ids: list[int] = []
        self.logprobs: list[TokenLogprob] = []
        self.finish_reason: FinishReason | None = None
        self.cached_tokens: int | None = None
        self.error: PenstockError | None = None
        self.kv: KvHandle | None = None


@dataclass(slots=True)
class _Rank:
    """Totals of one data-parallel rank since the start, and its blocks; `active_blocks` None where the engine does not say."""

    steps: int = 0
    prefilled: int = 0
    hits: int = 0
    generated: int = 0
    preemptions: int = 0
    cached_blocks: int = 0
    active_blocks: int | None = None

    def count(self, events: Iterable[KvEvent]) -> None:
        """Count the blocks that events store or remove."""
        for event in events:
            match event:
                case BlockStored():
                    self.cached_blocks += len(event.block_hashes) // 8
                case BlockRemoved():
                    self.cached_blocks -= len(event.block_hashes) // 8
                case AllBlocksCleared():
                    self.cached_blocks = 0


class StreamedEngine:
    """Implements `Engine` over a `Backend`.

    The engine has its own queue and batch, which nobody sees from outside. `load` counts the oldest
    `max_running_requests` calls as running, and all their tokens as KV. Not thread-safe: call everything on one event loop.
    """

    def __init__(self, backend: Backend, *, max_waiting_requests: int, hash_key: bytes = DEFAULT_KEY) -> None:
        """Make an engine; `start` loads the model.

        Args:
            backend: the adapter.
            max_waiting_requests: calls beyond those that the engine runs at once; more are refused.
            hash_key: the deployment's key for block hashes.
        """
        self.backend = backend
        self._max_waiting = max_waiting_requests
        self._hash_key = hash_key
        self._started: tuple[EngineInfo, SequenceLimits] | None = None
        self._calls: dict[RequestId, Call] = {}
        self._lingering: dict[int, Call] = {}
        """Prefills whose last delta was sent, and whose KV was not."""
        self._tasks: set[asyncio.Task[None]] = set()
        self._pending: dict[Call, _Pending] = {}
        self._events: dict[int, list[KvEvent]] = {}
        self._wake = asyncio.Event()
        self._closed = False
        self._has_changed = False
        self._failure: str | None = None
        self._numbers = 0
        self._ranks = [_Rank()]

    async def start(self) -> EngineInfo:
        """Load the model; further calls return the same info.

        Raises:
            ConfigError: the model or a setting cannot work.
        """
        if self._started is not None:
            return self._started[0]
        serving = await self.backend.start()
        limits = SequenceLimits(
            block_size=serving.block_size,
            model_context_length=serving.context_length,
            kv_tokens=serving.num_blocks * serving.block_size,
            vocab_size=serving.vocab_size,
            hash_key=self._hash_key,
        )
        info = EngineInfo(
            block_size=serving.block_size,
            total_blocks=serving.num_blocks,
            context_length=limits.context_length,
            max_batch_tokens=serving.max_batch_tokens,
            max_running_requests=serving.max_running_requests,
            data_parallel=serving.ranks,
            kv_events=serving.kv_events,
            transferred_prompts_only=serving.transferred_prompts_only,
        )
        self._started = info, limits
        self._ranks = [_Rank() for _ in range(serving.ranks)]
        self._spawn(self._watch_load())
        self._spawn(self._watch_death())
        if serving.kv_events:
            self._spawn(self._read_events())
        return info

    def submit(self, request: Request) -> None:
        """Give the engine a request; `steps` yields its tokens.

        Raises:
            RequestError: it can never run here.
            Overloaded: too many requests wait.
            Unavailable: the engine is closed, or lacks what the request needs.
        """
        if self._closed:
            raise Unavailable("the engine is closed; try another worker")
        limits = self._parts[1]
        if request.request_id in self._calls:
            raise RequestError(
                f"request id {request.request_id}: a request with this id is under way; use a new id"
            )
        waiting = sum(not call.is_running for call in self._calls.values())
        if waiting >= self._max_waiting:
            raise Overloaded(
                f"{waiting} requests wait, the most allowed is {self._max_waiting}; retry later",
                retry_after_s=_RETRY_AFTER_S,
            )
        self._numbers += 1
        checked = Sequence.of(request, limits, arrival=self._numbers)
        call = Call(
            number=self._numbers,
            request=request,
            token_ids=checked.token_ids.tolist(),
            sampling=checked.request.sampling,
            max_new_tokens=checked.end_tokens - checked.known,
            min_new_tokens=max(0, min(checked.stops_after, checked.end_tokens) - checked.known),
            rank=self._least_loaded() if request.rank is None else request.rank,
        )
        self.backend.check(call)
        self._calls[request.request_id] = call
        call.task = self._spawn(self._follow(call))
        self._changed()

    def abort(self, request_id: RequestId) -> None:
        call = self._calls.pop(request_id, None)
        if call is not None:
            self._drop(call)
            self._changed()

    async def steps(self) -> AsyncIterator[Step]:
        """Yield what the streams brought since the last step, until `close`.

        Raises:
            EngineError: the engine died.
        """
        while True:
            await self._wake.wait()
            self._wake.clear()
            if self._closed:
                return
            await asyncio.sleep(0)  # the other streams of this turn
            if self._failure is not None:
                raise EngineError(self._failure)
            if self._has_changed or self._pending or self._events:
                for step in self._take():
                    yield step

    def load(self) -> WorkerLoad:
        return WorkerLoad.of_ranks([self._load_of(rank) for rank in range(len(self._ranks))])

    def _load_of(self, rank: int) -> WorkerLoad:
        info, limits = self._parts
        counts = self._ranks[rank]
        running = waiting = queued = context = estimated = 0
        for call in (*self._calls.values(), *self._lingering.values()):
            if call.rank != rank:
                continue
            if call.is_running:
                running += 1
                estimated += limits.blocks_for(call.num_tokens)
            else:
                waiting += 1
            if call.cached_tokens is None:
                queued += len(call.token_ids)
            else:
                context += call.num_tokens
        active = estimated if counts.active_blocks is None else counts.active_blocks
        return WorkerLoad(
            running_requests=running,
            waiting_requests=waiting,
            active_blocks=min(active, info.total_blocks) if running else 0,
            cached_blocks=min(counts.cached_blocks, info.total_blocks),
            total_blocks=info.total_blocks,
            queued_prefill_tokens=queued,
            context_tokens=context,
            steps=counts.steps,
            preemptions=counts.preemptions,
            prefilled_tokens=counts.prefilled,
            prefix_hit_tokens=counts.hits,
            generated_tokens=counts.generated,
        )

    async def close(self) -> None:
        """Release everything; requests get no further delta. Safe twice."""
        self._closed = True
        self._wake.set()
        for call in (*self._calls.values(), *self._lingering.values()):
            self._drop(call)
        self._calls.clear()
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self.backend.close()

    @property
    def _parts(self) -> tuple[EngineInfo, SequenceLimits]:
        assert self._started is not None, "used before start"
        return self._started

    def _spawn(self, work: "asyncio._CoroutineLike[None]") -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def _changed(self) -> None:
        self._has_changed = True
        self._wake.set()

    def _drop(self, call: Call) -> None:
        call.is_dropped = True
        self._pending.pop(call, None)
        if self._failure is None:
            self.backend.cancel(call)

    def _least_loaded(self) -> int:
        """Choose the rank of a request that no router sent: the one with the fewest calls."""
        counts = Counter(call.rank for call in self._calls.values())
        return min(range(len(self._ranks)), key=counts.__getitem__)

    def _take(self) -> Iterator[Step]:
        """Make a step of all that is pending, and count more calls as running where there is room.

        Events of further ranks come in steps of their own before it.
        """
        self._has_changed = False
        pending, self._pending = self._pending, {}
        events, self._events = self._events, {}
        for rank in {call.rank for call in pending} or {0}:
            self._ranks[rank].steps += 1
        deltas = tuple(self._delta(call, each) for call, each in pending.items())
        lingering = Counter(call.rank for call in self._lingering.values())
        room = [self._parts[0].max_running_requests - lingering[rank] for rank in range(len(self._ranks))]
        for call in self._calls.values():
            if room[call.rank] > 0:
                call.is_running = True
                room[call.rank] -= 1
        *first, (rank, last) = events.items() or ((0, []),)
        for other, own in first:
            yield Step(events=tuple(own), rank=other, load=self.load())
        yield Step(deltas=deltas, events=tuple(last), rank=rank, load=self.load())

    def _delta(self, call: Call, pending: _Pending) -> Delta:
        return Delta(
            request_id=call.request.request_id,
            token_ids=pack_tokens(pending.token_ids),
            finish_reason=pending.finish_reason,
            cached_tokens=pending.cached_tokens,
            logprobs=tuple(pending.logprobs),
            error=None if pending.error is None else pending.error.to_info(),
            kv=pending.kv,
        )

    async def _follow(self, call: Call) -> None:
        """Read a call's stream to its end; a stream that ends without a reason, or fails, ends the request with an error."""
        error: PenstockError
        try:
            async with asyncio.timeout(None) as limit, aclosing(self.backend.generate(call)) as stream:
                async for output in stream:
                    if call.number in self._lingering:
                        self._count_prompt(call, output.cached_tokens)
                    elif not call.is_dropped:
                        self._add(call, output)
                    if output.finish_reason is not None:
                        limit.reschedule(asyncio.get_running_loop().time() + KV_TTL_S)
            error = StepFailed("the engine ended the request without a reason")
        except TimeoutError:
            self.backend.cancel(call)  # no decode worker came for its KV
            error = StepFailed(f"the engine did not end a finished request within {KV_TTL_S:g} s")
        except PenstockError as refused:
            error = refused
        except Exception as failed:  # noqa: BLE001 - whatever an engine raises ends this request alone
            _log.error("request_failed", request_id=call.request.request_id, **log.cause(failed))
            error = StepFailed(f"the engine failed on this request: {type(failed).__name__}: {failed}")
        finally:
            if self._lingering.pop(call.number, None) is not None:
                self._changed()
        if not call.is_dropped and self._calls.get(call.request.request_id) is call:
            self._end(call, FinishReason.ERROR).error = error

    def _add(self, call: Call, output: Output) -> None:
        pending = self._pending.setdefault(call, _Pending())
        if call.cached_tokens is None and output.token_ids:
            self._count_prompt(call, output.cached_tokens)
            pending.cached_tokens = call.cached_tokens
        pending.token_ids += output.token_ids
        pending.logprobs += output.logprobs
        call.num_generated += len(output.token_ids)
        counts = self._ranks[call.rank]
        counts.preemptions += max(0, output.preemptions - call.preemptions)
        call.preemptions = max(call.preemptions, output.preemptions)
        counts.generated += len(output.token_ids)
        if output.finish_reason is not None:
            pending = self._end(call, output.finish_reason)
            if output.kv_payload:
                pending.kv = KvHandle.native(output.kv_payload, len(call.token_ids), KV_TTL_S)
                self._lingering[call.number] = call
                call.is_running = True
        self._wake.set()

    def _count_prompt(self, call: Call, cached_tokens: int) -> None:
        if call.cached_tokens is None:
            call.cached_tokens = min(cached_tokens, len(call.token_ids) - 1)
            counts = self._ranks[call.rank]
            counts.hits += call.cached_tokens
            counts.prefilled += len(call.token_ids) - call.cached_tokens

    def _end(self, call: Call, reason: FinishReason) -> _Pending:
        self._calls.pop(call.request.request_id, None)
        pending = self._pending.setdefault(call, _Pending())
        pending.finish_reason = reason
        self._wake.set()
        return pending

    async def _read_events(self) -> None:
        try:
            async for rank, events in self.backend.events():
                self._ranks[rank].count(events)
                if events:
                    self._events.setdefault(rank, []).extend(events)
                    self._wake.set()
        except Exception as error:  # noqa: BLE001 - a cache that routers know nothing of is slower, not wrong
            _log.error("kv_events_lost", **log.cause(error))
            for rank, counts in enumerate(self._ranks):
                self._events.setdefault(rank, []).append(AllBlocksCleared())
                counts.cached_blocks = 0
            self._wake.set()

    async def _watch_load(self) -> None:
        try:
            while True:
                await asyncio.sleep(_STATS_EVERY_S)
                self._note_active(await self.backend.active_blocks() if self._calls else None)
        except Exception as error:  # noqa: BLE001 - the load is estimated without
            _log.warning("engine_load_lost", **log.cause(error))
            self._note_active(None)

    def _note_active(self, blocks: Iterable[int] | None) -> None:
        for counts, active in zip(self._ranks, repeat(None) if blocks is None else blocks, strict=False):
            counts.active_blocks = active

    async def _watch_death(self) -> None:
        self._failure = await self.backend.died()
        self._wake.set()
