"""A stream of server-sent events over HTTP, no faster than its client reads."""

import asyncio
import contextlib
import fcntl
import sys
import termios

from aiohttp import web
from aiohttp.abc import AbstractStreamWriter

from penstock.core.errors import DeadlineExceeded, PenstockError
from penstock.frontend.completion import TextEvent
from penstock.frontend.frontend import Answering
from penstock.frontend.sse import DONE, error_event

_INT_BYTES = 4


class SseResponse(web.StreamResponse):
    """Sends events as they come. Headers go out with the first one, so that an early error has its own status."""

    def __init__(
        self,
        request: web.Request,
        answering: Answering,
        *,
        write_buffer_bytes: int,
        reader_timeout_s: float,
    ) -> None:
        """Send nothing yet.

        Args:
            request: whose answer it is.
            answering: what comes.
            write_buffer_bytes: with more than this to be written, the next event waits.
            reader_timeout_s: a client that takes no byte for so long while one waits is cut off.
        """
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
        self._reader_timeout_s = reader_timeout_s
        self._has_stalled = False

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
        if transport is not None and (
            self._has_stalled or transport.get_write_buffer_size() > self._write_buffer_bytes
        ):
            transport.abort()
        elif self._writer is not None:
            await self._writer.write(error_event(error))  # not waiting for a client that may not read

    async def _send(self, chunk: bytes) -> None:
        """Write, and wait while the client has not read enough of what was written before."""
        writer = self._writer
        if writer is None:
            writer = self._writer = await self._begin()
        await writer.write(chunk)
        await self._drain(writer)

    async def _drain(self, writer: AbstractStreamWriter) -> None:
        """Wait until there is room again, for as long as the client takes something.

        Raises:
            DeadlineExceeded: it took nothing for too long.
        """
        while True:
            left = self._unsent_bytes()
            try:
                async with asyncio.timeout(self._reader_timeout_s):
                    return await writer.drain()
            except TimeoutError:
                if self._unsent_bytes() < left:
                    continue
            self._has_stalled = True
            raise DeadlineExceeded(
                f"the client took nothing of its stream for {self._reader_timeout_s:g} s; read faster, or raise"
                " frontend.reader_timeout_s"
            )

    def _unsent_bytes(self) -> int:
        """Count what the client's side has not taken, in this process and in the kernel, which takes more only in large parts."""
        transport = self._request.transport
        if transport is None:
            return 0
        sock = transport.get_extra_info("socket")
        in_kernel = bytearray(_INT_BYTES)
        with contextlib.suppress(OSError):  # it is gone
            fcntl.ioctl(sock.fileno(), termios.TIOCOUTQ, in_kernel)
        return transport.get_write_buffer_size() + int.from_bytes(in_kernel, sys.byteorder)

    async def _begin(self) -> AbstractStreamWriter:
        transport = self._request.transport
        if transport is not None:
            transport.set_write_buffer_limits(high=self._write_buffer_bytes)
        writer = await self.prepare(self._request)
        if writer is None:
            raise ConnectionResetError("the client is gone")
        return writer
