"""HTTP routes, headers and status codes.

The logic is elsewhere: `Frontend` prepares requests, `Completion` runs them. A client that disconnects cancels
its handler, which cancels the request on its workers, at any stage.
"""

import math
import os
from collections.abc import Awaitable, Callable
from contextvars import ContextVar
from http import HTTPStatus
from typing import TypeVar

import msgspec
from aiohttp import HttpVersion11, web

from penstock.core.config import closest
from penstock.core.errors import PenstockError, RequestError
from penstock.core.log import get_logger
from penstock.core.types.instances import Role
from penstock.frontend.anthropic.events import error_body
from penstock.frontend.errors import (
    MethodError,
    ReceiveTimeoutError,
    UnknownPathError,
    error_answer,
)
from penstock.frontend.frontend import Frontend
from penstock.frontend.http.access_log import AccessLog, Line, line_of_request
from penstock.frontend.http.batches.routes import BatchRoutes
from penstock.frontend.http.connection import Connection
from penstock.frontend.http.cors import Cors, is_operators
from penstock.frontend.http.generation_routes import GenerationRoutes
from penstock.frontend.http.heads import Heads
from penstock.frontend.http.info_routes import InfoRoutes
from penstock.frontend.http.kv_routes import KvRoutes
from penstock.frontend.http.replies import json_response, request_id, unexpected
from penstock.frontend.http.sse_response import SseResponse
from penstock.frontend.limits.own_names import OwnNames
from penstock.frontend.limits.trace_context import sound_request_id
from penstock.frontend.openai.answers import encode
from penstock.frontend.openai.body_error import body_error, check_levels
from penstock.frontend.openai.explaining import explain_latest, explain_one
from penstock.frontend.tenants.tenants import ANONYMOUS, Tenant
from penstock.frontend.tracing import traced_request
from penstock.frontend.watch.overview import Supervisor
from penstock.frontend.watch.watch_routes import WatchRoutes

_REQUEST_ID = "X-Request-Id"
_OPEN = frozenset(
    {
        "/",
        "/page/{file}",
        "/health",
        "/live",
        "/ping",
        "/version",
        "/metrics",
        "/openapi.json",
        "/docs",
        "unknown",
    }
)
"""Routes that need no API key."""
_CLIENT_GONE = 499  # nginx's code for a client that disconnected early
_REASON_CHARACTERS_MAX = 300

_tenant: ContextVar[Tenant] = ContextVar("tenant", default=ANONYMOUS)
_log = get_logger()

_Wish = TypeVar("_Wish", bound=msgspec.Struct)
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class HttpSurface:
    """Route handlers of one `Frontend`."""

    def __init__(self, frontend: Frontend, supervisor: Supervisor | None = None) -> None:
        self._frontend = frontend
        self._config = frontend.config
        config = frontend.config
        self._cors = Cors(config.cors_origins)
        self._own_names = OwnNames(
            config.host,
            config.hosts,
            setting="frontend.hosts",
            origins=config.cors_origins,
            pages="frontend.cors_origins",
        )
        self._access_log = AccessLog.of(frontend.config.access_log)
        self.draining = False
        """True: close each connection after its answer."""
        self._watch = WatchRoutes(frontend, supervisor, lambda: self.draining)

    def app(self) -> web.Application:
        app = web.Application(middlewares=[self._frame], client_max_size=0)
        app.on_response_prepare.append(self._add_headers)
        heads = Heads(has_cors=self._cors.is_on, is_draining=lambda: self.draining)
        app.add_routes(
            [
                *GenerationRoutes(self._frontend, _tenant.get, heads).routes(),
                *InfoRoutes(self._frontend, _tenant.get, lambda: self.draining).routes(),
                web.get("/admin/workers", self._workers),
                web.post("/admin/workers/{name}/role", self._change_role),
                web.post("/admin/workers/{name}/sleep", self._sleep),
                web.post("/admin/workers/{name}/wake", self._wake_up),
                web.get("/admin/explain", self._explain_latest),
                web.get("/admin/explain/{id}", self._explain_one),
                *BatchRoutes(self._frontend, _tenant.get).routes(),
                *KvRoutes(self._frontend, self._wish).routes(),
                *self._watch.routes(),
            ]
        )
        return app

    @web.middleware
    async def _frame(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Give every response an id, convert errors to the API's JSON, and count responses."""
        if isinstance(request.protocol, Connection):
            request.protocol.request_began()
        request_id.set(sound_request_id(request.headers) or self._frontend.new_id())
        resource = request.match_info.route.resource
        route = resource.canonical if resource is not None else "unknown"
        code = _CLIENT_GONE
        if self._access_log is not None:
            line_of_request.set(Line.of(request, request_id.get()))
        try:
            response = await self._answer(request, handler, route)
            code = response.outcome if isinstance(response, SseResponse) else response.status
        finally:
            self._frontend.metrics.answered(route, code)
            if (traced := traced_request.get()) is not None:
                traced_request.set(None)
                traced.end(route, code)
            if self._access_log is not None and (line := line_of_request.get()) is not None:
                self._access_log.write(line, code)
        return response

    async def _answer(self, request: web.Request, handler: Handler, route: str) -> web.StreamResponse:
        try:
            self._own_names.check(request, for_pages=not is_operators(request))
            if request.method == "OPTIONS" and (options := self._cors.options(request)) is not None:
                return options
            if route.startswith("/admin/"):
                self._frontend.access.check_admin(request.headers)
            elif route.startswith("/watch/"):
                self._watch.check(request)
            elif route not in _OPEN:
                tenant = self._frontend.tenant_of(request.headers)
                _tenant.set(tenant)
                if (line := line_of_request.get()) is not None:
                    line.tenant = tenant.name
            return await handler(request)
        except PenstockError as error:
            if isinstance(error, ReceiveTimeoutError):
                self._frontend.metrics.refused_body("body_late")
            return error_response(error, path=request.path)
        except web.HTTPException as error:
            return error_response(_translate(error, request), error.headers.get("Allow"), path=request.path)
        except web.RequestPayloadError as error:
            return error_response(payload_refusal(error), path=request.path)
        except ConnectionError:  # the client disconnected
            raise
        except Exception:  # noqa: BLE001 - the last handler of a request's errors
            return error_response(unexpected(request), path=request.path)

    def refuse(self, error: BaseException | None, status: int) -> web.Response:
        """Make the response to bytes that are not HTTP, or to headers that are too large."""
        refusal = garbage_refusal(error, status)
        response = error_response(refusal)
        response.headers[_REQUEST_ID] = self._refused(refusal)
        response.force_close()
        return response

    def refuse_raw(self, error: PenstockError) -> bytes:
        """Encode a whole error response, for a connection without a request."""
        if isinstance(error, ReceiveTimeoutError):
            self._frontend.metrics.refused_body("headers_late")
        return raw_error(error, f"{_REQUEST_ID}: {self._refused(error)}\r\n")

    def _refused(self, error: PenstockError) -> str:
        """Count what never became a request, and give it an id."""
        self._frontend.metrics.answered("unknown", error.http_status)
        new_id = self._frontend.new_id()
        if self._access_log is not None:
            self._access_log.write(Line.nameless(new_id), error.http_status)
        return new_id

    def close(self) -> None:
        """Close the access log. Safe twice."""
        if self._access_log is not None:
            self._access_log.close()

    async def _add_headers(self, request: web.Request, response: web.StreamResponse) -> None:
        # aiohttp rejects an unknown `Expect` before `_frame` runs: that response has no id yet.
        response.headers[_REQUEST_ID] = request_id.get("") or self._frontend.new_id()
        if self._cors.is_on:
            self._cors.mark(request, response)
        has_no_end = request.version < HttpVersion11 and response.content_length is None
        if self.draining or has_no_end:  # without chunks only the end of the connection ends an answer
            response.force_close()

    async def _explain_latest(self, request: web.Request) -> web.Response:
        return json_response(encode(explain_latest(self._frontend.dispatcher, request)))

    async def _explain_one(self, request: web.Request) -> web.Response:
        return json_response(encode(explain_one(self._frontend.dispatcher, request)))

    async def _workers(self, _: web.Request) -> web.Response:
        return json_response(encode({"pid": os.getpid(), "workers": self._frontend.dispatcher.workers()}))

    async def _change_role(self, request: web.Request) -> web.Response:
        wish = await self._wish(request, _RoleBody)
        dispatcher = self._frontend.dispatcher
        return json_response(encode(await dispatcher.change_role(request.match_info["name"], wish.role)))

    async def _sleep(self, request: web.Request) -> web.Response:
        wish = await self._wish(request, _SleepBody)
        dispatcher = self._frontend.dispatcher
        return json_response(encode(await dispatcher.sleep(request.match_info["name"], wish.level)))

    async def _wake_up(self, request: web.Request) -> web.Response:
        await self._wish(request, _WakeBody)
        return json_response(encode(await self._frontend.dispatcher.wake_up(request.match_info["name"])))

    async def _wish(self, request: web.Request, kind: type[_Wish]) -> _Wish:
        """Read the body of an admin's request; an empty one has all defaults."""
        if (
            request.content_type != "application/json"
        ):  # so that browsers ask (CORS preflight) before another site's page may send it
            raise RequestError(
                f"Content-Type: must be application/json, got {request.content_type}", http_status=415
            )
        frontend = self._frontend
        with frontend.arrive() as slot, frontend.budget.hold(slot.end) as received, slot.limit():
            body = b"".join(await frontend.bodies.read(request, received))
        try:
            check_levels(body)
            return msgspec.json.decode(body or b"{}", type=kind)
        except (ValueError, RecursionError) as error:
            raise body_error(error, body, kind) from error


class _RoleBody(msgspec.Struct, forbid_unknown_fields=True):
    role: Role


class _SleepBody(msgspec.Struct, forbid_unknown_fields=True):
    level: int = 1


class _WakeBody(msgspec.Struct, forbid_unknown_fields=True):
    pass


def _translate(error: web.HTTPException, request: web.Request) -> PenstockError:
    """Convert an error of aiohttp to one of the API."""
    if isinstance(error, web.HTTPMethodNotAllowed):
        return MethodError(
            f"{request.method} is not allowed on {request.path}; use {', '.join(sorted(error.allowed_methods))}"
        )
    if isinstance(error, web.HTTPNotFound):
        paths = {resource.canonical for resource in request.app.router.resources()}
        close = closest(request.path, [path for path in paths if path.startswith("/v1/") and "{" not in path])
        hint = "GET /docs lists the paths" if close is None else f"did you mean {close!r}?"
        return UnknownPathError(f"{request.path} does not exist; {hint}")
    return RequestError(f"{error.status}: {error.reason}", http_status=error.status)


def _reason(error: BaseException) -> str:
    """Shorten aiohttp's error to one line."""
    text = " ".join(str(getattr(error, "message", error)).split()).removeprefix("400, message: ")
    return text if len(text) <= _REASON_CHARACTERS_MAX else f"{text[:_REASON_CHARACTERS_MAX]}..."


def garbage_refusal(error: BaseException | None, status: int) -> PenstockError:
    """Convert aiohttp's error about bytes that are no valid request."""
    if status >= HTTPStatus.INTERNAL_SERVER_ERROR or error is None:
        return PenstockError("the server failed on this request; its log says more")
    return RequestError(f"not a valid HTTP request: {_reason(error)}", http_status=status)


def payload_refusal(error: web.RequestPayloadError) -> PenstockError:
    """Convert aiohttp's error about how a body was sent."""
    return RequestError(f"the body cannot be read: {_reason(error)}")


def raw_error(error: PenstockError, header_lines: str = "") -> bytes:
    """Encode an error as a whole HTTP response that closes its connection; each of `header_lines` ends with CRLF."""
    body = encode(error_answer(error))
    head = (
        f"HTTP/1.1 {error.http_status} {HTTPStatus(error.http_status).phrase}\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n"
        f"{header_lines}Connection: close\r\n"
    )
    if error.retry_after_s is not None:
        head += f"Retry-After: {math.ceil(error.retry_after_s)}\r\n"
    return f"{head}\r\n".encode() + body


def error_response(error: PenstockError, allow: str | None = None, path: str = "") -> web.Response:
    """Make an error response in the shape of a path's API; `allow` lists the methods after a wrong method."""
    is_anthropic = path == "/v1/messages" or path.startswith("/v1/messages/")
    body: object = error_body(error) if is_anthropic else error_answer(error)
    response = json_response(encode(body), error.http_status)
    if error.retry_after_s is not None:
        response.headers["Retry-After"] = str(math.ceil(error.retry_after_s))
    if error.http_status == HTTPStatus.UNAUTHORIZED:
        response.headers["WWW-Authenticate"] = "Bearer"
    if allow is not None:
        response.headers["Allow"] = allow
    return response
