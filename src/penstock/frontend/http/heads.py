"""Heads of models' answers, made of constant lines, and whole answers, whose head and body are one write.

aiohttp makes each head as a mapping, with hooks and cookies. That takes a tenth of the time of a request.
"""

from collections.abc import Callable
from email.utils import formatdate

from aiohttp import HttpVersion11, web
from aiohttp.http import SERVER_SOFTWARE

from penstock.core.clock import wall_time_s
from penstock.frontend.http.replies import json_response, request_id


class Heads:
    """Makes the heads of answers with status 200 on connections that stay open. One event loop owns it."""

    def __init__(self, *, has_cors: bool, is_draining: Callable[[], bool]) -> None:
        """Args: has_cors: some answers have headers for browsers. is_draining: connections are closed after their answers."""
        self._has_cors = has_cors
        self._is_draining = is_draining
        self._second = 0
        self._date = ""

    def of(self, request: web.Request, lines: str, name: str) -> bytes | None:
        """Make a head.

        Args:
            request: that it answers.
            lines: about the content, each with its CRLF.
            name: the request's id.

        Returns:
            None where the head has more than the usual lines: aiohttp makes it.
        """
        is_usual = request.version == HttpVersion11 and request.keep_alive and not self._has_cors
        if not is_usual or self._is_draining():
            return None
        second = int(wall_time_s())
        if second != self._second:
            self._second, self._date = second, formatdate(second, usegmt=True)
        return (
            f"HTTP/1.1 200 OK\r\n{lines}X-Request-Id: {name}\r\nDate: {self._date}\r\n"
            f"Server: {SERVER_SOFTWARE}\r\n\r\n"
        ).encode()

    def whole(self, request: web.Request, body: bytes) -> web.StreamResponse:
        """Make the response of encoded JSON."""
        lines = f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n"
        head = self.of(request, lines, request_id.get())
        return json_response(body) if head is None else WholeResponse(request, head + body)


class WholeResponse(web.StreamResponse):
    """A head and a body to a connection that stays open."""

    def __init__(self, request: web.Request, content: bytes) -> None:
        super().__init__()
        self._request = request
        self._content = content

    @property
    def keep_alive(self) -> bool:
        return True

    async def prepare(self, request: web.BaseRequest) -> None:
        """Send nothing yet; the head goes with the body."""

    async def write_eof(self, data: bytes = b"") -> None:
        """Send head and body; wait while the client has left more unread than the transport's high-water mark.

        The connection answers its next request only then. One whose client reads nothing for `reader_timeout_s` is ended by
        `Connection`.

        Raises:
            ConnectionResetError: the client is gone.
        """
        del data
        transport = self._request.transport
        if transport is None or transport.is_closing():
            raise ConnectionResetError("the client is gone")
        transport.write(self._content)
        await self._request.writer.drain()
