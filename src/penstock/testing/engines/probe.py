"""Drives an engine step by step, for the engine suite and for your own tests."""

import asyncio
import random
from collections import Counter
from collections.abc import AsyncIterator, Iterable, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Generic, Self, TypeVar

from penstock.core.errors import ErrorInfo
from penstock.core.ids import RequestId
from penstock.core.types.events import AllBlocksCleared, BlockRemoved, BlockStored, Holder, KvEvent, Tier
from penstock.core.types.instances import EngineInfo
from penstock.core.types.load import Step
from penstock.core.types.requests import Delta, FinishReason, Request, SamplingParams, TokenLogprob
from penstock.core.wire import pack_tokens, unpack_hashes, unpack_tokens
from penstock.seams import Engine

E = TypeVar("E", bound=Engine)
_STEPS_MAX = 20_000


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSetup:
    """Limits of an engine under test, by the names that a graph has for them."""

    block_size: int = 8
    kv_blocks: int = 128
    context_length: int = 256
    max_batch_tokens: int = 64
    max_running_requests: int = 8
    max_waiting_requests: int = 64


@dataclass(slots=True)
class Answer:
    """Everything that an engine answered to one request."""

    token_ids: list[int] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    cached_tokens: int | None = None
    logprobs: list[TokenLogprob] = field(default_factory=list)
    error: ErrorInfo | None = None
    deltas: int = 0
    """How many brought tokens."""


class EngineProbe(Generic[E]):
    """Starts an engine, takes its steps one at a time, and checks every delta against the rules of the seam."""

    def __init__(self, engine: E, *, events_delay_s: float = 0.0, cached_tokens_late: bool = False) -> None:
        """Make a probe of an engine that is not started.

        Args:
            engine: the probe starts and closes it.
            events_delay_s: longest time by which its KV events follow the answers.
            cached_tokens_late: whether it may tell cached tokens with the end of an answer.
        """
        self.engine = engine
        self.answers: dict[str, Answer] = {}
        self.events: list[KvEvent] = []
        self._events_delay_s = events_delay_s
        self._cached_tokens_late = cached_tokens_late
        self._open: set[str] = set()
        self._resident_before: Counter[int] = Counter()
        self._next: asyncio.Task[Step | None] | None = None

    async def __aenter__(self) -> Self:
        try:
            self.info: EngineInfo = await self.engine.start()
        except BaseException:
            await self.engine.close()
            raise
        self._steps: AsyncIterator[Step] = aiter(self.engine.steps())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.engine.close()
        if self._next is not None:
            await asyncio.gather(self._next, return_exceptions=True)

    @property
    def is_busy(self) -> bool:
        """Whether any request has not ended yet."""
        return bool(self._open)

    def submit(self, *requests: Request) -> None:
        for request in requests:
            self.engine.submit(request)
            self._open.add(request.request_id)
            self.answers[request.request_id] = Answer()

    def abort(self, request_id: str) -> None:
        """Abort a request; any further delta of it fails the test."""
        self.engine.abort(RequestId(request_id))
        self._open.discard(request_id)

    async def step(self) -> Step:
        """Take one step. Call it only while there is work, else the engine waits for ever."""
        waiting, self._next = self._next, None
        step = await (anext(self._steps, None) if waiting is None else waiting)
        assert step is not None, "the engine ended, though nobody closed it"
        for delta in step.deltas:
            assert delta.request_id in self._open, (
                f"a delta of {delta.request_id}, which ended or was aborted"
            )
            answer = self.answers[delta.request_id]
            is_first = not answer.token_ids and bool(delta.token_ids)
            self._check_cached_tokens(answer, delta, is_first=is_first)
            if delta.cached_tokens is not None:
                answer.cached_tokens = delta.cached_tokens
            answer.deltas += bool(delta.token_ids)
            answer.token_ids += unpack_tokens(delta.token_ids).tolist()
            answer.logprobs += delta.logprobs
            answer.finish_reason, answer.error = delta.finish_reason, delta.error
            assert (delta.error is not None) == (delta.finish_reason is FinishReason.ERROR)
            if delta.finish_reason is not None:
                self._open.remove(delta.request_id)
        self.events += step.events
        return step

    def _check_cached_tokens(self, answer: Answer, delta: Delta, *, is_first: bool) -> None:
        if delta.error is not None:
            return
        is_due = is_first
        if self._cached_tokens_late and (answer.cached_tokens is None or not is_first):
            is_due = delta.finish_reason is not None and answer.cached_tokens is None
            is_due |= is_first and delta.cached_tokens is not None
        assert is_due == (delta.cached_tokens is not None), (
            "cached_tokens come with the first tokens, once; 0 for an engine that does not know"
        )

    async def finish(self) -> None:
        """Take steps until every request has ended.

        Raises:
            AssertionError: they do not end.
        """
        for _ in range(_STEPS_MAX):
            if not self._open:
                return
            await self.step()
        raise AssertionError(f"{len(self._open)} requests have not ended after {_STEPS_MAX} steps")

    async def run(self, *requests: Request) -> list[Answer]:
        """Submit requests together and return their complete answers."""
        self.submit(*requests)
        await self.finish()
        return [self.answers[request.request_id] for request in requests]

    async def settle(self) -> None:
        """Take the KV events that follow the answers: steps until none has had an event for `events_delay_s`."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self._events_delay_s
        while (left := deadline - loop.time()) > 0:
            if self._next is None:
                self._next = loop.create_task(self._take())
            await asyncio.wait({self._next}, timeout=left)
            if self._next.done() and (await self.step()).events:
                deadline = loop.time() + self._events_delay_s

    async def renew(self) -> None:
        """Forget all requests, so that another test can use the started engine; open ones are aborted."""
        for request_id in sorted(self._open):
            self.abort(request_id)
        await self.settle()
        self._resident_before = self.resident()
        self.answers, self.events = {}, []

    def resident(self) -> Counter[int]:
        """Replay all events of the device: low64 -> resident copies. Some engines store equal blocks more than once."""
        resident = Counter(self._resident_before)
        for event in self.events:
            match event:
                case BlockStored(tier=Tier.DEVICE):
                    resident.update(unpack_hashes(event.block_hashes).tolist())
                case BlockRemoved(tier=Tier.DEVICE):
                    removed = Counter(unpack_hashes(event.block_hashes).tolist())
                    assert removed <= resident, "removed, but not stored"
                    resident -= removed
                case AllBlocksCleared(holder=Holder.WORKER):
                    resident.clear()
        return resident

    async def _take(self) -> Step | None:
        return await anext(self._steps, None)


def make_request(
    request_id: str,
    token_ids: Sequence[int],
    *,
    max_tokens: int = 8,
    salt: bytes = b"",
    choice: int = 0,
    num_emitted: int = 0,
    sampling: SamplingParams | None = None,
    tenant: str = "",
) -> Request:
    """Make a request; greedy and with `ignore_eos` unless `sampling` says otherwise."""
    return Request(
        request_id=RequestId(request_id),
        model="any",
        token_ids=pack_tokens(token_ids),
        sampling=sampling or SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True),
        salt=salt,
        choice=choice,
        num_emitted=num_emitted,
        tenant=tenant,
    )


@dataclass(frozen=True, slots=True)
class Arrival:
    """A request of a workload, and the number of the step before which it is submitted."""

    step: int
    request: Request


def make_workload(rng: random.Random, *, requests: int, vocab_size: int, tokens_max: int) -> list[Arrival]:
    """Make requests of at most `tokens_max` tokens, answer included, which share prefixes and arrive in bursts."""
    prefixes = [[rng.randrange(vocab_size) for _ in range(tokens_max // 2)] for _ in range(3)]
    arrivals = []
    step = 0
    for index in range(requests):
        step += rng.choice((0, 0, 0, 1, 5))
        shared = rng.choice(prefixes)[: rng.randint(1, tokens_max // 2)]
        own = [rng.randrange(vocab_size) for _ in range(rng.randint(0, tokens_max // 8))]
        request = make_request(f"w{index}", shared + own, max_tokens=rng.randint(1, tokens_max // 4))
        arrivals.append(Arrival(step, request))
    return arrivals


async def kv_event_trace(engine: Engine, workload: Iterable[Arrival]) -> list[tuple[object, ...]]:
    """Run a workload, in order of arrival, and tell its KV events, hashes named 0, 1, 2, ... by first appearance.

    Names instead of hashes, as the answers of two engines differ: engines that schedule and cache alike have equal
    traces for a workload whose requests end by their number of tokens.
    """
    names: dict[int, int] = {}

    def named(packed: bytes) -> tuple[int, ...]:
        return tuple(names.setdefault(low64, len(names)) for low64 in unpack_hashes(packed).tolist())

    trace: list[tuple[object, ...]] = []
    async with EngineProbe(engine) as probe:
        for arrival in workload:
            while engine.load().steps < arrival.step and probe.is_busy:
                await probe.step()
            probe.submit(arrival.request)
        await probe.finish()
    for event in probe.events:
        match event:
            case BlockStored():
                parent = event.parent_block_hash
                trace.append(
                    (
                        "stored",
                        None if parent is None else names.setdefault(parent, len(names)),
                        named(event.block_hashes),
                    )
                )
            case BlockRemoved():
                trace.append(("removed", named(event.block_hashes)))
            case AllBlocksCleared():
                trace.append(("cleared",))
    return trace
