"""The engine `openai`: one running server as a Penstock engine. Each request is one streamed HTTP request."""

import asyncio
import math
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import msgspec

from penstock.core.errors import (
    ConfigError,
    EngineError,
    Overloaded,
    PenstockError,
    RequestError,
    StepFailed,
    Unavailable,
    WrongServerError,
)
from penstock.core.ids import RequestId
from penstock.core.log import get_logger
from penstock.core.types.events import KvEvent
from penstock.core.types.instances import EngineInfo
from penstock.core.types.load import Step, WorkerLoad
from penstock.core.types.requests import Delta, FinishReason, Request, TokenLogprob
from penstock.core.wire import num_tokens, pack_tokens
from penstock.engine.kv_events.translator import check_block_size
from penstock.engine.openai.apis.api import AnswerPiece, client_salt
from penstock.engine.openai.config import ServerConfig
from penstock.engine.openai.events import Follow
from penstock.engine.openai.health import HealthWatch
from penstock.engine.openai.prefixes import AdvertisedPrefixes, PrefixWatch
from penstock.engine.openai.server import DEPLOYMENT, EngineServer, ServerLoad
from penstock.engine.scheduling.sequences import checked_sampling, checked_tokens


class ServerStream:
    """A request's state. One task feeds it."""

    __slots__ = (
        "_ends", "_finish", "_has_begun", "_held", "_held_logprobs", "_said_cached", "_stops", "asked", "cached_tokens", "extra", "is_background", "is_done", "is_over", "is_taken", "keeps",
        "num_tokens", "rank", "request", "task",
    )  # fmt: skip

    def __init__(self, request: Request, eos_token_ids: tuple[int, ...], extra: dict[str, Any]) -> None:
        """Take a request.

        Args:
            request: as it goes to the server.
            eos_token_ids: of the model; the answer ends at one that its server does not know, and one is added where a server ends
                an answer without saying by which token.
            extra: fields to add to the server's request.
        """
        self.request = request
        self.rank = request.rank or 0
        """The server's data-parallel rank that computes it."""
        self.asked = request
        """What the server is asked for: the rest of the request, where the answer has begun elsewhere."""
        self.extra = extra
        self.task: asyncio.Task[None] | None = None
        self.num_tokens = 0
        """Tokens of the answer so far."""
        self.is_over = False
        """Whether the rest of the answer is not needed."""
        self.keeps = False
        """Whether the server still computes it after its last delta, as SGLang does for a prefill."""
        self.is_background = False
        """Whether its last delta was made."""
        self.is_taken = False
        """Whether that delta was yielded."""
        self.is_done = False
        """Whether its task has ended."""
        self._ends = frozenset(eos_token_ids)
        self._stops = (*eos_token_ids, *request.sampling.stop_token_ids)
        self._finish: FinishReason | None = None
        self.cached_tokens: int | None = None
        """Prompt tokens that the server had cached, once it has said so."""
        self._has_begun = self._said_cached = False
        self._held: tuple[int, ...] = ()  # a stop token, which may be the last one
        self._held_logprobs: tuple[TokenLogprob, ...] = ()

    @property
    def has_finished(self) -> bool:
        """Whether the server has sent a finish reason; the number of cached tokens may still follow."""
        return self._finish is not None

    def feed(self, piece: AnswerPiece) -> Delta | None:
        """Take a piece of the answer; a delta where it has tokens. `end` gives the last one."""
        self.note_cached(piece)
        if self._finish is not None:  # tokens after the end do not count
            self.is_over |= piece.is_last or self.cached_tokens is not None or bool(piece.token_ids)
            return None
        left = self.request.sampling.max_tokens - self.request.num_emitted - self.num_tokens
        new = piece.token_ids[:left]
        self._finish = piece.finish_reason
        if len(new) < len(piece.token_ids):  # the server ignores max_tokens
            self._finish = FinishReason.LENGTH
            self.is_over = True
        if (ended := self._up_to_end(new)) is not None:
            self._finish = FinishReason.STOP
            self.is_over |= len(ended) < len(piece.token_ids)  # the server does not know this end
            new = ended
        self.num_tokens += len(new)
        self.is_over |= piece.is_last or (self._finish is not None and self.cached_tokens is not None)
        token_ids = self._held + new
        logprobs = self._held_logprobs + piece.logprobs[: len(new)]
        whole = len(token_ids) - (bool(token_ids) and token_ids[-1] in self._stops)
        self._held, self._held_logprobs = token_ids[whole:], logprobs[whole:]
        if not whole:
            return None
        return Delta(
            request_id=self.request.request_id,
            token_ids=pack_tokens(token_ids[:whole]),
            logprobs=logprobs[:whole],
            cached_tokens=self._tell_cached(),
        )

    def note_cached(self, piece: AnswerPiece) -> None:
        """Note how many prompt tokens the server had cached, where a piece of the answer says it."""
        if piece.cached_tokens is not None:
            prompt = num_tokens(self.request.token_ids)
            self.cached_tokens = min(max(piece.cached_tokens, 0), prompt)

    def _up_to_end(self, token_ids: tuple[int, ...]) -> tuple[int, ...] | None:
        """Give the next tokens up to an end of the model's; None if there is none."""
        sampling = self.request.sampling
        if not self._ends or sampling.ignore_eos:
            return None
        least = max(0, sampling.min_tokens - self.request.num_emitted - self.num_tokens)
        found = (at for at, token in enumerate(token_ids) if at >= least and token in self._ends)
        at = next(found, None)
        return None if at is None else token_ids[: at + 1]

    def end(self) -> Delta:
        """Make the last delta, with the stop token where there is one.

        Raises:
            StepFailed: the answer ended without a finish reason.
        """
        if self._finish is None:
            raise StepFailed("the server closed the connection within an answer")
        held = self._held
        room = self.request.sampling.max_tokens - self.request.num_emitted - self.num_tokens
        if self._finish is FinishReason.STOP and not held and room > 0:
            held = (self._stops[0] if self._stops else 0,)
            self.num_tokens += 1
        return Delta(
            request_id=self.request.request_id,
            token_ids=pack_tokens(held),
            finish_reason=self._finish,
            cached_tokens=self._tell_cached(at_end=True),
            logprobs=self._held_logprobs,
        )

    def _tell_cached(self, *, at_end: bool = False) -> int | None:
        """Return the number of cached tokens once: with the first tokens if it is known then, else at the end; None otherwise."""
        is_first, self._has_begun = not self._has_begun, True
        if self._said_cached or not (at_end or is_first):
            return None
        self._said_cached = at_end or self.cached_tokens is not None
        return self.cached_tokens if self.cached_tokens is not None or not at_end else 0


_AFTER_FINISH_S = 2.0
"""Longest wait for what may follow a finish reason."""
_log = get_logger()


@dataclass(frozen=True, slots=True, kw_only=True)
class Serving:
    """The deployment's settings of the worker, beside those of the server."""

    block_size: int
    context_length: int
    vocab_size: int
    eos_token_ids: tuple[int, ...] = ()
    kv_blocks: int | None = None
    max_running_requests: int
    max_waiting_requests: int
    max_batch_tokens: int
    root: bytes = b""
    """Parent of every first block hash of prompts without a salt, 16 bytes; empty: what another deployment holds is not asked for."""
    follow: tuple[Follow, ...] = ()
    """Makes the source of each data-parallel rank's KV events; empty: routers predict what the server has cached."""
    separates_salts: bool = True
    """Whether the server keeps prompts of different salts apart, as far as it can; False: requests with a client's salt are refused."""
    ranks: int = 1
    """Data-parallel ranks of the server that routers choose among; sizes above are those of one rank."""


class ServerEngine:
    """Implements `Engine`, `Announcing` and `HealthReporting` over a server. One event loop owns it.

    The server batches and caches; a `Step` has all that came since the step before. A server that fails gets no requests
    until a trial request succeeds.
    """

    def __init__(self, server: EngineServer, config: ServerConfig, serving: Serving) -> None:
        """Make an engine; `start` asks the server."""
        self._server = server
        self._config = config
        self._serving = serving
        self._watch = HealthWatch(
            server,
            config,
            on_change=self._on_health,
            on_load=self._on_load,
        )
        self._event_sources = [
            follow(partial(self._on_events, rank=rank)) for rank, follow in enumerate(serving.follow)
        ]
        self._prefixes: PrefixWatch | None = None
        self._events: dict[int, list[KvEvent]] = {}
        self._info: EngineInfo | None = None
        self._streams: dict[RequestId, ServerStream] = {}
        self._deltas: list[Delta] = []
        self._waiting: list[ServerStream] = []  # submitted before `steps` runs
        self._group: asyncio.TaskGroup | None = None
        self._wake = asyncio.Event()
        self._closed = False
        self._outside = ServerLoad()
        self._has_changed = False
        self._totals = [WorkerLoad() for _ in range(serving.ranks)]
        self._death: EngineError | None = None
        self._on_begun: Callable[[Sequence[RequestId]], None] | None = None
        self._on_problem: Callable[[str | None], None] = lambda _problem: None

    async def start(self) -> EngineInfo:
        """Ask the server for its model, and for one token.

        Raises:
            Unavailable: it does not answer, or not as such a server does.
            WrongServerError: it serves another model, has blocks of another size, or asks for another key.
        """
        if self._info is not None:
            return self._info
        described = await self._server.check()
        await self._server.try_out(described)
        try:
            load = await self._server.load()
        except PenstockError:  # only Penstock's own requests count for now
            load = None
        is_deployment = described.owner == DEPLOYMENT
        if is_deployment and self._serving.root:
            self._prefixes = PrefixWatch(
                AdvertisedPrefixes(self._serving.root, self._serving.block_size),
                self._server.connection,
                described.name,
                interval_s=self._config.load_interval_s,
                timeout_s=self._config.health.timeout_s,
                on_events=self._on_events,
            )
        serving, tokens = self._serving, None if load is None else load.kv_tokens
        self._outside = load or ServerLoad()
        if self._event_sources and self._outside.block_size is not None:
            try:
                check_block_size(self._outside.block_size, serving.block_size)
            except ConfigError as error:
                raise WrongServerError(f"{self._server.name}: {error.message}") from error
        self._info = EngineInfo(
            block_size=serving.block_size,
            total_blocks=serving.kv_blocks
            or (tokens or 0) // self._outside.workers // serving.ranks // serving.block_size,
            context_length=min(serving.context_length, described.context_length or serving.context_length),
            max_batch_tokens=serving.max_batch_tokens,
            max_running_requests=serving.max_running_requests,
            kv_events=bool(self._event_sources) or self._prefixes is not None,
            data_parallel=serving.ranks,
            announces=True,
            structured_outputs=self._server.api.constrains,
            is_deployment=is_deployment,
            sampling_fields=("logit_bias", "allowed_token_ids") if self._server.api.constrains else (),
        )
        return self._info

    def submit(self, request: Request) -> None:
        """Send a request to the server.

        Raises:
            RequestError: the server has no field for something it asks for, or it does not fit the context.
            Overloaded: `max_running_requests` are under way.
            Unavailable: the engine is closed, or its server gets no requests for now.
        """
        assert self._info is not None, "used before start"
        if self._closed:
            raise Unavailable("the engine is closed; try another worker")
        if self._watch.breaker.problem is not None:
            raise StepFailed(self._watch.breaker.problem)
        if self._serving.ranks > 1 and request.rank is None:
            request = msgspec.structs.replace(request, rank=self._emptiest_rank())
        stream = self._checked(request, self._info)
        self._streams[request.request_id] = stream
        if self._group is None:
            self._waiting.append(stream)
        else:
            self._begin(stream)

    def abort(self, request_id: RequestId) -> None:
        stream = self._streams.pop(request_id, None)
        if stream is not None:
            self._deltas = [delta for delta in self._deltas if delta.request_id != request_id]
            if stream.task is not None:
                stream.task.cancel()
            self._changed()

    async def steps(self) -> AsyncIterator[Step]:
        """Yield what has come from the server, until `close`.

        Raises:
            EngineError: the server was started here, and has ended.
        """
        async with asyncio.TaskGroup() as group:
            self._group = group
            tasks = [group.create_task(self._watch.run()), group.create_task(self._watch_server())]
            tasks += [group.create_task(source.run()) for source in self._event_sources]
            if self._prefixes is not None:
                tasks.append(group.create_task(self._prefixes.run()))
            for stream in self._waiting:
                self._begin(stream)
            self._waiting.clear()
            try:
                while not self._closed and self._death is None:
                    if self._deltas or self._has_changed:
                        for step in self._take_steps():
                            yield step
                    else:
                        self._wake.clear()
                        await self._wake.wait()
            finally:
                self._group = None
                tasks += [stream.task for stream in self._streams.values() if stream.task is not None]
                for task in tasks:
                    task.cancel()
        if self._death is not None:
            raise self._death

    def _died(self, error: EngineError) -> None:
        """End `steps` with an error."""
        self._death = error
        self._wake.set()

    async def _watch_server(self) -> None:
        """Watch what the health of the whole server does not tell."""

    def announce(self, listener: Callable[[Sequence[RequestId]], None]) -> None:
        self._on_begun = listener

    def report_health(self, listener: Callable[[str | None], None]) -> None:
        self._on_problem = listener

    def load(self) -> WorkerLoad:
        """Report our requests and, as far as the server tells, those of its other clients.

        Of a deployment of several workers it is the mean worker's load: what a request finds there.
        """
        return WorkerLoad.of_ranks([self._load_of(rank) for rank in range(self._serving.ranks)])

    def _load_of(self, rank: int) -> WorkerLoad:
        size = self._serving.block_size
        streams = [each for each in self._streams.values() if not each.is_background and each.rank == rank]
        begun = [stream for stream in streams if stream.num_tokens]
        outside = self._outside if self._serving.ranks == 1 else ServerLoad()
        others, queued = _others(outside, len(streams))
        share = outside.workers
        context = sum(num_tokens(each.request.token_ids) + each.num_tokens for each in begun)
        prefill = sum(num_tokens(s.request.token_ids) for s in streams if not s.num_tokens)
        total = self._info.total_blocks if self._info is not None else 0
        used = sum(-(-(num_tokens(s.request.token_ids) + s.num_tokens) // size) for s in streams)
        if outside.kv_usage is not None and others + queued:
            used = max(used, round(outside.kv_usage * total * share))
        return msgspec.structs.replace(
            self._totals[rank],
            running_requests=-(-(len(begun) + others) // share),
            waiting_requests=(len(streams) - len(begun) + queued) // share,
            active_blocks=used // share,
            total_blocks=total,
            queued_prefill_tokens=max(prefill, outside.queued_tokens or 0) // share,
            context_tokens=max(context, outside.context_tokens or 0) // share,
        )

    def _emptiest_rank(self) -> int:
        """Choose the rank of a request that no router sent: the one with the fewest requests."""
        counts = Counter(stream.rank for stream in self._streams.values())
        return min(range(self._serving.ranks), key=counts.__getitem__)

    def _count_prompt(self, stream: ServerStream) -> None:
        cached = stream.cached_tokens or 0
        computed = max(num_tokens(stream.request.token_ids) - cached, 0)
        self._count(stream.rank, prefix_hit_tokens=cached, prefilled_tokens=computed)

    def _count(self, rank: int, **numbers: int) -> None:
        """Add to the totals of a rank."""
        totals = self._totals[rank]
        added = {name: getattr(totals, name) + number for name, number in numbers.items()}
        self._totals[rank] = msgspec.structs.replace(totals, **added)

    async def close(self) -> None:
        """Abort everything at the server. Safe twice."""
        self._closed = True
        self._wake.set()
        for stream in self._streams.values():
            if stream.task is not None:
                stream.task.cancel()
        self._streams.clear()
        await self._server.close()

    # -- one request

    def _checked(self, request: Request, info: EngineInfo) -> ServerStream:
        """Check a request as every engine does."""
        if request.request_id in self._streams:
            raise RequestError(
                f"request_id: {request.request_id} is under way already; give each request its own",
                param="request_id",
            )
        prompt = len(checked_tokens(request, self._serving.vocab_size))
        if prompt >= info.context_length:
            raise RequestError(
                f"prompt of {prompt} tokens: must be < {info.context_length}, the context length; shorten it",
                param="prompt",
            )
        engines = self._outside.workers * self._serving.ranks
        most = (info.max_running_requests + self._serving.max_waiting_requests) * engines
        if len(self._streams) >= most:
            raise Overloaded(
                f"{most} requests are under way at {self._server.name} (max_running_requests + max_waiting_requests)",
                retry_after_s=1.0,
            )
        sampling = checked_sampling(
            request.sampling, vocab_size=self._serving.vocab_size, context_length=info.context_length
        )
        room = request.num_emitted + info.context_length - prompt
        sampling = msgspec.structs.replace(sampling, max_tokens=min(sampling.max_tokens, room))
        request = msgspec.structs.replace(request, sampling=sampling)
        extra = fields_of(request.kv.payload) if request.kv is not None and request.kv.payload else {}
        if not self._serving.separates_salts and client_salt(request) is not None:
            raise RequestError(
                "cache_salt: this model's server would share its KV cache with prompts of other salts; leave cache_salt out, or serve"
                " the model by another engine",
                param="cache_salt",
            )
        self._server.api.body(request, "")  # refuses what the server has no field for
        return self._stream_of(request, extra)

    def _stream_of(self, request: Request, extra: dict[str, Any]) -> ServerStream:
        return ServerStream(request, self._serving.eos_token_ids, extra)

    def _begin(self, stream: ServerStream) -> None:
        assert self._group is not None, "running"
        stream.task = self._group.create_task(self._run(stream))

    async def _run(self, stream: ServerStream) -> None:
        """Run a request to its end; never raises but CancelledError."""
        request_id = stream.request.request_id
        try:
            await self._compute(stream)
        except PenstockError as error:
            self._fail(stream, await self._cause(error))
        except Exception as error:  # noqa: BLE001 - a bug must not end other requests
            _log.exception("request_failed", request_id=request_id, server=self._server.name)
            self._fail(stream, StepFailed(f"{self._server.name}: {error!r}"))
        else:
            self._watch.request_succeeded()
        stream.is_done = True
        if stream.is_taken:
            self._forget(stream)

    async def _cause(self, error: PenstockError) -> PenstockError:
        """Give the error that routers get: `StepFailed` only where the server is not well after it, so that the prompt may be why.

        A status, or a broken answer of a server that is well, says nothing of the prompt.
        """
        if isinstance(error, (RequestError, Overloaded)):
            return error
        if isinstance(error, StepFailed):
            try:
                await self._server.check()
            except PenstockError:
                return error
        return Unavailable(error.message, retry_after_s=error.retry_after_s)

    async def _compute(self, stream: ServerStream) -> None:
        """Make deltas of an answer. The last delta waits for the number of cached tokens, which follows in the stream.

        Bytes without a token, such as comments, count as silence. An error after the finish reason is ignored.
        """
        try:
            await self._read_answer(stream)
        except PenstockError:
            if not stream.has_finished:
                raise
        end = stream.end()  # raises if the answer was cut off
        self._count_prompt(stream)
        self._push(stream, end)

    async def _read_answer(self, stream: ServerStream) -> None:
        clock, silence_s = asyncio.get_running_loop().time, self._config.limits.silence_s
        try:
            async with (
                asyncio.timeout(silence_s) as silence,
                self._server.answer(stream.asked, stream.extra, self._begun(stream)) as pieces,
            ):
                async for piece in pieces:
                    known = stream.num_tokens
                    delta = stream.feed(piece)
                    if delta is not None:
                        self._push(stream, delta)
                    if stream.is_over:
                        break
                    if stream.has_finished:
                        silence.reschedule(min(silence.when() or math.inf, clock() + _AFTER_FINISH_S))
                    elif stream.num_tokens > known:
                        silence.reschedule(clock() + silence_s)
        except TimeoutError as error:
            raise StepFailed(
                f"{self._server.name}: no answer within {silence_s:g} s: no token came (limits.silence_s)"
            ) from error

    def _begun(self, stream: ServerStream) -> Callable[[], None]:
        """Make the callback that tells routers that the server has the request now."""

        def begun() -> None:
            if self._on_begun is not None and stream.request.request_id in self._streams:
                self._on_begun((stream.request.request_id,))

        return begun

    def _forget(self, stream: ServerStream) -> None:
        if self._streams.get(stream.request.request_id) is stream:
            del self._streams[stream.request.request_id]

    def _push(self, stream: ServerStream, delta: Delta) -> None:
        if self._streams.get(stream.request.request_id) is not stream or stream.is_background:
            return
        self._count(stream.rank, generated_tokens=num_tokens(delta.token_ids))
        self._deltas.append(delta)
        if delta.finish_reason is not None:
            stream.is_background = True
        self._changed()

    def _fail(self, stream: ServerStream, error: PenstockError) -> None:
        """End a request with an error; an error that the server caused counts as its failure."""
        if not isinstance(error, (RequestError, Overloaded)):
            self._count(stream.rank, failed_steps=1)
            self._watch.request_failed(error.message)
        self._end_with(stream, error)

    def _end_with(self, stream: ServerStream, error: PenstockError) -> None:
        self._push(
            stream,
            Delta(
                request_id=stream.request.request_id, finish_reason=FinishReason.ERROR, error=error.to_info()
            ),
        )

    # -- steps, load and health

    def _take_steps(self) -> Sequence[Step]:
        """Make steps of all that has come: one, and one more for the events of each further rank."""
        deltas, self._deltas = tuple(self._deltas), []
        events, self._events = self._events, {}
        self._has_changed = False
        for delta in deltas:
            if delta.finish_reason is not None:
                stream = self._streams.get(delta.request_id)
                if stream is not None:
                    stream.is_taken = True
                    if stream.is_done or not stream.keeps:
                        self._forget(stream)
        ranks = tuple(events) or (0,)
        for rank in ranks:
            self._count(rank, steps=1)
        load = self.load()
        *others, last = ranks
        steps = [Step(events=tuple(events[rank]), rank=rank, load=load) for rank in others]
        steps.append(Step(deltas=deltas, events=tuple(events.get(last, ())), rank=last, load=load))
        return steps

    def _on_events(self, events: Sequence[KvEvent], rank: int = 0) -> None:
        if events:
            self._events.setdefault(rank, []).extend(events)
            self._changed()

    def _changed(self) -> None:
        self._has_changed = True
        self._wake.set()

    def _on_load(self, load: ServerLoad) -> None:
        before = self.load()
        self._outside = load
        if self.load() != before:
            self._changed()

    def _on_health(self, problem: str | None, is_silent: bool) -> None:  # noqa: FBT001
        """Tell the worker, and fail the requests of a silent server: they go on elsewhere."""
        self._on_problem(problem)
        if problem is not None and self._prefixes is not None:
            self._prefixes.forget()
        if problem is not None and is_silent:
            for stream in tuple(self._streams.values()):
                if not stream.is_background:
                    self._end_with(stream, StepFailed(problem))
                if stream.task is not None:
                    stream.task.cancel()


def _others(load: ServerLoad, ours: int) -> tuple[int, int]:
    """Count the running and the waiting requests of a server's other clients; `ours` is the number of requests from here."""
    running, waiting = load.running or 0, load.waiting or 0
    others = max(running + waiting - ours, 0)
    queued = min(others, waiting)
    return others - queued, queued


def fields_of(payload: bytes) -> dict[str, Any]:
    """Give the fields that the payload of a `KvHandle` adds to a request.

    Raises:
        RequestError: it is not of this engine.
    """
    try:
        return msgspec.json.decode(payload, type=dict[str, Any])
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise RequestError(f"kv: the payload is not of engine openai ({error})", param="kv") from error
