"""A `WorkerService` without an engine that runs the script named in each request, for the plane suites.

The request's `model` names the script, see `ScriptedWorker`. So the same worker serves in the test's process and in
another one.
"""

import asyncio
import hashlib
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path

from penstock.core.errors import Overloaded, ProtocolError, RequestError, WorkerLost
from penstock.core.ids import RequestId, WorkerId
from penstock.core.types.events import BlockRemoved, BlockStored, EventMessage, Holder
from penstock.core.types.instances import (
    BecomeRole,
    EngineInfo,
    Instance,
    ModelCard,
    Role,
    Sleep,
    WorkerChange,
)
from penstock.core.types.kv import KvAction, KvEvict, KvReport
from penstock.core.types.load import FrontendFigures, PeerCount, RankNews, TenantCount, WorkerLoad
from penstock.core.types.requests import (
    Delta,
    ExpandedPrompt,
    FinishReason,
    MediaPrompt,
    Prefetch,
    Request,
    SamplingParams,
    TokenLogprob,
)
from penstock.core.wire import pack_hashes, pack_tokens, unpack_tokens
from penstock.runtime.config import EventConfig
from penstock.runtime.events.publisher import EventPublisher, EventPublishers
from penstock.seams import (
    Answer,
    BroadcastSink,
    EventSink,
    EventSource,
    FrontendSink,
    MediaAnswer,
)

TICK_S = 0.001
RANKS = 4
"""Data-parallel ranks that it takes connections for."""
FILE = bytes(range(256)) * 1000
"""A file of several chunks that every scripted worker has."""
FILE_SHA256 = hashlib.sha256(FILE).hexdigest()
WRONG_SHA256 = "0" * 64
"""For this hash the worker returns content with another hash."""
EMPTY_SHA256 = hashlib.sha256(b"").hexdigest()

_instance_numbers = count(1)


def scripted_request(
    script: str,
    token_ids: Sequence[int] = (),
    *,
    request_id: str = "r",
    max_tokens: int = 1,
    tokens_per_step: int | None = None,
    deadline_s: float | None = None,
) -> Request:
    """Make a request for a `ScriptedWorker`."""
    return Request(
        request_id=RequestId(request_id),
        model=script,
        token_ids=pack_tokens(token_ids),
        sampling=SamplingParams(max_tokens=max_tokens, top_k=tokens_per_step),
        deadline_s=deadline_s,
    )


def scripted_instance(
    address: str, *, worker_id: int | None = None, pid: int = 0, name: str = ""
) -> Instance:
    """Make a registration for a worker at `address`."""
    number = worker_id if worker_id is not None else next(_instance_numbers)
    card = ModelCard(name="scripted", context_length=4096, block_size=16, salt=b"")
    engine = EngineInfo(
        block_size=16, total_blocks=64, context_length=4096, max_batch_tokens=512, max_running_requests=64
    )
    return Instance(
        worker_id=WorkerId(number),
        name=name or f"scripted-{number}",
        address=address,
        role=Role.AGGREGATED,
        card=card,
        engine=engine,
        pid=pid,
    )


@dataclass(frozen=True, slots=True)
class WorkerStats:
    """Counters of a `ScriptedWorker`; `rss_kib` is the memory of its process."""

    connected: int
    disconnected: int
    submitted: int
    aborted: int
    live: int
    subscribers: int
    rss_kib: int


@dataclass(slots=True)
class _Live:
    request: Request
    sink: FrontendSink
    sent: int = 0


HOST_BLOCKS_FROM = 1000
"""Blocks from this number on are the host's."""


class ScriptedWorker:
    """Runs steps of a millisecond while there are requests. One event loop owns it.

    Scripts:
        count: emits 0, 1, 2, ... up to `max_tokens`, `top_k` of them per step.
        echo: emits the prompt, one token per step.
        fields: emits one delta with every field set.
        refuse: emits an error.
        deadline: emits the remaining milliseconds.
        stats: emits its `WorkerStats`.
        publish: publishes one event batch per prompt token: a block stored at the root, or removed for a negative token;
            of blocks from `HOST_BLOCKS_FROM` on, the host is the holder.
        rank: emits the rank of its connection.
        silence: emits nothing, ever.
        goodbye: closes the server.
    """

    def __init__(self, events: EventConfig | None = None) -> None:
        self.publisher = EventPublisher(events)
        self.host_publisher = EventPublisher(events, Holder.HOST)
        self.say_goodbye: Callable[[], None] = lambda: None
        """Closes the server; set by the harness."""
        self._live: dict[RequestId, _Live] = {}
        self._expected: dict[RequestId, FrontendSink] = {}
        self._sinks: list[FrontendSink] = []
        self._ranks: dict[FrontendSink, int] = {}
        self._subscribers: list[EventSink] = []
        self._keys: dict[FrontendSink, bytes] = {}
        self._broadcast: BroadcastSink | None = None
        self._timer: asyncio.TimerHandle | None = None
        self.refusals: list[str] = []
        """Reasons of connections that were not accepted."""
        self._connected = self._disconnected = self._submitted = self._aborted = 0

    def check_rank(self, rank: int) -> None:
        if rank >= RANKS:
            raise ProtocolError(f"rank {rank}: a scripted worker has {RANKS}")

    @property
    def holder(self) -> Holder:
        return self.publisher.holder

    @property
    def sequence(self) -> int:
        return self.publisher.sequence

    def connected(self, sink: FrontendSink, rank: int = 0, key: bytes = b"") -> None:
        self._connected += 1
        self._ranks[sink] = rank
        self._sinks.append(sink)
        if key:
            self._keys[sink] = key
        sink.push_load(self._load())

    def broadcast_to(self, sink: BroadcastSink) -> None:
        publishers = EventPublishers(EventConfig())
        publishers.ranks, publishers.shared = [self.publisher], {Holder.HOST: self.host_publisher}
        publishers.broadcast_to(sink)
        self._broadcast = sink

    def repeat_load(self, sink: FrontendSink) -> None:
        if sink in self._keys:
            sink.push_load(self._load())

    def refused(self, reason: str) -> None:
        self.refusals.append(reason)

    def submit(self, request: Request, sink: FrontendSink) -> None:
        self._submitted += 1
        self._live[request.request_id] = _Live(request, sink)
        if self._timer is None:
            self._tick_later()

    def prefetch(self, prefetch: Prefetch, sink: FrontendSink) -> None:
        """Count the prefetch, and expect its request."""
        self._submitted += 1
        self._expected[prefetch.request_id] = sink

    def abort(self, request_id: RequestId, sink: FrontendSink) -> None:
        live = self._live.get(request_id)
        if live is not None and live.sink is sink:
            del self._live[request_id]
            self._aborted += 1
        elif self._expected.get(request_id) is sink:
            del self._expected[request_id]
            self._aborted += 1

    def disconnected(self, sink: FrontendSink) -> None:
        self._disconnected += 1
        self._sinks.remove(sink)
        self._keys.pop(sink, None)
        del self._ranks[sink]
        for request_id in [r for r, live in self._live.items() if live.sink is sink]:
            del self._live[request_id]

    def events(self, rank: int = 0, holder: Holder = Holder.WORKER) -> EventSource:  # noqa: ARG002 - the same of every rank
        if holder is Holder.FLEET:
            raise ProtocolError("holder fleet: a scripted worker loads from a host alone")
        return self if holder is Holder.WORKER else self.host_publisher

    def events_after(self, sequence: int | None) -> Iterator[EventMessage | None]:
        return self.publisher.events_after(sequence)

    def subscribe(self, sink: EventSink) -> None:
        self._subscribers.append(sink)
        self.publisher.subscribe(sink)

    def unsubscribe(self, sink: EventSink) -> None:
        if sink in self._subscribers:
            self._subscribers.remove(sink)
        self.publisher.unsubscribe(sink)

    def read_file(self, sha256: str) -> asyncio.Future[bytes | None]:
        """Read the file within a tick."""
        loop = asyncio.get_running_loop()
        content: asyncio.Future[bytes | None] = loop.create_future()
        files = {FILE_SHA256: FILE, WRONG_SHA256: b"something else", EMPTY_SHA256: b""}
        loop.call_soon(content.set_result, files.get(sha256))
        return content

    def change(self, change: WorkerChange | KvAction, answer: Answer) -> None:
        """Accept role decode after a tick, report evicted blocks, refuse to sleep, and never answer for waking up."""
        loop = asyncio.get_running_loop()
        if change == BecomeRole(role=Role.DECODE):
            loop.call_later(TICK_S, answer, None)
        elif isinstance(change, KvEvict):
            loop.call_later(TICK_S, answer, KvReport(blocks=len(change.block_hashes) // 16))
        elif isinstance(change, Sleep):
            loop.call_later(TICK_S, answer, RequestError("it is one already", http_status=409))

    def count_tenants(self, counts: Mapping[str, TenantCount], sink: FrontendSink) -> dict[str, PeerCount]:
        """Give each tenant's use back as that of all other frontends."""
        others = len(self._sinks) - (sink in self._sinks)
        return {
            name: PeerCount(
                requests=each.requests, tokens=each.tokens, inflight=each.inflight, frontends=others
            )
            for name, each in counts.items()
        }

    def expand_media(self, prompt: MediaPrompt, answer: MediaAnswer) -> None:
        """Append to the prompt a token for each byte of the items, after a tick; refuse audio."""
        loop = asyncio.get_running_loop()
        if any(item.modality == "audio" for item in prompt.items):
            loop.call_later(TICK_S, answer, RequestError("it takes no audio"))
            return
        token_ids = unpack_tokens(prompt.token_ids).tolist()
        positions = []
        for item in prompt.items:
            positions.append(len(token_ids))
            token_ids += item.data
        loop.call_later(
            TICK_S, answer, ExpandedPrompt(token_ids=pack_tokens(token_ids), positions=tuple(positions))
        )

    def stats(self) -> WorkerStats:
        return WorkerStats(
            connected=self._connected,
            disconnected=self._disconnected,
            submitted=self._submitted,
            aborted=self._aborted,
            live=sum(live.request.model != "stats" for live in self._live.values()),
            subscribers=len(self._subscribers),
            rss_kib=_rss_kib(),
        )

    def _tick_later(self) -> None:
        self._timer = asyncio.get_running_loop().call_later(TICK_S, self._tick)

    def _tick(self) -> None:
        """Run one step: a delta for each live request, pushed in one call per frontend."""
        self._timer = None
        steps: dict[FrontendSink, list[Delta]] = {}
        for live in tuple(self._live.values()):
            delta = _SCRIPTS[live.request.model](self, live)
            if delta is not None:
                steps.setdefault(live.sink, []).append(delta)
                if delta.finish_reason is not None:
                    self._live.pop(live.request.request_id, None)
        for sink, deltas in steps.items():
            sink.push(deltas)
        for sink in self._sinks:
            if sink not in self._keys:
                sink.push_load(self._load())
            elif self._broadcast is not None:
                load = self._load()
                figures = (FrontendFigures.of(self._keys[sink], load),)
                self._broadcast.push_load(RankNews(rank=self._ranks[sink], load=load, frontends=figures))
        if self._live:
            self._tick_later()

    def _load(self) -> WorkerLoad:
        return WorkerLoad(running_requests=len(self._live), accepted_requests=self._submitted)

    def _count(self, live: _Live) -> Delta:
        sampling = live.request.sampling
        end = min(live.sent + (sampling.top_k or 1), sampling.max_tokens)
        delta = _delta(
            live, range(live.sent, end), FinishReason.LENGTH if end == sampling.max_tokens else None
        )
        live.sent = end
        return delta

    def _echo(self, live: _Live) -> Delta:
        prompt = unpack_tokens(live.request.token_ids)
        live.sent += 1
        return _delta(
            live,
            prompt[live.sent - 1 : live.sent].tolist(),
            FinishReason.STOP if live.sent >= len(prompt) else None,
        )

    def _fields(self, live: _Live) -> Delta:
        return Delta(
            request_id=live.request.request_id,
            token_ids=pack_tokens([7, 8]),
            finish_reason=FinishReason.STOP,
            cached_tokens=32,
            logprobs=(
                TokenLogprob(token_id=7, logprob=-0.5, top=((7, -0.5), (9, -1.5))),
                TokenLogprob(token_id=8, logprob=-0.25),
            ),
        )

    def _refuse(self, live: _Live) -> Delta:
        error = Overloaded("the queue is full: 1 request, at most 0", retry_after_s=2.5).to_info()
        return Delta(request_id=live.request.request_id, finish_reason=FinishReason.ERROR, error=error)

    def _deadline(self, live: _Live) -> Delta:
        return _delta(live, [int((live.request.deadline_s or 0.0) * 1000)], FinishReason.STOP)

    def _stats(self, live: _Live) -> Delta:
        stats = self.stats()
        values = [getattr(stats, name) for name in WorkerStats.__slots__]
        return _delta(live, values, FinishReason.STOP)

    def _publish(self, live: _Live) -> Delta:
        for token in unpack_tokens(live.request.token_ids).tolist():
            publisher = self.host_publisher if abs(token) >= HOST_BLOCKS_FROM else self.publisher
            if token >= 0:
                publisher.publish(
                    [BlockStored(block_hashes=pack_hashes([token]), parent_block_hash=None, block_size=16)]
                )
            else:
                publisher.publish([BlockRemoved(block_hashes=pack_hashes([-token]))])
        return _delta(live, [self.publisher.sequence], FinishReason.STOP)

    def _rank(self, live: _Live) -> Delta:
        return _delta(live, [self._ranks[live.sink]], FinishReason.STOP)

    def _silence(self, _live: _Live) -> None:
        return None

    def _goodbye(self, live: _Live) -> Delta:
        asyncio.get_running_loop().call_soon(self.say_goodbye)
        return _delta(live, [], FinishReason.STOP)


_SCRIPTS: Mapping[str, Callable[[ScriptedWorker, _Live], Delta | None]] = {
    "count": ScriptedWorker._count,
    "echo": ScriptedWorker._echo,
    "fields": ScriptedWorker._fields,
    "refuse": ScriptedWorker._refuse,
    "deadline": ScriptedWorker._deadline,
    "stats": ScriptedWorker._stats,
    "publish": ScriptedWorker._publish,
    "rank": ScriptedWorker._rank,
    "silence": ScriptedWorker._silence,
    "goodbye": ScriptedWorker._goodbye,
}


def _delta(live: _Live, token_ids: Sequence[int], finish_reason: FinishReason | None) -> Delta:
    return Delta(
        request_id=live.request.request_id, token_ids=pack_tokens(token_ids), finish_reason=finish_reason
    )


def _rss_kib() -> int:
    resident_pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return resident_pages * os.sysconf("SC_PAGE_SIZE") // 1024


class RecordingSink:
    """The recorded deltas, loads and events of one frontend. One event loop owns it."""

    def __init__(self) -> None:
        self.deltas: dict[str, list[Delta]] = {}
        self.frame_sizes: list[int] = []
        """Deltas in each push."""
        self.written_tokens = 0
        self.loads: list[WorkerLoad] = []
        self.events: list[EventMessage] = []
        self.on_event: Callable[[EventMessage], None] = lambda _message: None
        self.losses: list[tuple[WorkerId, WorkerLost]] = []
        self._changed = asyncio.Event()

    def push(self, worker_id: WorkerId, deltas: Sequence[Delta]) -> None:
        self.frame_sizes.append(len(deltas))
        for delta in deltas:
            self.deltas.setdefault(delta.request_id, []).append(delta)
        self._note(worker_id)

    def written(self, worker_id: WorkerId, tokens: int) -> None:
        self.written_tokens += tokens
        self._note(worker_id)

    def push_event(self, worker_id: WorkerId, message: EventMessage) -> None:
        self.events.append(message)
        self.on_event(message)
        self._note(worker_id)

    def push_load(self, worker_id: WorkerId, load: WorkerLoad) -> None:
        self.loads.append(load)
        self._note(worker_id)

    def lost(self, worker_id: WorkerId, error: WorkerLost) -> None:
        self.losses.append((worker_id, error))
        self._changed.set()

    def tokens(self, request_id: str) -> list[int]:
        """Return the token ids of a request so far."""
        return [
            t for delta in self.deltas.get(request_id, ()) for t in unpack_tokens(delta.token_ids).tolist()
        ]

    def last(self, request_id: str | RequestId) -> Delta | None:
        """Return the delta that ended a request; None while it runs."""
        deltas = self.deltas.get(request_id, [])
        return deltas[-1] if deltas and deltas[-1].finish_reason is not None else None

    async def until(self, condition: Callable[[], bool]) -> None:
        """Wait until `condition()` holds. The caller sets a timeout."""
        while not condition():
            self._changed.clear()
            await self._changed.wait()

    async def finished(self, request_id: str) -> Delta:
        """Wait for the delta that ends a request."""
        await self.until(lambda: self.last(request_id) is not None)
        last = self.last(request_id)
        assert last is not None
        return last

    def _note(self, worker_id: WorkerId) -> None:
        assert not self.losses, f"worker {worker_id}: something came after `lost`"
        self._changed.set()
