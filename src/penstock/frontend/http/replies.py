"""Responses that several routes make: JSON, heads of constant lines, and what pages of other origins may read."""

from collections.abc import Callable
from contextvars import ContextVar
from email.utils import formatdate

from aiohttp import HttpVersion11, web
from aiohttp.http import SERVER_SOFTWARE

from penstock.core.clock import wall_time_s
from penstock.core.errors import PenstockError
from penstock.core.log import get_logger

request_id: ContextVar[str] = ContextVar("request_id")
"""Of the request being handled; aiohttp runs each in its own context."""
_log = get_logger()


def json_response(body: bytes, status: int = 200) -> web.Response:
    """Make a response of encoded JSON."""
    return web.Response(body=body, status=status, content_type="application/json")


def unexpected(request: web.Request) -> PenstockError:
    """Log the exception being handled, and give the client an error without its details."""
    _log.exception("request_failed", path=request.path, request_id=request_id.get(""))
    return PenstockError("the server failed on this request; its log says more")


_MAX_AGE_S = 600
_EXPOSED = "X-Request-Id, Retry-After"


class Cors:
    """Allows pages of some origins to call the API. Immutable."""

    def __init__(self, origins: tuple[str, ...]) -> None:
        """Args: origins: such as `https://chat.example.com`; `*` is any. Empty: none."""
        self._origins = frozenset(origins)
        self.is_on = bool(origins)

    def options(self, request: web.Request) -> web.Response | None:
        """Answer OPTIONS, a browser's preflight included; None for a path that does not exist."""
        error = request.match_info.http_exception
        if isinstance(error, web.HTTPMethodNotAllowed):
            methods = ", ".join(sorted({*error.allowed_methods, "OPTIONS"}))
        elif error is None:
            methods = "OPTIONS"
        else:
            return None
        response = web.Response(status=204, headers={"Allow": methods})
        if self._allows(request):
            asked = request.headers.get("Access-Control-Request-Headers", "")
            response.headers["Access-Control-Allow-Methods"] = methods
            response.headers["Access-Control-Allow-Headers"] = asked or "Authorization, Content-Type"
            response.headers["Access-Control-Max-Age"] = str(_MAX_AGE_S)
        return response

    def mark(self, request: web.Request, response: web.StreamResponse) -> None:
        """Tell a browser that the page may read the response."""
        if not self.is_on or "Origin" not in request.headers:
            return
        response.headers["Vary"] = "Origin"
        if self._allows(request):
            response.headers["Access-Control-Allow-Origin"] = request.headers["Origin"]
            response.headers["Access-Control-Expose-Headers"] = _EXPOSED

    def _allows(self, request: web.Request) -> bool:
        origin = request.headers.get("Origin")
        is_allowed = "*" in self._origins or origin in self._origins
        return origin is not None and not is_operators(request) and is_allowed


def is_operators(request: web.BaseRequest) -> bool:
    """Tell whether a request is for those who run the server; no page of another site may send it."""
    return request.path.startswith(("/admin", "/watch"))


class AnswerHeads:
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
        return json_response(body) if head is None else WholeHttpResponse(request, head + body)


class WholeHttpResponse(web.StreamResponse):
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
