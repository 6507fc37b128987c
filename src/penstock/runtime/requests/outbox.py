"""Per-frontend outbox: which deltas may be sent now, and which are buffered.

Each request has a credit in tokens, which its reader renews by granting the tokens that it has consumed. Deltas beyond the
credit, or while the connection is full, are buffered and merged per request. So a slow reader costs bytes, not objects, and
does not delay other requests. The buffer is bounded: beyond the bound the request is parked. The engine stops it, the
buffered tokens are sent as the reader consumes them, and then the error `Parked` is sent. The frontend then sends the request
again, with all tokens that it has by then.
"""

import asyncio
import hashlib
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import count
from typing import Generic, TypeVar

from penstock.core.channel import Codec
from penstock.core.errors import ErrorInfo, Parked, PenstockError, ProtocolError, RequestError
from penstock.core.framing import Challenge, FrameCodec, Goodbye, Ping, Pong
from penstock.core.ids import RequestId
from penstock.core.log import get_logger
from penstock.core.types.events import EventMessage, Holder
from penstock.core.types.instances import WorkerChange
from penstock.core.types.kv import KvAction, KvReport
from penstock.core.types.load import PeerCount, TenantCounts, WorkerLoad
from penstock.core.types.requests import (
    Delta,
    ExpandedPrompt,
    FinishReason,
    KvHandle,
    MediaPrompt,
    Prefetch,
    PromptLogprobs,
    Request,
    TokenLogprob,
)
from penstock.core.wire import NO_TOKENS, PackedTokens, Wire
from penstock.runtime.config import PlaneConfig
from penstock.runtime.handshake import Hello, HelloReply
from penstock.runtime.session import SessionProtocol

# Memory for the buffer of one request, for a logprob, and for one of its alternatives: sums of sys.getsizeof on
# CPython 3.11.
_STREAM_BYTES = 320
_LOGPROB_BYTES = 160
_ALTERNATIVE_BYTES = 116

_log = get_logger()


def _logprobs_bytes(logprobs: Iterable[TokenLogprob]) -> int:
    return sum(_LOGPROB_BYTES + _ALTERNATIVE_BYTES * len(logprob.top) for logprob in logprobs)


@dataclass(slots=True)
class _Held:
    """The merged buffered deltas of one request."""

    tokens: bytearray = field(default_factory=bytearray)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    cached_tokens: int | None = None
    error: ErrorInfo | None = None
    kv: KvHandle | None = None
    prompt_logprobs: list[PromptLogprobs] = field(default_factory=list)
    num_bytes: int = _STREAM_BYTES

    def merge(self, delta: Delta) -> int:
        """Add a delta; return by how many bytes the buffer grew."""
        self.tokens += delta.token_ids
        self.logprobs += delta.logprobs
        self.finish_reason = delta.finish_reason or self.finish_reason
        self.error = delta.error or self.error
        self.kv = delta.kv or self.kv
        if delta.cached_tokens is not None:
            self.cached_tokens = delta.cached_tokens
        self.prompt_logprobs += delta.prompt_logprobs
        growth = len(delta.token_ids) + _logprobs_bytes(delta.logprobs)
        growth += sum(logprobs.num_bytes for logprobs in delta.prompt_logprobs)
        growth += len(delta.kv.block_ids) + len(delta.kv.source.agent) if delta.kv else 0
        self.num_bytes += growth
        return growth

    def cut(self, request_id: RequestId, tokens: int) -> Delta:
        """Remove the first `tokens` tokens as a delta; `finish_reason` stays for the last delta."""
        delta = Delta(
            request_id=request_id,
            token_ids=PackedTokens(bytes(self.tokens[: 4 * tokens])),
            logprobs=tuple(self.logprobs[:tokens]),
            cached_tokens=self.cached_tokens,
            prompt_logprobs=tuple(self.prompt_logprobs),
        )
        del self.tokens[: 4 * tokens]
        del self.logprobs[:tokens]
        self.cached_tokens = None
        self.num_bytes -= sum(logprobs.num_bytes for logprobs in self.prompt_logprobs)
        self.prompt_logprobs.clear()
        self.num_bytes -= len(delta.token_ids) + _logprobs_bytes(delta.logprobs)
        return delta

    def whole(self, request_id: RequestId) -> Delta:
        return Delta(
            request_id=request_id,
            token_ids=PackedTokens(bytes(self.tokens)) if self.tokens else NO_TOKENS,
            finish_reason=self.finish_reason,
            cached_tokens=self.cached_tokens,
            logprobs=tuple(self.logprobs),
            error=self.error,
            kv=self.kv,
            prompt_logprobs=tuple(self.prompt_logprobs),
        )


@dataclass(slots=True)
class _Stream:
    credit_tokens: int
    held: _Held | None = None
    parked: bool = False


def _is_last(delta: Delta | _Held) -> bool:
    return delta.finish_reason is not None or delta.error is not None


class Outbox:
    """The deltas on their way to one frontend. One task owns it."""

    def __init__(
        self,
        *,
        window_tokens: int,
        stream_bytes_max: int,
        bytes_max: int,
        abort: Callable[[RequestId], None],
    ) -> None:
        """Make an outbox without requests.

        Args:
            window_tokens: initial credit of a request.
            stream_bytes_max: bytes buffered for one request, plus one delta.
            bytes_max: bytes buffered for all requests. Beyond half of it each request may use an equal share of that half.
            abort: called when a request is parked.
        """
        self.window_tokens = window_tokens
        self.held_bytes = 0
        self.parked = 0
        """Number of times that a request was parked."""
        self._stream_bytes_max = stream_bytes_max
        self._bytes_max = bytes_max
        self._abort = abort
        self._streams: dict[RequestId, _Stream] = {}
        self._waiting: dict[RequestId, _Held] = {}

    def __len__(self) -> int:
        return len(self._streams)

    @property
    def has_held(self) -> bool:
        return bool(self._waiting)

    def open(self, request_id: RequestId) -> None:
        """Accept deltas of this request; deltas of unknown requests are dropped."""
        self._streams.setdefault(request_id, _Stream(self.window_tokens))

    def close(self, request_id: RequestId) -> None:
        """Drop a request and its buffer; no error if it is unknown."""
        self._streams.pop(request_id, None)
        self._unhold(request_id)

    def offer(self, deltas: Iterable[Delta], *, writable: bool) -> list[Delta]:
        """Add a step's deltas; return those to send now and buffer the others."""
        now: list[Delta] = []
        parked, is_cut = self.parked, False
        for delta in deltas:
            stream = self._streams.get(delta.request_id)
            if stream is None or stream.parked:
                continue
            tokens = len(delta.token_ids) >> 2
            if writable and stream.held is None and tokens <= stream.credit_tokens:
                stream.credit_tokens -= tokens
                now.append(delta)
                if _is_last(delta):
                    del self._streams[delta.request_id]
            else:
                is_cut = is_cut or (stream.held is None and stream.credit_tokens > 0)
                self._hold(stream, delta)
        if self.held_bytes > self._bytes_max:
            self._shed()
        if writable and (is_cut or self.parked != parked):
            # Send as much as the credit allows, since the reader may grant no more before it gets that.
            now += self.take()
        return now

    def grant(self, request_id: RequestId, tokens: int) -> None:
        """Add credit; `take` then returns what may be sent. No error if the request is unknown."""
        stream = self._streams.get(request_id)
        if stream is not None and tokens > 0:
            stream.credit_tokens += tokens

    def take(self, bytes_max: int = sys.maxsize) -> list[Delta]:
        """Remove and return buffered deltas with credit, about `bytes_max`; a request sent in part goes to the end."""
        now: list[Delta] = []
        room = bytes_max
        for request_id, held in tuple(self._waiting.items()):
            stream = self._streams[request_id]
            tokens = len(held.tokens) >> 2
            allowed = min(stream.credit_tokens, max(1, room >> 2))
            if tokens > allowed == 0:
                continue
            self._unhold(request_id)
            room -= held.num_bytes
            if tokens <= allowed:
                stream.credit_tokens -= tokens
                now.append(held.whole(request_id))
                if _is_last(held):
                    del self._streams[request_id]
            else:
                stream.credit_tokens -= allowed
                now.append(held.cut(request_id, allowed))
                self._wait(request_id, stream, held)
            if room <= 0:
                break
        return now

    def _hold(self, stream: _Stream, delta: Delta) -> None:
        request_id = delta.request_id
        held = stream.held or self._wait(request_id, stream, _Held())
        self.held_bytes += held.merge(delta)
        if held.num_bytes > self._share_bytes() and not _is_last(held):
            self._park(request_id, stream, held)

    def _share_bytes(self) -> int:
        """Bytes that one request may buffer now.

        It shrinks as the outbox fills, so that single requests are parked, without losing tokens, before `_shed` has to drop any.
        """
        half = self._bytes_max // 2
        if self.held_bytes <= half:
            return self._stream_bytes_max
        return min(self._stream_bytes_max, half // len(self._waiting))

    def _shed(self) -> None:
        """Drop buffers, the largest first, until the outbox is within its bound; their tokens are computed again."""
        while self.held_bytes > self._bytes_max:
            largest = max(
                (r for r, held in self._waiting.items() if held.num_bytes > _STREAM_BYTES),
                key=lambda r: self._waiting[r].num_bytes,
                default=None,
            )
            if largest is None:
                return
            self._unhold(largest)
            stream = self._streams[largest]
            self._park(largest, stream, self._wait(largest, stream, _Held()))

    def _park(self, request_id: RequestId, stream: _Stream, held: _Held) -> None:
        """Stop a request; its frontend sends it again after reading the buffered tokens and the error."""
        tokens = len(held.tokens) >> 2
        error = Parked(
            f"request {request_id}: its reader is slow, {tokens} tokens wait for it; it goes on once they are read"
        )
        held.finish_reason, held.error = FinishReason.ERROR, error.to_info()
        if not stream.parked:
            stream.parked = True
            self.parked += 1
            _log.debug("request_parked", request_id=request_id, tokens=tokens, held_bytes=self.held_bytes)
            self._abort(request_id)

    def _wait(self, request_id: RequestId, stream: _Stream, held: _Held) -> _Held:
        stream.held = self._waiting[request_id] = held
        self.held_bytes += held.num_bytes
        return held

    def _unhold(self, request_id: RequestId) -> None:
        held = self._waiting.pop(request_id, None)
        if held is not None:
            self.held_bytes -= held.num_bytes
            if request_id in self._streams:
                self._streams[request_id].held = None

    def check(self) -> None:
        assert self.held_bytes == sum(held.num_bytes for held in self._waiting.values()), "outbox: held bytes"
        assert self._waiting.keys() <= self._streams.keys(), "outbox: held only for open requests"
        assert self.held_bytes <= self._bytes_max + _STREAM_BYTES * len(self._waiting), "outbox: bounded"
        for request_id, stream in self._streams.items():
            assert stream.held is self._waiting.get(request_id), f"outbox: {request_id} holds what waits"
            assert stream.credit_tokens >= 0, f"outbox: {request_id} has credit {stream.credit_tokens}"


class Submit(Wire, frozen=True, tag="submit"):
    request: Request


class PrefetchKv(Wire, frozen=True, tag="prefetch"):
    prefetch: Prefetch


class Abort(Wire, frozen=True, tag="abort"):
    request_id: RequestId


class Grant(Wire, frozen=True, tag="grant"):
    """(request id, tokens) that the readers have consumed since the last grant."""

    grants: tuple[tuple[RequestId, int], ...]


class Subscribe(Wire, frozen=True, tag="subscribe"):
    """Send the KV events of a holder after this sequence (None: a snapshot), and all later ones."""

    after_sequence: int | None = None
    holder: Holder = Holder.WORKER


class Unsubscribe(Wire, frozen=True, tag="unsubscribe"):
    """Send no more KV events of a holder."""

    holder: Holder


class Fetch(Wire, frozen=True, tag="fetch"):
    fetch_id: int
    sha256: str


class FetchChunk(Wire, frozen=True, tag="fetch_chunk"):
    """The next bytes of a file, or an error."""

    fetch_id: int
    data: bytes = b""
    last: bool = False
    error: ErrorInfo | None = None


class Change(Wire, frozen=True, tag="change"):
    """Change the worker; `Changed` answers, perhaps much later."""

    call_id: int
    change: WorkerChange | KvAction


class Changed(Wire, frozen=True, tag="changed"):
    """The change is made, or `error` says why not. `report` answers an action on the KV cache."""

    call_id: int
    error: ErrorInfo | None = None
    report: KvReport | None = None


class ExpandMedia(Wire, frozen=True, tag="expand_media"):
    """Expand the media of a prompt; `MediaExpanded` answers."""

    call_id: int
    prompt: MediaPrompt


class MediaExpanded(Wire, frozen=True, tag="media_expanded"):
    """The expanded prompt, or why the engine does not take its media."""

    call_id: int
    error: ErrorInfo | None = None
    prompt: ExpandedPrompt | None = None


class CountTenants(Wire, frozen=True, tag="count_tenants"):
    """What a frontend's tenants have used; `TenantsCounted` answers. A worker of an older version does not."""

    call_id: int
    counts: TenantCounts


class TenantsCounted(Wire, frozen=True, tag="tenants_counted"):
    """What tenants have used at other frontends, by name."""

    call_id: int
    peers: tuple[tuple[str, PeerCount], ...]


class Deltas(Wire, frozen=True, tag="deltas"):
    """All deltas of one engine step for one frontend."""

    deltas: tuple[Delta, ...]


class Load(Wire, frozen=True, tag="load"):
    load: WorkerLoad


class Event(Wire, frozen=True, tag="event"):
    message: EventMessage


Frame = (
    Challenge | Hello | HelloReply | Submit | PrefetchKv | Abort | Grant | Subscribe | Unsubscribe | Fetch | FetchChunk
    | Deltas | Load | Event | Change | Changed | ExpandMedia | MediaExpanded | CountTenants | TenantsCounted
    | Ping | Pong | Goodbye
)  # fmt: skip

CODEC: FrameCodec[Frame] = FrameCodec(Frame, lenient_tags=("event",))
"""A KV event of an unknown kind does not end the connection: the subscriber requests a snapshot instead."""


def request_protocol(config: PlaneConfig, codec: Codec[Frame] = CODEC) -> SessionProtocol[Frame]:
    return SessionProtocol(
        codec=codec,
        server="worker",
        client="frontend",
        frame_bytes_max=config.frame_bytes_max,
        write_bytes_max=2 * config.connection_bytes_max,
        heartbeat_interval_s=config.heartbeat_interval_s,
        heartbeat_timeout_s=config.heartbeat_timeout_s,
        connect_timeout_s=config.connect_timeout_s,
        connections_max=config.connections_max,
        write_buffer_bytes=config.write_buffer_bytes,
    )


UNENCODABLE = (OverflowError, TypeError, ValueError)
"""Exceptions of encoding a message with a number or text that msgpack cannot represent."""


def cannot_be_sent(request: Request | Prefetch, error: Exception) -> RequestError:
    """Make the error for a request that cannot be encoded."""
    return RequestError(
        f"request {request.request_id!r}: cannot be sent: {error}; integers must fit into 64 bits and "
        "text must be valid Unicode"
    )


CHUNK_BYTES = 64 << 10  # small compared to a write buffer, so that deltas can pass between chunks


FETCHES_MAX = 16  # concurrent files on one connection


def chunks(content: bytes) -> Iterator[tuple[bytes, bool]]:
    """Yield (bytes, is_last) chunks of a file; an empty file is one empty chunk."""
    for start in range(0, max(1, len(content)), CHUNK_BYTES):
        yield content[start : start + CHUNK_BYTES], start + CHUNK_BYTES >= len(content)


def missing_file(sha256: str) -> RequestError:
    return RequestError(f"no file {sha256} here; ask a worker of the same model", http_status=404)


class FileReceiver:
    """Joins the chunks of one file."""

    def __init__(self, sha256: str, bytes_max: int) -> None:
        self._sha256 = sha256
        self._bytes_max = bytes_max
        self._content = bytearray()
        self._digest = hashlib.sha256()

    def add(self, data: bytes) -> None:
        """Append a chunk.

        Raises:
            ProtocolError: the file is longer than `bytes_max`.
        """
        if len(self._content) + len(data) > self._bytes_max:
            raise ProtocolError(
                f"file {self._sha256}: more than {self._bytes_max} bytes; raise file_bytes_max, or make it smaller"
            )
        self._content += data
        self._digest.update(data)

    def finish(self) -> bytes:
        """Return the content.

        Raises:
            ProtocolError: its hash differs from the requested one.
        """
        got = self._digest.hexdigest()
        if got != self._sha256:
            raise ProtocolError(
                f"file {self._sha256}: its content has the hash {got}; it was changed where the worker runs: "
                "restart that worker"
            )
        return bytes(self._content)


A = TypeVar("A")


class Calls(Generic[A]):
    """Pending calls by id, all with answers of one type. One event loop owns it; the worker bounds their number."""

    def __init__(self) -> None:
        self._ids = count(1)
        self._waiting: dict[int, asyncio.Future[A]] = {}

    async def ask(self, send: Callable[[int], None]) -> A:
        """Send a call with a new id, and return its answer. The caller sets a timeout.

        Raises:
            PenstockError: the error passed to `answered` or `fail`.
        """
        call_id = next(self._ids)
        self._waiting[call_id] = future = asyncio.get_running_loop().create_future()
        try:
            send(call_id)
            answer: A = await future
            return answer
        finally:
            del self._waiting[call_id]

    def answered(self, call_id: int, outcome: PenstockError | A) -> None:
        """Resolve a call with its answer or its error; ignored if nothing waits for it any more."""
        future = self._waiting.get(call_id)
        if future is None or future.done():
            return
        if isinstance(outcome, PenstockError):
            future.set_exception(outcome)
        else:
            future.set_result(outcome)

    def fail(self, error: PenstockError) -> None:
        """Fail all pending calls: no answers will arrive."""
        for call_id in tuple(self._waiting):
            self.answered(call_id, error)
