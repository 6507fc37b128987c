"""Responses that several routes make."""

from contextvars import ContextVar

from aiohttp import web

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
