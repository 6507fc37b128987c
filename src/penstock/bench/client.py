"""An HTTP/1.1 client for streams of server-sent events that costs little per token.

It is an asyncio protocol instead of a client library, since the load generator often runs on the measured machine.
"""

import asyncio
import socket
import ssl
from dataclasses import dataclass, field
from enum import StrEnum
from time import perf_counter
from urllib.parse import urlsplit

import msgspec

from penstock.core.errors import ConfigError


class RequestFailure(StrEnum):
    """Kinds of failed requests; an HTTP status is a kind such as `http_429`."""

    CONNECT = "connect"  # no connection to the address
    DISCONNECTED = "disconnected"  # the response ended early
    TIMEOUT = "timeout"
    STREAM_ERROR = "stream_error"  # an error event in the stream
    MALFORMED = "malformed"  # not HTTP, not server-sent events, not JSON
    EMPTY = "empty"  # a complete answer without a token


class _Delta(msgspec.Struct):
    content: str | None = None
    reasoning_content: str | None = None


class _Choice(msgspec.Struct):
    delta: _Delta | None = None
    text: str | None = None


class _PromptDetails(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0
    prompt_tokens_details: _PromptDetails | None = None


class _Error(msgspec.Struct):
    message: str = ""


class _Chunk(msgspec.Struct):
    id: str | None = None
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: _Error | str | None = None


_chunks = msgspec.json.Decoder(_Chunk)
_MESSAGE_CHARACTERS_MAX = 200
_EVENT_BYTES_MAX = 1 << 20


@dataclass(slots=True)
class MeasuredRequest:
    """Parses the response body as it arrives.

    Times are `time.perf_counter`, as uvloop's clock has a resolution of 1 ms. `due_s` is the planned send time: latencies
    count from it, so that delays of a slow client or server are included.
    """

    due_s: float
    sent_s: float = 0.0
    first_token_s: float | None = None
    last_token_s: float = 0.0
    end_s: float = 0.0
    gaps_s: list[float] = field(default_factory=list)
    """Seconds between chunks with text; a chunk may hold several tokens."""
    usage: _Usage | None = None
    failure: str | None = None
    message: str = ""
    answer_id: str = ""
    """Id of the answer."""
    done: bool = False
    """Whether `[DONE]` arrived."""
    _rest: bytes = b""

    def feed(self, body: bytes, now_s: float) -> None:
        """Parse the next bytes of a stream of server-sent events."""
        if b"\r" in body:
            body = body.replace(b"\r\n", b"\n")
        *events, self._rest = (self._rest + body).split(b"\n\n")
        for event in events:
            self._take_event(event, now_s)
        if len(self._rest) > _EVENT_BYTES_MAX:
            self.fail(RequestFailure.MALFORMED, f"an event of more than {_EVENT_BYTES_MAX} bytes")
            self._rest = b""

    def _take_event(self, event: bytes, now_s: float) -> None:
        if not event.startswith(b"data:"):  # a comment, or a field before the data
            event = next((line for line in event.split(b"\n") if line.startswith(b"data:")), b"")
        data = event[len(b"data:") :].strip()
        if not data:
            return
        if data == b"[DONE]":
            self.done = True
            return
        try:
            chunk = _chunks.decode(data)
        except msgspec.DecodeError as error:
            self.fail(RequestFailure.MALFORMED, f"{error} in {data.decode(errors='replace')}")
            return
        if chunk.error is not None:
            self.fail(
                RequestFailure.STREAM_ERROR,
                chunk.error if isinstance(chunk.error, str) else chunk.error.message,
            )
        if chunk.usage is not None:
            self.usage = chunk.usage
        self.answer_id = self.answer_id or chunk.id or ""
        if any(choice.text or _has_text(choice.delta) for choice in chunk.choices):
            self._take_token(now_s)

    def _take_token(self, now_s: float) -> None:
        if self.first_token_s is None:
            self.first_token_s = now_s
        else:
            self.gaps_s.append(now_s - self.last_token_s)
        self.last_token_s = now_s

    def refuse(self, status: int, body: bytes) -> None:
        """Record a response with an error status."""
        try:
            error = _chunks.decode(body).error
        except msgspec.DecodeError:
            error = None
        message = error.message if isinstance(error, _Error) else error or body.decode(errors="replace")
        self.fail(f"http_{status}", message)

    def fail(self, failure: str, message: str) -> None:
        """Record a failure; the first one stays."""
        if self.failure is None:
            self.failure = failure
            self.message = " ".join(message.split())[:_MESSAGE_CHARACTERS_MAX]

    def finish(self, now_s: float) -> None:
        """Record the end of the body, complete or not."""
        self.end_s = now_s
        if not self.done:
            self.fail(RequestFailure.DISCONNECTED, "the answer ended before its last event, data: [DONE]")
        elif self.first_token_s is None:
            if self.output_tokens == 0:
                self.fail(RequestFailure.EMPTY, "the answer held no token")
            self.first_token_s = self.last_token_s = now_s  # tokens without text

    @property
    def output_tokens(self) -> int:
        """Output tokens: the server's count, else one per chunk."""
        if self.usage is not None:
            return self.usage.completion_tokens
        return 0 if self.first_token_s is None else 1 + len(self.gaps_s)

    @property
    def cached_tokens(self) -> int | None:
        """Cached prompt tokens; None if the server does not report them."""
        details = None if self.usage is None else self.usage.prompt_tokens_details
        return None if details is None else details.cached_tokens

    @property
    def ttft_s(self) -> float:
        return (self.first_token_s or self.end_s) - self.due_s

    @property
    def e2e_s(self) -> float:
        return self.end_s - self.due_s

    @property
    def time_per_token_s(self) -> float | None:
        """Mean seconds between tokens; None for one token."""
        if self.first_token_s is None or self.output_tokens < 2:
            return None
        return (self.last_token_s - self.first_token_s) / (self.output_tokens - 1)


def _has_text(delta: _Delta | None) -> bool:
    return delta is not None and bool(delta.content or delta.reasoning_content)


_HEAD_BYTES_MAX = 64 * 1024
_REFUSAL_BYTES_MAX = 64 * 1024
_OK = 200


@dataclass(frozen=True, slots=True)
class ServerAddress:
    """Target of requests."""

    host: str
    port: int
    secure: bool
    path: str

    @classmethod
    def parse(cls, url: str, endpoint: str, *, flag: str = "--url") -> "ServerAddress":
        """Parse a base URL such as http://127.0.0.1:8000, with or without /v1.

        Raises:
            ConfigError: invalid URL; the text names `flag`.
        """
        try:
            parts = urlsplit(url)
            port = parts.port
        except ValueError as error:
            raise ConfigError(f"{flag}: {url!r}: {error}") from error
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ConfigError(f"{flag}: {url!r}: expected a URL such as http://127.0.0.1:8000")
        secure = parts.scheme == "https"
        base = parts.path.rstrip("/").removesuffix("/v1")
        return cls(parts.hostname, port or (443 if secure else 80), secure, f"{base}/v1/{endpoint}")


class Client:
    """Sends requests over reused connections. One event loop owns it."""

    def __init__(
        self,
        address: ServerAddress,
        *,
        timeout_s: float,
        quickack: bool = False,
        api_key: str | None = None,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        """Create a client; it connects on the first request.

        Args:
            address: target.
            timeout_s: longest seconds of one request, from connecting to the last byte.
            quickack: acknowledge every packet at once, to exclude delayed ACKs from the measurement.
            api_key: sent as a bearer token.
            tls: of https; None trusts the usual authorities.
        """
        self._address = address
        self._timeout_s = timeout_s
        self._quickack = quickack
        self._idle: list[_Connection] = []
        self._tls = (tls or ssl.create_default_context()) if address.secure else None
        host = f"[{address.host}]" if ":" in address.host else address.host
        authorization = f"Authorization: Bearer {api_key}\r\n" if api_key else ""
        self._head = (
            f"POST {address.path} HTTP/1.1\r\nHost: {host}:{address.port}\r\n{authorization}"
            "Content-Type: application/json\r\nAccept: text/event-stream\r\nContent-Length: "
        ).encode()

    async def send(self, body: bytes, due_s: float | None = None) -> MeasuredRequest:
        """Send one request and wait for the end of its response.

        Args:
            body: JSON.
            due_s: planned send time, by `perf_counter`; None is now.

        Returns:
            The exchange; an error is its `failure`, not an exception.
        """
        sent_s = perf_counter()
        exchange = MeasuredRequest(sent_s if due_s is None else due_s, sent_s)
        message = b"%b%d\r\n\r\n%b" % (self._head, len(body), body)
        try:
            async with asyncio.timeout(self._timeout_s):
                await self._exchange(message, exchange)
        except TimeoutError:
            exchange.fail(RequestFailure.TIMEOUT, f"no end of the answer after {self._timeout_s:g} s")
        except OSError as error:
            exchange.fail(RequestFailure.CONNECT, error.strerror or str(error))
        exchange.finish(perf_counter())
        return exchange

    async def _exchange(self, message: bytes, exchange: MeasuredRequest) -> None:
        reused = self._take_idle()
        connection = reused or await self._connect()
        answered = await connection.run(message, exchange)
        if reused and not answered:  # the server closed the idle connection meanwhile: retry
            connection = await self._connect()
            answered = await connection.run(message, exchange)
        if not answered:
            exchange.fail(RequestFailure.DISCONNECTED, "the connection was closed without an answer")
        if connection.reusable:
            self._idle.append(connection)

    def _take_idle(self) -> "_Connection | None":
        while self._idle:
            connection = self._idle.pop()
            if connection.reusable:
                return connection
        return None

    async def _connect(self) -> "_Connection":
        loop = asyncio.get_running_loop()
        _, connection = await loop.create_connection(
            lambda: _Connection(loop, quickack=self._quickack),
            self._address.host,
            self._address.port,
            ssl=self._tls,
        )
        return connection

    def close(self) -> None:
        while self._idle:
            self._idle.pop().close()


class _Connection(asyncio.Protocol):
    """One connection with one exchange at a time. The body is chunked, has a Content-Length or ends with the connection."""

    def __init__(self, loop: asyncio.AbstractEventLoop, *, quickack: bool) -> None:
        self._loop = loop
        self._quickack = quickack
        self._transport: asyncio.Transport | None = None
        self._socket: socket.socket | None = None
        self._exchange: MeasuredRequest | None = None
        self._ended: asyncio.Future[None] | None = None
        self._received = b""
        self._status: int | None = None  # None until the headers are complete
        self._chunked = False
        self._remaining_bytes: int | None = None  # None: until the connection closes
        self._refusal = b""
        self._keep_alive = True

    @property
    def reusable(self) -> bool:
        return self._transport is not None and self._keep_alive and self._exchange is None

    async def run(self, message: bytes, exchange: MeasuredRequest) -> bool:
        """Send a request and wait for the end of its response; False if the connection closed without a response."""
        if self._transport is None:
            return False
        self._exchange, self._ended = exchange, self._loop.create_future()
        self._received, self._status, self._refusal = b"", None, b""
        self._transport.write(message)
        try:
            await self._ended
        except BaseException:  # unread bytes of the response follow: do not reuse the connection
            self._exchange = None
            self.close()
            raise
        return self._status is not None

    def close(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport  # type: ignore[assignment]
        self._socket = transport.get_extra_info("socket")
        self._enable(socket.TCP_NODELAY)

    def _enable(self, option: int) -> None:
        if self._socket is not None:
            self._socket.setsockopt(socket.IPPROTO_TCP, option, 1)

    def data_received(self, data: bytes) -> None:
        now_s = perf_counter()
        if self._quickack:
            self._enable(socket.TCP_QUICKACK)
        if self._exchange is None:  # unexpected bytes
            self.close()
            return
        self._received += data
        try:
            if self._status is None and not self._take_head():
                return
            body, complete = self._take_body()
        except ValueError as error:
            self._exchange.fail(RequestFailure.MALFORMED, str(error))
            self._keep_alive = False
            self._status = self._status or 0
            self._end()
            self.close()
            return
        if self._status == _OK:
            self._exchange.feed(body, now_s)
        elif len(self._refusal) < _REFUSAL_BYTES_MAX:
            self._refusal += body
        if complete:
            self._end()

    def connection_lost(self, error: Exception | None) -> None:
        self._transport = None
        if self._exchange is None:
            return
        if self._status is not None and (self._chunked or self._remaining_bytes is not None):
            self._exchange.fail(
                RequestFailure.DISCONNECTED, str(error or "the connection was closed within the answer")
            )
        self._end()

    def _end(self) -> None:
        exchange, self._exchange = self._exchange, None
        assert exchange is not None
        assert self._ended is not None
        if self._status and self._status != _OK:
            exchange.refuse(self._status, self._refusal)
        if not self._ended.done():
            self._ended.set_result(None)

    def _take_head(self) -> bool:
        """Parse the headers if complete.

        Raises:
            ValueError: not an HTTP response.
        """
        head, end, rest = self._received.partition(b"\r\n\r\n")
        if not end:
            if len(head) > _HEAD_BYTES_MAX or not b"HTTP/1.".startswith(head[:7]):
                raise ValueError(f"expected an HTTP answer, got {head[:40]!r}")
            return False
        status_line, *lines = head.split(b"\r\n")
        words = status_line.split(None, 2)
        if len(words) < 2 or not words[0].startswith(b"HTTP/1."):
            raise ValueError(f"expected an HTTP answer, got {status_line[:40]!r}")
        fields = {
            name.strip().lower(): value.strip() for name, _, value in (line.partition(b":") for line in lines)
        }
        self._chunked = b"chunked" in fields.get(b"transfer-encoding", b"").lower()
        length = fields.get(b"content-length")
        self._remaining_bytes = None if length is None or self._chunked else int(length)
        measured = self._chunked or self._remaining_bytes is not None
        self._keep_alive = measured and fields.get(b"connection", b"").lower() != b"close"
        self._status = int(words[1])
        self._received = rest
        return True

    def _take_body(self) -> tuple[bytes, bool]:
        """Give (new bytes of the body, whether it is complete).

        Raises:
            ValueError: invalid chunk length.
        """
        if self._chunked:
            return self._take_chunks()
        body, self._received = self._received, b""
        if self._remaining_bytes is None:
            return body, False
        self._remaining_bytes -= len(body)
        return body, self._remaining_bytes <= 0

    def _take_chunks(self) -> tuple[bytes, bool]:
        data, at = self._received, 0
        chunks = []
        complete = False
        while not complete:
            line_end = data.find(b"\r\n", at)
            if line_end < 0:
                break
            size = int(data[at:line_end].partition(b";")[0], 16)
            if size < 0:
                raise ValueError(f"a chunk of {size} bytes")
            begin = line_end + 2
            end = begin + size
            if len(data) < end + 2:
                break
            chunks.append(data[begin:end])
            at = end + 2
            complete = size == 0
        self._received = data[at:]
        return b"".join(chunks), complete
