"""Routes that a model answers, of every API: whole answers, streams with backpressure from their clients, and tokens."""

import asyncio
import contextlib
from collections.abc import Callable, Iterator, Sequence
from functools import partial

from aiohttp import web
from aiohttp.abc import AbstractStreamWriter

from penstock.core.errors import DeadlineExceeded, PenstockError, RequestError
from penstock.core.framing import unsent_bytes
from penstock.core.json_text import encode_json
from penstock.frontend.apis.chat import CHAT, COMPLETIONS
from penstock.frontend.apis.dialect import ApiDialect
from penstock.frontend.apis.messages_answer import COUNT_TOKENS, MESSAGES
from penstock.frontend.apis.responses_answer import RESPONSES
from penstock.frontend.apis.responses_body import DeletedResponse
from penstock.frontend.apis.tokens import TOKENIZE, Detokenized, Tokenized
from penstock.frontend.config import FrontendConfig
from penstock.frontend.frontend import Frontend, PendingAnswer
from penstock.frontend.http.replies import AnswerHeads, json_response, request_id, unexpected
from penstock.frontend.http.request_log import TracedRequest, line_of_request, traced_request
from penstock.frontend.limits.admission import RequestSlot
from penstock.frontend.limits.headers import RequestOptions, read_options
from penstock.frontend.limits.tenants import Tenant
from penstock.frontend.text.answer import TextEvent
from penstock.runtime.requests.direct_streams import DirectStream
from penstock.seams import Hold

_HEARTBEAT = b": heartbeat\n\n"  # a comment of the SSE standard
_RESOLUTION_S = 0.001
_HEADERS = {
    "Content-Type": "text/event-stream; charset=utf-8",
    "Cache-Control": "no-cache",
    "X-Accel-Buffering": "no",
}
_LINES = (
    "".join(f"{name}: {value}\r\n" for name, value in _HEADERS.items()) + "Transfer-Encoding: chunked\r\n"
)
_LAST_CHUNK = b"0\r\n\r\n"


class SseResponse(web.StreamResponse):
    """Sends events as they come: each is one chunk, written straight to the connection's transport.

    The head goes out with the first event, so that an early error has its HTTP status; `headers_after_s` without an event
    sends them too. A stream silent for `heartbeat_s` gets a comment.
    """

    def __init__(
        self, request: web.Request, pending: PendingAnswer, config: FrontendConfig, heads: AnswerHeads
    ) -> None:
        """Create the response; sends nothing yet.

        Args:
            request: the HTTP request to answer.
            pending: the completion and its format.
            config: gives the write buffer, the reader timeout and the keep-alive.
            heads: makes the head, unless aiohttp has to.
        """
        super().__init__()
        self._heads = heads
        self._name = request_id.get()  # the first event may come in another context
        self._head: bytes | None = None
        self._is_decided = False  # who makes the head
        self._has_ended = False  # with an end that `_put` wrote
        self.outcome = 200
        """HTTP status for metrics: that of the error that ended the stream, else 200."""
        self._request = request
        self._pending = pending
        self._encoder = pending.event_stream()
        self._writer: AbstractStreamWriter | None = None
        self._direct: list[DirectStream] = []  # that write to the transport themselves
        self._write_buffer_bytes = config.write_buffer_bytes
        self._reader_timeout_s = config.reader_timeout_s
        self._is_chunked = True
        self._has_stalled = False
        self._stream = config.stream
        self._loop = asyncio.get_running_loop()
        self._beginning = asyncio.Lock()
        self._sent_s = 0.0  # event loop time
        self._timer: asyncio.TimerHandle | None = None
        self._beat: asyncio.Task[None] | None = None

    @contextlib.contextmanager
    def kept_alive(self) -> Iterator[None]:
        """Send headers and comments on a silent stream, until the block ends."""
        self._timer = self._loop.call_later(self._stream.headers_after_s, self._on_silence)
        try:
            yield
        finally:
            self._timer.cancel()
            if self._beat is not None:
                self._beat.cancel()

    def take(self, event: TextEvent) -> Hold | None:
        """Write an event, within the call that brings its tokens.

        Returns:
            What has to be waited for before the next one: the first event's headers, or a client that reads slowly. Mostly None.

        Raises:
            ConnectionResetError: the client is gone.
        """
        chunk = self._encoder.event(event)
        if not chunk:
            return None  # an empty chunk would end HTTP's body
        if not self._has_head():
            return partial(self._begin_with, chunk)
        self._put(chunk)
        return self._drain if self._is_full else None

    def around_text(self, index: int) -> tuple[bytes, bytes, bool] | None:
        around = None if self._writer is None else self._encoder.around_text(index)
        return None if around is None else (*around, self._is_chunked)

    def client(self, stream: DirectStream) -> tuple[asyncio.Transport, int] | None:
        if stream not in self._direct:
            self._direct.append(stream)
        transport = self._request.transport
        return None if transport is None else (transport, self._write_buffer_bytes)

    def why(self, *, is_gone: bool) -> Hold | Exception:
        return ConnectionResetError("the client is gone") if is_gone else self._drain

    async def finish(self) -> None:
        end = self._encoder.end(self._pending.completion.usage())
        if not self._has_head():
            await self._begin()
        self._put(end, is_last=True)
        if self._is_full:
            await self._drain()

    async def fail(self, error: PenstockError) -> None:
        """End the stream with an error event; a client with unread bytes is disconnected instead."""
        self.outcome = error.http_status
        transport = self._request.transport
        if transport is not None and (
            self._has_stalled or transport.get_write_buffer_size() > self._write_buffer_bytes
        ):
            transport.abort()
        elif self._writer is not None:
            self._put(self._encoder.failure(error))  # without waiting: the client may not read

    async def _begin_with(self, chunk: bytes) -> None:
        """Send the headers and the first event."""
        await self._begin()
        self._put(chunk)

    @property
    def prepared(self) -> bool:
        return self._writer is not None or super().prepared

    @property
    def keep_alive(self) -> bool | None:
        return super().keep_alive if self._head is None else True

    async def prepare(self, request: web.BaseRequest) -> AbstractStreamWriter | None:
        """Have aiohttp send the head, unless it is ours."""
        return await super().prepare(request) if self._head is None else self._writer

    async def write_eof(self, data: bytes = b"") -> None:
        """End the body."""
        if self._head is None:
            await super().write_eof(data)
        elif not self._has_ended:
            transport = self._request.transport
            if transport is None or transport.is_closing():
                raise ConnectionResetError("the client is gone")
            transport.write(_LAST_CHUNK)

    def _put(self, chunk: bytes, *, is_last: bool = False) -> None:
        """Write bytes of the body, in HTTP's chunks unless the client speaks HTTP/1.0; the first ones behind our head, if it is ours.

        Raises:
            ConnectionResetError: the client is gone.
        """
        transport = self._request.transport
        if transport is None or transport.is_closing():
            raise ConnectionResetError("the client is gone")
        self._sent_s = self._loop.time()
        content = b"%x\r\n%b\r\n" % (len(chunk), chunk) if self._is_chunked else chunk
        if self._head is not None:
            if self._writer is None:
                transport.set_write_buffer_limits(high=self._write_buffer_bytes)
                self._writer, content = self._request.writer, self._head + content
            if is_last:
                self._has_ended, content = True, content + _LAST_CHUNK
        transport.write(content)

    @property
    def _is_full(self) -> bool:
        """Whether the client has left more unread than the write buffer holds."""
        transport = self._request.transport
        return transport is None or transport.get_write_buffer_size() > self._write_buffer_bytes

    async def _drain(self) -> None:
        """Wait until the write buffer has room, as long as the client reads.

        Raises:
            DeadlineExceeded: the client read nothing for `reader_timeout_s`.
        """
        assert self._writer is not None, "something was written"
        # A timeout around `drain` would cancel the future that aiohttp gives to all that drain this connection.
        draining = self._loop.create_task(self._writer.drain())
        try:
            while True:
                left = unsent_bytes(self._request.transport)
                await asyncio.wait((draining,), timeout=self._reader_timeout_s)
                if draining.done():
                    draining.result()
                    return
                if unsent_bytes(self._request.transport) >= left:
                    break
        finally:
            draining.cancel()
        self._has_stalled = True
        raise DeadlineExceeded(
            f"the client took nothing of its stream for {self._reader_timeout_s:g} s; read faster, or raise"
            " frontend.reader_timeout_s"
        )

    def _has_head(self) -> bool:
        """Make the head when the first bytes are due; False while aiohttp has yet to send its own."""
        if not self._is_decided:
            self._is_decided = True
            self._head = self._heads.of(self._request, _LINES, self._name)
            if self._head is None:
                self.headers.update(_HEADERS)
        return self._head is not None or self._writer is not None

    async def _begin(self) -> None:
        async with self._beginning:  # the first token and a comment may race
            if self._writer is None:
                transport = self._request.transport
                if transport is not None:
                    transport.set_write_buffer_limits(high=self._write_buffer_bytes)
                writer = await self.prepare(self._request)
                if writer is None:
                    raise ConnectionResetError("the client is gone")
                writer.send_headers()
                self._is_chunked = "Transfer-Encoding" in self.headers
                self._writer = writer

    def _on_silence(self) -> None:
        """Send a comment if the stream was silent long enough, and schedule the next check."""
        now_s = self._loop.time()
        sent_s = max([self._sent_s, *(stream.sent_s for stream in self._direct)])
        silent_s = now_s - sent_s if self._writer is not None else self._stream.heartbeat_s
        if silent_s >= self._stream.heartbeat_s and (self._beat is None or self._beat.done()):
            self._beat = self._loop.create_task(self._send_comment())
            silent_s = 0.0
        rest_s = max(self._stream.heartbeat_s - silent_s, _RESOLUTION_S)
        self._timer = self._loop.call_later(rest_s, self._on_silence)

    async def _send_comment(self) -> None:
        transport = self._request.transport
        if transport is None or transport.get_write_buffer_size() > 0:
            return  # disconnected, or has unread bytes: a comment is of no use
        with contextlib.suppress(ConnectionError):  # the sender of events raises it too
            if not self._has_head():
                await self._begin()
            self._put(_HEARTBEAT)


_GENERATING = {
    "/v1/chat/completions": CHAT,
    "/v1/completions": COMPLETIONS,
    "/v1/responses": RESPONSES,
    "/v1/messages": MESSAGES,
}


class GenerationRoutes:
    """Handlers of one `Frontend`'s APIs."""

    def __init__(self, frontend: Frontend, tenant: Callable[[], Tenant], heads: AnswerHeads) -> None:
        """Make the handlers; `tenant` gives the tenant of the request being handled, `heads` makes HTTP heads of answers."""
        self._heads = heads
        self._frontend = frontend
        self._config = frontend.config
        self._tenant = tenant

    def routes(self) -> list[web.RouteDef]:
        return [
            *(web.post(path, partial(self._generate, dialect)) for path, dialect in _GENERATING.items()),
            web.get("/v1/responses/{id}", self._show_response),
            web.delete("/v1/responses/{id}", self._delete_response),
            web.post("/v1/messages/count_tokens", self._count_tokens),
            web.post("/v1/embeddings", self._embed),
            web.post("/tokenize", self._tokenize),
            web.post("/detokenize", self._detokenize),
        ]

    async def _generate(self, dialect: ApiDialect, request: web.Request) -> web.StreamResponse:
        response: SseResponse | None = None
        try:
            with self._frontend.arrive() as slot, slot.limit():
                pending = await self._prepare(request, slot, dialect)
                if not pending.stream:
                    answer = pending.whole_answer()
                    await pending.completion.run(answer.take, gathers=True)
                    return self._heads.whole(request, await pending.body(answer))
                response = SseResponse(request, pending, self._config, self._heads)
                with response.kept_alive():
                    await pending.completion.run(response.take, writer=response)
                await response.finish()
        except ConnectionError:
            raise
        except Exception as error:
            if response is None or not response.prepared:
                raise  # nothing was sent yet: the error gets its HTTP status
            await response.fail(error if isinstance(error, PenstockError) else unexpected(request))
        return response

    async def _show_response(self, request: web.Request) -> web.Response:
        if request.query.get("stream") in {"true", "1"}:
            raise RequestError("a kept answer is given whole; leave it out", field="stream")
        options = read_options(request.headers, self._config, self._tenant())
        kept = self._frontend.response(options.tenant, request.match_info["id"])
        return json_response(kept.response)

    async def _delete_response(self, request: web.Request) -> web.Response:
        response_id = request.match_info["id"]
        options = read_options(request.headers, self._config, self._tenant())
        self._frontend.forget_response(options.tenant, response_id)
        return json_response(encode_json(DeletedResponse(id=response_id)))

    async def _prepare(self, request: web.Request, slot: RequestSlot, dialect: ApiDialect) -> PendingAnswer:
        """Receive and prepare a request; it counts as in flight once its body is complete."""
        frontend = self._frontend
        with frontend.budget.hold(slot.end) as received:
            frontend.region_links.forwarded(request.headers)
            options = read_options(request.headers, self._config, self._tenant())
            traced = TracedRequest.begin(request.path, options, frontend.dispatcher)
            if traced is not None:
                traced_request.set(traced)
                options = traced.carried(options)
            body = await frontend.bodies.read(request, received)
            frontend.admit(slot, self._tenant())
            pending = await frontend.generate(body, slot, options, dialect)
        if (line := line_of_request.get()) is not None:
            line.generates(pending, options)
        if traced is not None:
            traced.pending = pending
        return pending

    async def _embed(self, request: web.Request) -> web.Response:
        with self._frontend.arrive() as slot:
            body, options = await self._receive(request, slot)
            with slot.limit():
                pending = await self._frontend.embed(body, slot, options)
                if (line := line_of_request.get()) is not None:
                    line.generates(pending, options)
                await pending.completion.run()
                return json_response(await pending.completion.body())

    async def _count_tokens(self, request: web.Request) -> web.Response:
        tokens, _ = await self._tokens(request, COUNT_TOKENS)
        return json_response(encode_json({"input_tokens": len(tokens)}))

    async def _tokenize(self, request: web.Request) -> web.Response:
        tokens, context_length = await self._tokens(request, TOKENIZE)
        return json_response(encode_json(Tokenized(len(tokens), context_length, tokens)))

    async def _tokens(self, request: web.Request, dialect: ApiDialect) -> tuple[list[int], int]:
        """Give the tokens of a body's prompt, and the model's context length."""
        frontend = self._frontend
        with frontend.arrive() as slot:
            body, options = await self._receive(request, slot)
            with slot.limit():
                tokens, model = await frontend.tokenize(body, slot, options, dialect)
            return tokens, model.card.context_length

    async def _detokenize(self, request: web.Request) -> web.Response:
        with self._frontend.arrive() as slot:
            body, _ = await self._receive(request, slot)
            with slot.limit():
                return json_response(encode_json(Detokenized(await self._frontend.detokenize(body))))

    async def _receive(
        self, request: web.Request, slot: RequestSlot
    ) -> tuple[Sequence[bytes], RequestOptions]:
        options = read_options(request.headers, self._config, self._tenant())
        with self._frontend.budget.hold(slot.end) as received:
            with slot.limit():
                body = await self._frontend.bodies.read(request, received)
            self._frontend.admit(slot, self._tenant())
        return body, options
