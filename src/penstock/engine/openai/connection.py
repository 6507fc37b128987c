"""HTTP to one server: whole answers and streamed lines, each bounded in size and silence, and errors in Penstock's words."""

import asyncio
import math
import os
import ssl
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from typing import Any, Protocol

import aiohttp
import msgspec

from penstock.core.errors import (
    EngineError,
    Overloaded,
    PenstockError,
    RequestError,
    StepFailed,
    Unavailable,
    WrongServerError,
)
from penstock.core.listening import keepalive_socket
from penstock.engine.openai.config import LimitsConfig

_ERROR_CHARACTERS_MAX = 500
_RETRY_S = 1.0
_RETRY_S_MAX = 60.0
_REFUSED = {400, 413, 422}
_KEY_WRONG = {401, 403}
_BUSY = {429, 503}
_KEPT_S = 50.0
"""How long an unused connection is kept: frontends close theirs after 75 s by default, most proxies after 60."""
_REST_S = 0.5
_LINES_AT_ONCE = 512
"""Lines of an answer read before other tasks of the event loop run."""


class HttpConnection(Protocol):
    """HTTP to a server, whichever of its addresses answers. `name` names the server in errors, which clients may read."""

    @property
    def name(self) -> str: ...

    async def close(self) -> None:
        """Close everything; later requests are refused. Safe twice."""
        ...

    async def get(self, path: str, *, timeout_s: float, bytes_max: int | None = None) -> bytes:
        """Get a whole answer, of `bytes_max` at most, or else `limits.answer_bytes_max`.

        Raises:
            Unavailable: the server cannot be reached, is silent, or its status is 5xx.
            NotThere: it has no such path (404, 405).
            EngineError: any other status.
        """
        ...

    async def post(
        self, path: str, body: Any, *, timeout_s: float, on_sent: Callable[[], None] | None = None
    ) -> bytes:
        """Post JSON and get a whole answer; `on_sent` is called when the request is on its way. Errors are those of `get` and `RequestError`."""
        ...

    def stream(
        self, path: str, body: Any, on_sent: Callable[[], None], headers: Mapping[str, str] | None = None
    ) -> AbstractAsyncContextManager[AsyncIterator[bytes]]:
        """Post JSON, with more headers, and yield the lines of the answer; leaving the context aborts the request.

        Raises:
            RequestError: the server refuses this request, in its own words.
            Overloaded: it is full (429, 503).
            StepFailed: it cannot be reached, fails (5xx), ends in a line, is silent, or sends a line that is too long.
        """
        ...


class ServerConnection:
    """Implements `HttpConnection` for one URL. One event loop owns it.

    Each request has a TCP connection of its own, and closing it aborts the request. With `keeps`, connections whose answers were read
    to their end serve further requests, which saves the round trips of opening them.
    """

    def __init__(
        self,
        url: str,
        limits: LimitsConfig,
        api_key: str | None = None,
        *,
        name: str | None = None,
        headers: Mapping[str, str] | None = None,
        tls: ssl.SSLContext | None = None,
        keeps: bool = False,
        on_round_trip: Callable[[float], None] | None = None,
    ) -> None:
        """Make one; nothing is connected before the first request.

        Args:
            url: without a slash at its end.
            limits: bounds of one request.
            api_key: sent as a bearer token.
            name: of the server in errors; None: its URL.
            headers: of every request.
            tls: for https; None checks certificates by the system's authorities.
            keeps: whether connections are kept, and closed by the kernel where the other host no longer answers.
            on_round_trip: called at each whole answer with the seconds from its request, sent on an open connection, to its head.
        """
        self.url = url
        self._name = name
        self._limits = limits
        self._headers = dict(headers or {})
        if api_key is not None:
            self._headers["Authorization"] = f"Bearer {api_key}"
        self._tls = tls
        self._keeps = keeps
        self._on_round_trip = on_round_trip
        self._session: aiohttp.ClientSession | None = None
        self._closed = False

    @property
    def name(self) -> str:
        return self.url if self._name is None else self._name

    async def close(self) -> None:
        self._closed = True
        session, self._session = self._session, None
        if session is not None:
            await session.close()

    async def get(self, path: str, *, timeout_s: float, bytes_max: int | None = None) -> bytes:
        return await self._whole("GET", path, None, timeout_s, bytes_max=bytes_max)

    async def post(
        self, path: str, body: Any, *, timeout_s: float, on_sent: Callable[[], None] | None = None
    ) -> bytes:
        return await self._whole("POST", path, body, timeout_s, on_sent)

    @asynccontextmanager
    async def stream(
        self, path: str, body: Any, on_sent: Callable[[], None], headers: Mapping[str, str] | None = None
    ) -> AsyncIterator[AsyncIterator[bytes]]:
        timeout = aiohttp.ClientTimeout(
            total=None, sock_connect=self._limits.connect_timeout_s, sock_read=self._limits.silence_s
        )
        try:
            async with self._request("POST", path, body, timeout, on_sent, more_headers=headers) as response:
                if response.status != 200:
                    raise self._refusal(path, response.status, response.headers, await self._read(response))
                yield self._lines(response)
                if self._keeps:
                    await self._read_rest(response)
        except (aiohttp.ClientConnectorError, ConnectionRefusedError) as error:
            raise NoAnswer(f"{self.name}: {self._explain(error)}") from error
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            raise NoAnswer(f"{self._place(path)}: {self._explain(error)}") from error

    # -- details

    async def _whole(
        self,
        method: str,
        path: str,
        body: Any,
        timeout_s: float,
        on_sent: Callable[[], None] | None = None,
        *,
        bytes_max: int | None = None,
    ) -> bytes:
        timeout = aiohttp.ClientTimeout(
            total=timeout_s, sock_connect=min(self._limits.connect_timeout_s, timeout_s)
        )
        loop, sent_s = asyncio.get_running_loop(), math.nan

        def sent() -> None:
            nonlocal sent_s
            sent_s = loop.time()
            if on_sent is not None:
                on_sent()

        try:
            async with self._request(method, path, body, timeout, sent) as response:
                if self._on_round_trip is not None and method == "GET":
                    self._on_round_trip(loop.time() - sent_s)
                content = await self._read(response, bytes_max)
                if response.status == 200:
                    return content
                if response.status in {404, 405} and method == "GET":
                    raise NotThere(f"{self._place(path)}: {response.status}")
                raise self._refusal(path, response.status, response.headers, content)
        except (aiohttp.ClientConnectorError, ConnectionRefusedError) as error:
            is_tls = isinstance(error, (aiohttp.ClientSSLError, ssl.CertificateError))
            kind = UntrustedError if is_tls else Unreachable
            raise kind(f"{self.name}: {self._explain(error)}") from error
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            raise Unavailable(f"{self._place(path)}: {self._explain(error, timeout_s)}") from error

    @asynccontextmanager
    async def _request(
        self,
        method: str,
        path: str,
        body: Any,
        limit: aiohttp.ClientTimeout,
        on_sent: Callable[[], None] | None,
        *,
        more_headers: Mapping[str, str] | None = None,
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        if self._closed:
            raise Unavailable(f"{self.name}: the connection to it was closed here")
        if self._session is None:
            self._session = self._make_session()
        headers = {"Content-Type": "application/json"} | dict(more_headers or {})
        async with self._session.request(
            method,
            self.url + path,
            data=None if body is None else msgspec.json.encode(body),
            headers=headers if body is not None else None,
            timeout=limit,
            allow_redirects=False,
            trace_request_ctx=on_sent,
        ) as response:
            encoding = response.headers.get("Content-Encoding", "identity")
            if encoding.lower() != "identity":
                raise Unavailable(
                    f"{self._place(path)}: answers with Content-Encoding {_one_line(encoding)!r}, which was not asked for; have the"
                    " server, or the proxy in front of it, send plain bytes"
                )
            yield response

    def _make_session(self) -> aiohttp.ClientSession:
        tracing = aiohttp.TraceConfig()

        async def sent(_session: Any, context: Any, _params: Any) -> None:
            if context.trace_request_ctx is not None:
                context.trace_request_ctx()

        tracing.on_request_headers_sent.append(sent)
        return aiohttp.ClientSession(
            connector=self._make_connector(),
            cookie_jar=aiohttp.DummyCookieJar(),
            headers=self._headers,
            trace_configs=[tracing],
            auto_decompress=False,
            skip_auto_headers=("Accept-Encoding",),
            trust_env=False,
        )

    def _make_connector(self) -> aiohttp.TCPConnector:
        tls = True if self._tls is None else self._tls
        if not self._keeps:
            return aiohttp.TCPConnector(limit=0, force_close=True, ssl=tls)
        return aiohttp.TCPConnector(
            limit=0, keepalive_timeout=_KEPT_S, ssl=tls, socket_factory=keepalive_socket
        )

    def _place(self, path: str) -> str:
        """Name a path of the server in an error; a server with a name of its own is named without the path."""
        return f"{self.url}{path}" if self._name is None else self._name

    async def _read_rest(self, response: aiohttp.ClientResponse) -> None:
        """Read what follows an answer's last token, which is its end mark, so that the connection can be kept."""
        with suppress(TimeoutError, aiohttp.ClientError, OSError):
            async with asyncio.timeout(_REST_S):
                while await response.content.readany():
                    pass

    async def _read(self, response: aiohttp.ClientResponse, bytes_max: int | None = None) -> bytes:
        content = bytearray()
        most = min(bytes_max or self._limits.answer_bytes_max, self._limits.answer_bytes_max)
        async for piece in response.content.iter_any():
            content += piece
            if len(content) > most:
                raise Unavailable(
                    f"{self._place(response.url.path)}: the answer has more than {most} bytes"
                    f"{' (limits.answer_bytes_max)' if most == self._limits.answer_bytes_max else ''}"
                )
        return bytes(content)

    async def _lines(self, response: aiohttp.ClientResponse) -> AsyncIterator[bytes]:
        """Yield lines that are not empty, without their ends.

        Raises:
            StepFailed: a line is too long, or the answer ends within one.
        """
        rest = b""
        async for piece in response.content.iter_any():
            *lines, rest = (rest + piece).split(b"\n") if rest else piece.split(b"\n")
            for number, line in enumerate(lines, 1):
                if stripped := line.strip():
                    yield stripped
                if number % _LINES_AT_ONCE == 0:  # one piece may have a hundred thousand
                    await asyncio.sleep(0)
            if len(rest) > self._limits.line_bytes_max:
                raise StepFailed(
                    f"{self.name}: sent a line of more than {self._limits.line_bytes_max} bytes (limits.line_bytes_max)"
                )
        if rest.strip():
            yield rest.strip()

    def _refusal(self, path: str, status: int, headers: Any, content: bytes) -> PenstockError:
        """Turn a status into an error."""
        text = f"{self._place(path)}: {status}: {error_text(content)}"
        if 300 <= status < 400:
            target = _one_line(headers.get("Location", "nowhere"))
            return Unavailable(
                f"{self._place(path)}: {status}: redirects to {target}; redirects are not followed, give the server's own URL"
            )
        if status in _BUSY:
            kind = Overloaded if status == 429 else NotServing
            return kind(text, retry_after_s=_retry_after_s(headers.get("Retry-After")))
        if status in _REFUSED:
            return RequestError(text, http_status=413 if status == 413 else 400)
        if status in _KEY_WRONG:
            return WrongKeyError(f"{text}; give the server's key in a file (api_key_file)")
        if status >= 500:
            return NoAnswer(text)
        return EngineError(text)

    def _explain(self, error: Exception, timeout_s: float | None = None) -> str:
        if isinstance(error, aiohttp.ConnectionTimeoutError):
            return f"no connection within {self._limits.connect_timeout_s:g} s"
        if isinstance(error, TimeoutError):
            return f"no answer within {timeout_s or self._limits.silence_s:g} s"
        if isinstance(error, aiohttp.ClientConnectorError):
            return _no_connection(error)
        if isinstance(error, aiohttp.ServerDisconnectedError):
            return "the connection was closed before an answer came"
        if isinstance(error, aiohttp.ClientPayloadError):
            return "the connection was closed within an answer"
        kind, text = type(error).__name__, str(error)
        if isinstance(error, aiohttp.ClientResponseError):
            kind, text = "no HTTP answer", error.message
        return f"{kind}: {_one_line(text)}"


class NotThere(Unavailable):
    """The server has no such path."""


class Unreachable(Unavailable):
    """No connection could be made: nothing listens there."""


class WrongKeyError(WrongServerError):
    """The server expects another API key (401, 403)."""


class UntrustedError(Unreachable):
    """The TLS handshake failed: one side does not trust the other's certificate."""


class NotServing(Overloaded):
    """The server takes no requests for now (503): it drains, loads, or has no worker."""


class NoAnswer(StepFailed):
    """No answer came, or the rest of one did not: another address of the server may give it."""


def _no_connection(error: aiohttp.ClientConnectorError) -> str:
    """Say why no connection was made; of a TLS handshake, what OpenSSL says of the certificates."""
    if isinstance(error, (aiohttp.ClientSSLError, ssl.CertificateError)):
        cause = getattr(error, "certificate_error", None) or error.__cause__ or error
        reason = getattr(cause, "verify_message", "") or getattr(cause, "reason", "") or str(cause)
        return f"no TLS connection: {_one_line(str(reason)).lower().replace('_', ' ')}"
    number = error.os_error.errno
    return f"no connection: {os.strerror(number) if number else error.os_error}".lower()


def error_text(content: bytes) -> str:
    """Give the text of an error body: of OpenAI's, FastAPI's, llama.cpp's and Ollama's shapes, else the body itself."""
    try:
        found = msgspec.json.decode(content)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        found = None
    for key in ("error", "message", "detail"):
        if isinstance(found, dict) and found.get(key):
            found = found[key]
    return _one_line(found if isinstance(found, str) else content.decode("utf-8", "replace")) or "no text"


def _one_line(text: str) -> str:
    """Shorten a server's text to what fits into an error, without characters that would change a terminal."""
    text = " ".join(text[: 2 * _ERROR_CHARACTERS_MAX].split())
    text = "".join(char if char.isprintable() else "\ufffd" for char in text)
    return text if len(text) <= _ERROR_CHARACTERS_MAX else text[:_ERROR_CHARACTERS_MAX] + "..."


def _retry_after_s(value: str | None) -> float:
    try:
        seconds = float(value or _RETRY_S)
    except ValueError:  # a date
        return _RETRY_S
    return min(max(seconds, 0.0), _RETRY_S_MAX) if seconds == seconds else _RETRY_S  # noqa: PLR0124 - NaN
