"""A stream of server-sent events with backpressure from its client."""

import asyncio
import contextlib
from collections.abc import Iterator

from aiohttp import web
from aiohttp.abc import AbstractStreamWriter

from penstock.core.errors import DeadlineExceeded, PenstockError
from penstock.core.net.unsent import unsent_bytes
from penstock.frontend.config import FrontendConfig
from penstock.frontend.frontend import PendingAnswer
from penstock.frontend.text.events import TextEvent

_HEARTBEAT = b": heartbeat\n\n"  # a comment of the SSE standard
_RESOLUTION_S = 0.001


class SseResponse(web.StreamResponse):
    """Sends events as they come.

    Headers go out with the first event, so that an early error has its HTTP status; `headers_after_s` without an event
    sends them too. A stream silent for `heartbeat_s` gets a comment.
    """

    def __init__(self, request: web.Request, pending: PendingAnswer, config: FrontendConfig) -> None:
        """Create the response; sends nothing yet.

        Args:
            request: the HTTP request to answer.
            pending: the completion and its format.
            config: gives the write buffer, the reader timeout and the keep-alive.
        """
        super().__init__(
            headers={
                "Content-Type": "text/event-stream; charset=utf-8",
                "Cache-Control": "no-cache",
                "X-Accel-Buffering": "no",
            }
        )
        self.outcome = 200
        """HTTP status for metrics: that of the error that ended the stream, else 200."""
        self._request = request
        self._pending = pending
        self._encoder = pending.event_stream()
        self._writer: AbstractStreamWriter | None = None
        self._write_buffer_bytes = config.write_buffer_bytes
        self._reader_timeout_s = config.reader_timeout_s
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

    async def take(self, event: TextEvent) -> None:
        await self._send(self._encoder.event(event))

    async def finish(self) -> None:
        await self._send(self._encoder.end(self._pending.completion.usage()))

    async def fail(self, error: PenstockError) -> None:
        """End the stream with an error event; a client with unread bytes is disconnected instead."""
        self.outcome = error.http_status
        transport = self._request.transport
        if transport is not None and (
            self._has_stalled or transport.get_write_buffer_size() > self._write_buffer_bytes
        ):
            transport.abort()
        elif self._writer is not None:
            await self._writer.write(self._encoder.failure(error))  # no drain: the client may not read

    async def _send(self, chunk: bytes) -> None:
        """Write, then wait until the client has read enough of earlier bytes."""
        writer = self._writer or await self._begin()
        self._sent_s = self._loop.time()
        await writer.write(chunk)
        await self._drain(writer)

    async def _drain(self, writer: AbstractStreamWriter) -> None:
        """Wait until the write buffer has room, as long as the client reads.

        Raises:
            DeadlineExceeded: the client read nothing for `reader_timeout_s`.
        """
        transport = self._request.transport
        if transport is not None and transport.get_write_buffer_size() <= self._write_buffer_bytes:
            return None  # the usual case: a timeout and a system call per token cost more than the write
        # A timeout around `drain` would cancel the future that aiohttp gives to all that drain this connection.
        draining = self._loop.create_task(writer.drain())
        try:
            while True:
                left = unsent_bytes(self._request.transport)
                await asyncio.wait((draining,), timeout=self._reader_timeout_s)
                if draining.done():
                    return draining.result()
                if unsent_bytes(self._request.transport) >= left:
                    break
        finally:
            draining.cancel()
        self._has_stalled = True
        raise DeadlineExceeded(
            f"the client took nothing of its stream for {self._reader_timeout_s:g} s; read faster, or raise"
            " frontend.reader_timeout_s"
        )

    async def _begin(self) -> AbstractStreamWriter:
        async with self._beginning:  # the first token and a comment may race
            if self._writer is None:
                transport = self._request.transport
                if transport is not None:
                    transport.set_write_buffer_limits(high=self._write_buffer_bytes)
                self._writer = await self.prepare(self._request)
                if self._writer is None:
                    raise ConnectionResetError("the client is gone")
            return self._writer

    def _on_silence(self) -> None:
        """Send a comment if the stream was silent long enough, and schedule the next check."""
        now_s = self._loop.time()
        silent_s = now_s - self._sent_s if self._writer is not None else self._stream.heartbeat_s
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
            writer = self._writer or await self._begin()
            self._sent_s = self._loop.time()
            await writer.write(_HEARTBEAT)
