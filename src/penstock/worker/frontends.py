"""Connected frontends, their requests, and what each frontend learns of the others' requests.

The worker itself does not know how much of a waiting prompt is cached, but the router that sent it looked that up. So each
request's expected prefill work is kept here until its first token, and each router is told the sum of the others'.
"""

import asyncio
import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import islice

import msgspec

from penstock.core.errors import EngineError, Overloaded, PenstockError, RequestError, Unavailable
from penstock.core.ids import RequestId
from penstock.core.log import cause, get_logger
from penstock.core.types.instances import OPTIONAL_SAMPLING, EngineInfo
from penstock.core.types.load import (
    TENANTS_MAX,
    FrontendFigures,
    PeerCount,
    RankNews,
    RefusedFrontends,
    TenantCount,
    WorkerLoad,
)
from penstock.core.types.requests import Delta, FinishReason, MediaPrompt, Request
from penstock.core.wire import num_tokens
from penstock.runtime import spans
from penstock.seams import BroadcastSink, Engine, FrontendSink, MediaAnswer, MediaReading

LATELY_S = 5.0
"""A frontend that has not counted for so long, or that had no requests of a tenant, is not one of the tenant's frontends."""


@dataclass(slots=True, eq=False)
class _Frontend:
    """A frontend that counts here.

    counted_s: when it did last
    inflight:  its requests in flight then, by tenant
    active_s:  when a tenant last had requests there
    peers:     (requests, tokens) by tenant that others have used since
    """

    counted_s: float
    inflight: Mapping[str, int] = field(default_factory=dict)
    active_s: dict[str, float] = field(default_factory=dict)
    peers: dict[str, tuple[int, int]] = field(default_factory=dict)

    def begin(self, counts: Mapping[str, TenantCount], now_s: float) -> None:
        """Take the frontend's requests in flight by tenant; a tenant that `counts` does not name has none."""
        self.counted_s = now_s
        self.inflight = {name: count.inflight for name, count in counts.items()}
        active_s = dict.fromkeys(counts, now_s)
        for name, since_s in self.active_s.items():
            if now_s - since_s < LATELY_S and len(active_s) < TENANTS_MAX:
                active_s.setdefault(name, since_s)
        self.active_s = active_s

    def add(self, name: str, count: TenantCount) -> None:
        """Add what another frontend has used, for `TENANTS_MAX` tenants at most: as many as one message has."""
        requests, tokens = self.peers.get(name, (0, 0))
        if len(self.peers) < TENANTS_MAX or name in self.peers:
            self.peers[name] = requests + count.requests, tokens + count.tokens


class TenantCounter:
    """Keeps the counts of connected frontends, at most `TENANTS_MAX` tenants for each. One event loop owns it."""

    def __init__(self, now_s: Callable[[], float] | None = None) -> None:
        """Know no frontend; `now_s` is the clock, None: the event loop's."""
        self._now_s = now_s or (lambda: asyncio.get_running_loop().time())
        self._frontends: dict[FrontendSink, _Frontend] = {}

    def count(self, counts: Mapping[str, TenantCount], sink: FrontendSink) -> dict[str, PeerCount]:
        """Add what a frontend's tenants have used, and give what they have used at the others since it counted last.

        Args:
            counts: of every tenant that has used something or has requests in flight.
            sink: the frontend's.
        """
        now_s = self._now_s()
        self._frontends = {
            each: known for each, known in self._frontends.items() if now_s - known.counted_s < LATELY_S
        }
        own = self._frontends.setdefault(sink, _Frontend(now_s))
        own.begin(counts, now_s)
        others = [each for each in self._frontends.values() if each is not own]
        for other in others:
            for name, count in counts.items():
                other.add(name, count)
        used, own.peers = own.peers, {}
        names = used.keys() | {name for other in others for name in other.active_s}
        return {name: _peer_count(name, used, others) for name in islice(names, TENANTS_MAX)}

    def forget(self, sink: FrontendSink) -> None:
        """Drop a frontend that has gone: it has nothing in flight, and what its tenants used stays used."""
        self._frontends.pop(sink, None)

    def check(self) -> None:
        """Raise AssertionError where a table is past its bound."""
        for frontend in self._frontends.values():
            for table in (frontend.inflight, frontend.active_s, frontend.peers):
                assert len(table) <= TENANTS_MAX, len(table)


def _peer_count(name: str, used: Mapping[str, tuple[int, int]], others: list[_Frontend]) -> PeerCount:
    requests, tokens = used.get(name, (0, 0))
    return PeerCount(
        requests=requests,
        tokens=tokens,
        inflight=sum(other.inflight.get(name, 0) for other in others),
        frontends=sum(name in other.active_s for other in others),
    )


@dataclass(slots=True)
class Prefill:
    """Prefill work: prompt tokens to compute, and pairs of such a token with a token that it attends to."""

    tokens: int = 0
    pairs: int = 0

    def add(self, other: "Prefill") -> None:
        self.tokens += other.tokens
        self.pairs += other.pairs

    def subtract(self, other: "Prefill") -> None:
        self.tokens -= other.tokens
        self.pairs -= other.pairs


@dataclass(slots=True, eq=False)
class Rank:
    """What frontends sent to one data-parallel rank; a worker has one rank, unless its engine has more.

    frontends: connected to it
    taken:     requests accepted
    requests:  unfinished ones
    prefill:   prefill work left for requests without a first token
    waiting:   requests without a token -> arrival time, oldest first
    """

    number: int
    frontends: int = 0
    taken: int = 0
    requests: int = 0
    prefill: Prefill = field(default_factory=Prefill)
    waiting: dict[RequestId, float] = field(default_factory=dict)


@dataclass(slots=True, eq=False)
class Frontend:
    """One connected frontend, or its connection to one of several data-parallel ranks.

    key:     names it in what is broadcast; empty: its connection carries load reports
    rank:    what it is told of, and sends requests to
    sent:    requests and prefetches that it sent, refused ones included
    taken:   requests accepted
    prefill: prefill work left for its requests without a first token
    repeat:  with a key, the load report that was broadcast since the last one on its connection
    """

    sink: FrontendSink
    rank: Rank
    key: bytes = b""
    sent: int = 0
    taken: int = 0
    requests: set[RequestId] = field(default_factory=set)
    prefill: Prefill = field(default_factory=Prefill)
    repeat: WorkerLoad | None = None

    def push_error(self, request_id: RequestId, error: PenstockError) -> None:
        """Tell the frontend that a request has ended with an error."""
        self.sink.push(
            (Delta(request_id=request_id, finish_reason=FinishReason.ERROR, error=error.to_info()),)
        )


@dataclass(slots=True, eq=False)
class Running:
    """An accepted request. `prefill` is the work that its router expects; None after the first token. Times are of the loop."""

    request: Request
    frontend: Frontend
    prefill: Prefill | None
    arrived_s: float
    first_token_s: float | None = None
    deadline: asyncio.TimerHandle | None = None


class Frontends:
    """The connected frontends and their unfinished requests. One event loop owns it."""

    def __init__(self, now_s: Callable[[], float] | None = None) -> None:
        """Make an empty set; `now_s` is the clock, None: the event loop's."""
        self.idle = asyncio.Event()
        """Set while there is no request."""
        self.all: tuple[Frontend, ...] = ()
        """The connected frontends."""
        self.idle.set()
        self.requests: dict[RequestId, Running] = {}
        self.tenants = TenantCounter(now_s)
        self._by_sink: dict[FrontendSink, Frontend] = {}
        self._ranks: dict[int, Rank] = {}
        self.broadcast: BroadcastSink | None = None
        """Carries load reports to frontends with a key."""
        self._clock = now_s
        self._reports = 0
        self._refused: tuple[RefusedFrontends, ...] = ()
        self.on_refused: Callable[[], None] = lambda: None
        """Called when a connection was not accepted."""

    def has_peers(self, frontend: Frontend) -> bool:
        """Whether other frontends send requests to the same rank."""
        return frontend.rank.frontends > 1

    @cached_property
    def _now_s(self) -> Callable[[], float]:
        """The clock. The loop is looked up once: the lookup takes a system call, half a microsecond."""
        return self._clock or asyncio.get_running_loop().time

    def connect(self, sink: FrontendSink, rank: int = 0, key: bytes = b"") -> Frontend:
        """Add a frontend's connection to a data-parallel rank; with a `key` load reports reach it by broadcasts."""
        place = self._ranks.setdefault(rank, Rank(rank))
        place.frontends += 1
        self._by_sink[sink] = frontend = Frontend(sink, place, key)
        self.all = tuple(self._by_sink.values())
        return frontend

    def at(self, sink: FrontendSink) -> Frontend:
        return self._by_sink[sink]

    def connected(self, sink: FrontendSink) -> Frontend | None:
        """Return the frontend of a connection; None if the connection has ended."""
        return self._by_sink.get(sink)

    def disconnect(self, sink: FrontendSink) -> Frontend | None:
        """Remove a frontend; the caller must `forget` each of its requests."""
        frontend = self._by_sink.pop(sink, None)
        self.tenants.forget(sink)
        if frontend is not None:
            frontend.rank.frontends -= 1
        self.all = tuple(self._by_sink.values())
        return frontend

    def take(self, request: Request, frontend: Frontend) -> Running:
        """Add an accepted request, until it is forgotten."""
        prefill, now_s = _expected(request), self._now_s()
        self.requests[request.request_id] = running = Running(request, frontend, prefill, now_s)
        frontend.requests.add(request.request_id)
        frontend.taken += 1
        frontend.prefill.add(prefill)
        rank = frontend.rank
        rank.taken += 1
        rank.requests += 1
        rank.prefill.add(prefill)
        rank.waiting[request.request_id] = now_s
        self.idle.clear()
        return running

    def prefilled(self, running: Running) -> None:
        """Drop a request's prefill work: it has its first token, or has ended. Safe twice."""
        prefill, running.prefill = running.prefill, None
        if prefill is not None:
            running.frontend.prefill.subtract(prefill)
            rank = running.frontend.rank
            rank.prefill.subtract(prefill)
            running.first_token_s = self._now_s() if spans.is_recording() else None
            del rank.waiting[running.request.request_id]

    def forget(self, request_id: RequestId) -> Running | None:
        """Remove a request that has ended; None if it is unknown."""
        running = self.requests.pop(request_id, None)
        if running is not None:
            self.prefilled(running)
            running.frontend.requests.discard(request_id)
            running.frontend.rank.requests -= 1
            if running.deadline is not None:
                running.deadline.cancel()
            if not self.requests:
                self.idle.set()
            if spans.is_recording():
                self._record(running)
        return running

    def _record(self, running: Running) -> None:
        """Record the spans of a request that has ended: at this worker, up to its first token and from there."""
        request, now_s = running.request, self._now_s()
        first_s = running.first_token_s
        attributes: spans.Attributes = {
            "penstock.request_id": request.request_id,
            "penstock.prompt_tokens": num_tokens(request.token_ids),
            "penstock.prefill_only": request.prefill_only,
        }
        inner = spans.record("worker", request.trace, running.arrived_s, now_s, attributes)
        if inner is not None and first_s is not None:
            spans.record("prefill", inner, running.arrived_s, first_s, {})
            if not request.prefill_only:
                spans.record("decode", inner, first_s, now_s, {})

    def announce(self, request_ids: Sequence[RequestId]) -> None:
        """Send each frontend an empty delta for its requests that the next step computes for the first time."""
        parts: dict[Frontend, list[Delta]] = {}
        for request_id in request_ids:
            running = self.requests.get(request_id)
            if running is not None:
                parts.setdefault(running.frontend, []).append(Delta(request_id=request_id))
        for frontend, deltas in parts.items():
            frontend.sink.push(deltas)

    def unknown_arrivals(self, request: Request, frontend: Frontend) -> int:
        """Count requests of other frontends that the request's router did not know of when it chose this worker.

        0 if the request does not say what its router knew, or no prompt of another frontend is left to compute.
        """
        known, rank = request.known_peer_arrivals, frontend.rank
        if known is None or rank.prefill.tokens == frontend.prefill.tokens:
            return 0
        return rank.taken - frontend.taken - known

    def load_for(self, frontend: Frontend, load: WorkerLoad) -> WorkerLoad:
        """Complete a load report with the figures for this frontend and of its peers."""
        rank = frontend.rank
        return msgspec.structs.replace(
            load,
            number=self._reports,
            accepted_requests=frontend.sent,
            peers=rank.frontends - 1,
            peer_requests=rank.requests - len(frontend.requests),
            peer_prefill_tokens=rank.prefill.tokens - frontend.prefill.tokens,
            peer_prefill_pairs=rank.prefill.pairs - frontend.prefill.pairs,
            peer_arrivals=rank.taken - frontend.taken,
            oldest_wait_s=self._oldest_wait_s((rank,)),
            refused_frontends=self._refused,
        )

    def oldest_wait_s(self) -> float:
        """Give the longest time that a request has waited for its first token so far."""
        return self._oldest_wait_s(self._ranks.values())

    def _oldest_wait_s(self, ranks: Iterable[Rank]) -> float:
        since_s = [next(iter(rank.waiting.values())) for rank in ranks if rank.waiting]
        return self._now_s() - min(since_s) if since_s else 0.0

    def push_load(self, load: WorkerLoad) -> None:
        """Send a load report to every frontend, by its connection or by one broadcast for each rank."""
        self._reports += 1
        by_rank: dict[int, list[Frontend]] = {}
        for frontend in self.all:
            own = self.load_for(frontend, _of_rank(frontend, load))
            if frontend.key:
                frontend.repeat = own
                by_rank.setdefault(frontend.rank.number, []).append(frontend)
            else:
                frontend.sink.push_load(own)
        if self.broadcast is not None:
            for rank, frontends in by_rank.items():
                figures = tuple(
                    FrontendFigures.of(each.key, each.repeat) for each in frontends if each.repeat
                )
                self.broadcast.push_load(RankNews(rank=rank, load=frontends[0].repeat, frontends=figures))

    def push_load_to(self, frontend: Frontend, load: WorkerLoad) -> None:
        """Send a load report to one frontend by its connection: of its data-parallel rank, where there are several."""
        self._reports += 1
        frontend.repeat = None
        frontend.sink.push_load(self.load_for(frontend, _of_rank(frontend, load)))

    def count_refused(self, reason: str) -> None:
        """Count a connection that was not accepted; the next load reports have it."""
        counts = {each.reason: each.count for each in self._refused}
        counts[reason] = counts.get(reason, 0) + 1
        self._refused = tuple(RefusedFrontends(reason=each, count=count) for each, count in counts.items())
        self.on_refused()

    def repeat_load(self, sink: FrontendSink) -> None:
        """Send by a frontend's connection what was broadcast since the last report on it; the broadcast may be lost."""
        frontend = self._by_sink.get(sink)
        if frontend is not None and frontend.repeat is not None:
            load, frontend.repeat = frontend.repeat, None
            sink.push_load(load)

    def check(self) -> None:
        """Raise AssertionError if sums and requests disagree."""
        assert self.all == tuple(self._by_sink.values()), "all: the connected frontends"
        by_frontend = {r: f for f in self._by_sink.values() for r in f.requests}
        assert by_frontend == {r: running.frontend for r, running in self.requests.items()}, (
            "requests: each belongs to the frontend that sent it, which is connected"
        )
        waiting = {request_id for request_id, running in self.requests.items() if running.prefill is not None}
        ranks = self._ranks.values()
        assert {request_id for rank in ranks for request_id in rank.waiting} == waiting, (
            "waiting: those without a token"
        )
        assert self.idle.is_set() == (not self.requests), "idle: set exactly while nothing runs"
        left = {frontend: Prefill() for frontend in self._by_sink.values()}
        for running in self.requests.values():
            if running.prefill is not None:
                left[running.frontend].add(running.prefill)
        for frontend, prefill in left.items():
            assert frontend.prefill == prefill, f"prefill: {frontend.prefill} noted, {prefill} is left"
        for rank in ranks:
            own, total = [frontend for frontend in left if frontend.rank is rank], Prefill()
            for frontend in own:
                total.add(left[frontend])
            assert rank.prefill == total, f"rank {rank.number}: {rank.prefill} noted, {total} is left"
            assert rank.frontends == len(own), f"rank {rank.number}: {rank.frontends} noted, {len(own)} there"
            requests = sum(len(frontend.requests) for frontend in own)
            assert rank.requests == requests, f"rank {rank.number}: {rank.requests} noted, {requests} there"


def _of_rank(frontend: Frontend, load: WorkerLoad) -> WorkerLoad:
    return load.ranks[frontend.rank.number] if load.ranks else load


def _expected(request: Request) -> Prefill:
    """Return the prefill work that a request's router expects: at least one token."""
    prompt = num_tokens(request.token_ids)
    cached = min(max(request.expected_cached_tokens, 0), prompt - 1)
    tokens = prompt - cached
    return Prefill(tokens, tokens * cached + tokens * (tokens + 1) // 2)


_HASH_BYTES = 16


def check_request(request: Request, info: EngineInfo, adapters: Collection[str], worker: str) -> None:
    """Refuse a request that cannot be served here.

    Args:
        request: as it arrived.
        info: the engine's info.
        adapters: the worker's LoRA adapters.
        worker: the worker's name, for error texts.

    Raises:
        RequestError: the request is invalid for every worker of this model.
        Unavailable: another worker may be able to serve it.
    """
    if request.deadline_s is not None and math.isnan(request.deadline_s):
        raise RequestError("deadline_s: must be a number of seconds, or none, got nan")
    if request.adapter is not None and request.adapter not in adapters:
        raise Unavailable(f"{worker} does not have adapter {request.adapter!r}; try another worker")
    if request.sampling.structured is not None and not info.structured_outputs:
        raise RequestError(
            "response_format: the engine of this model does not constrain its output, as response_format, structured_outputs and a"
            ' required tool_choice ask for; expected {"type": "text"} or tool_choice "auto"; leave it out, or serve the model with an engine that does: paged or vllm',
            param="response_format",
        )
    if request.embeds and not info.embedding_size:
        raise RequestError(
            f"model: the engine of {request.model!r} makes no embeddings; serve the model with one that does, such as paged",
            param="model",
        )
    for name in OPTIONAL_SAMPLING:
        value = getattr(request.sampling, name)
        if name in info.sampling_fields or value is None or value == ():
            continue
        if name == "prompt_logprobs":
            raise RequestError(
                f"prompt_logprobs: got {value}, by this field or by logprobs with echo: the engine of model {request.model!r} gives"
                " no log-probabilities of prompts; leave it out, or serve the model with an engine that does: paged, mock or vllm",
                param=name,
            )
        raise RequestError(
            f"{name}: the engine of model {request.model!r} does not have it; leave it out, or serve the model with paged",
            param=name,
        )
    for item in () if request.media is None else request.media.items:
        if all(kind.modality != item.modality for kind in info.media):
            raise RequestError(
                f"messages: the engine of model {request.model!r} takes no {item.modality}; leave it out, or serve the model with"
                " an engine that does, such as vllm",
                param="messages",
            )
    expected = num_tokens(request.token_ids) // info.block_size
    if len(request.block_hashes) != expected * _HASH_BYTES:
        raise RequestError(
            f"block_hashes: got {len(request.block_hashes)} bytes, expected {expected} hashes of {_HASH_BYTES} bytes:"
            f" this worker has blocks of {info.block_size} tokens;"
            " use the model card it serves",
            param="block_hashes",
        )


PROMPTS_MAX = 64
"""Prompts of one worker that are expanded or wait for it; each holds its media in memory."""
_RETRY_AFTER_S = 1.0
_log = get_logger()


class MediaExpansions:
    """Has the engine expand prompts, at most `PROMPTS_MAX` at a time. One event loop owns it."""

    def __init__(self, engine: Engine, *, worker: str, engine_name: str) -> None:
        self._engine = engine
        self._worker = worker
        self._engine_name = engine_name
        self._open = 0

    def begin(self, prompt: MediaPrompt, group: asyncio.TaskGroup | None, answer: MediaAnswer) -> None:
        """Begin to expand a prompt in a task of `group`; None: the worker does not serve now."""
        if not isinstance(self._engine, MediaReading):
            answer(
                RequestError(
                    f"{self._worker}: engine {self._engine_name} takes no images, audio or video",
                    param="messages",
                )
            )
        elif group is None:
            answer(Unavailable(f"{self._worker} is about to start or to stop; try another worker"))
        elif self._open >= PROMPTS_MAX:
            why = f"{self._worker}: {self._open} prompts with media wait, at most {PROMPTS_MAX} may; try another worker"
            answer(Overloaded(why, retry_after_s=_RETRY_AFTER_S))
        else:
            self._open += 1
            group.create_task(self._expand(self._engine, prompt, answer))

    async def _expand(self, engine: MediaReading, prompt: MediaPrompt, answer: MediaAnswer) -> None:
        try:
            answer(await engine.expand_media(prompt))
        except PenstockError as error:
            answer(error)
        except Exception as error:  # noqa: BLE001 - a bug of the engine ends this prompt alone
            _log.error("media_failed", worker=self._worker, **cause(error))
            answer(
                EngineError(f"{self._worker}: engine {self._engine_name} failed on these media: {error!r}")
            )
        finally:
            self._open -= 1
