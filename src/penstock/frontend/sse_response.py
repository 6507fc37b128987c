"""A stream of server-sent events over HTTP, no faster than its client reads."""

from aiohttp import web
from aiohttp.abc import AbstractStreamWriter

from penstock.core.errors import PenstockError
from penstock.frontend.completion import TextEvent
from penstock.frontend.frontend import Answering
from penstock.frontend.sse import DONE, error_event


class SseResponse(web.StreamResponse):
    """Sends events as they come. Headers go out with the first one, so that an early error has its own status."""

    def __init__(self, request: web.Request, answering: Answering, write_buffer_bytes: int) -> None:
        super().__init__(
            headers={
                "Content-Type": "text/event-stream; charset=utf-8",
                "Cache-Control": "no-cache",
                "X-Accel-Buffering": "no",
            }
        )
        self.outcome = 200
        """The status it would have had if its end had been known at its start."""
        self._request = request
        self._answering = answering
        self._encoder = answering.event_stream()
        self._writer: AbstractStreamWriter | None = None
        self._write_buffer_bytes = write_buffer_bytes

    async def take(self, event: TextEvent) -> None:
        await self._send(self._encoder.event(event))

    async def finish(self) -> None:
        end = DONE
        if self._answering.include_usage:
            end = self._encoder.usage(self._answering.completion.usage()) + DONE
        await self._send(end)

    async def fail(self, error: PenstockError) -> None:
        """End with an error; a client that has not read what was sent before would not read it and is cut off."""
        self.outcome = error.http_status
        transport = self._request.transport
        if transport is not None and transport.get_write_buffer_size() > self._write_buffer_bytes:
            transport.abort()
        elif self._writer is not None:
            await self._writer.write(error_event(error))  # not waiting for a client that may not read

    async def _send(self, chunk: bytes) -> None:
        """Write, and wait while the client has not read enough of what was written before."""
        writer = self._writer
        if writer is None:
            writer = self._writer = await self._begin()
        await writer.write(chunk)
        await writer.drain()

    async def _begin(self) -> AbstractStreamWriter:
        transport = self._request.transport
        if transport is not None:
            transport.set_write_buffer_limits(high=self._write_buffer_bytes)
        writer = await self.prepare(self._request)
        if writer is None:
            raise ConnectionResetError("the client is gone")
        return writer
