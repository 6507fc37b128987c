"""HTTP routes, headers and status codes of a frontend process, and its listening socket. A client that disconnects cancels its handler, which cancels the request on its workers, at any stage."""

import asyncio
import logging
import math
import socket
import ssl
from collections.abc import Awaitable, Callable
from contextvars import ContextVar
from http import HTTPStatus
from pathlib import Path

from aiohttp import HttpVersion11, web

from penstock.core.certificates import CertificateFiles, handshake_in_memory, load_pair
from penstock.core.config import closest
from penstock.core.errors import ConfigError, PenstockError, RequestError
from penstock.core.json_text import encode_json
from penstock.core.listening import Listener
from penstock.core.log import get_logger
from penstock.frontend.apis.messages_answer import error_body
from penstock.frontend.batch_run import BatchRunner
from penstock.frontend.config import FrontendConfig, ServerTlsConfig
from penstock.frontend.errors import MethodError, ReceiveTimeoutError, UnknownPathError, error_answer
from penstock.frontend.frontend import Frontend
from penstock.frontend.http.admin import AdminRoutes
from penstock.frontend.http.batch_routes import BatchRoutes
from penstock.frontend.http.connection import ClientConnection
from penstock.frontend.http.generation import GenerationRoutes, SseResponse
from penstock.frontend.http.info import InfoRoutes
from penstock.frontend.http.replies import (
    AnswerHeads,
    Cors,
    is_operators,
    json_response,
    request_id,
    unexpected,
)
from penstock.frontend.http.request_log import AccessLine, AccessLog, line_of_request, traced_request
from penstock.frontend.limits.headers import OwnNames, sound_request_id
from penstock.frontend.limits.tenants import ANONYMOUS, Tenant
from penstock.frontend.watch.overview import DeploymentSupervisor
from penstock.frontend.watch.routes import WatchRoutes

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

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class HttpSurface:
    """Route handlers of one `Frontend`."""

    def __init__(self, frontend: Frontend, supervisor: DeploymentSupervisor | None = None) -> None:
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
        heads = AnswerHeads(has_cors=self._cors.is_on, is_draining=lambda: self.draining)
        app.add_routes(
            [
                *GenerationRoutes(self._frontend, _tenant.get, heads).routes(),
                *InfoRoutes(self._frontend, _tenant.get, lambda: self.draining).routes(),
                *BatchRoutes(self._frontend, _tenant.get).routes(),
                *AdminRoutes(self._frontend).routes(),
                *self._watch.routes(),
            ]
        )
        return app

    @web.middleware
    async def _frame(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Give every response an id, convert errors to the API's JSON, and count responses."""
        if isinstance(request.protocol, ClientConnection):
            request.protocol.request_began()
        request_id.set(sound_request_id(request.headers) or self._frontend.new_id())
        resource = request.match_info.route.resource
        route = resource.canonical if resource is not None else "unknown"
        code = _CLIENT_GONE
        if self._access_log is not None:
            line_of_request.set(AccessLine.of(request, request_id.get()))
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
            self._access_log.write(AccessLine.nameless(new_id), error.http_status)
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
    body = encode_json(error_answer(error))
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
    response = json_response(encode_json(body), error.http_status)
    if error.retry_after_s is not None:
        response.headers["Retry-After"] = str(math.ceil(error.retry_after_s))
    if error.http_status == HTTPStatus.UNAUTHORIZED:
        response.headers["WWW-Authenticate"] = "Bearer"
    if allow is not None:
        response.headers["Allow"] = allow
    return response


_EXPIRED = 10  # X509_V_ERR_CERT_HAS_EXPIRED of OpenSSL


class ServerTls(CertificateFiles):
    """The certificate of a port. One event loop owns it."""

    def __init__(self, config: ServerTlsConfig) -> None:
        """Read certificate and key.

        Raises:
            ConfigError: a file cannot be read, or they do not belong together.
        """
        self._config = config
        self.context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        """For new connections; those that are open keep the certificate that they began with."""
        self.context.minimum_version = ssl.TLSVersion.TLSv1_2
        self.context.set_alpn_protocols(["http/1.1"])
        super().__init__(config.certificate, config.key)

    def _load(self) -> None:
        # A pair that does not fit would leave the port's context without a key, so another one has it first.
        for context in (ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), self.context):
            load_pair(context, self._config.certificate, self._config.key, place="frontend.tls")
        if _has_expired(self.context, self._config.certificate):
            _log.error(
                "certificate_expired",
                file=self._config.certificate,
                fix="clients refuse it: renew the files; they are read again within 2 s",
            )


def _has_expired(context: ssl.SSLContext, certificate: str) -> bool:
    """Tell whether a client that trusts the certificate itself finds it expired, by a handshake in memory."""
    trusting = ssl.create_default_context(cafile=str(Path(certificate).expanduser()))
    trusting.check_hostname = False
    trusting.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    try:
        handshake_in_memory(trusting, context)
    except ssl.SSLCertVerificationError as error:
        return error.verify_code == _EXPIRED
    except ssl.SSLError:  # what else a client finds, it says itself
        return False
    return False


_CLOSE_TIMEOUT_S = 1.0  # for connections whose requests were cancelled

_quiet = logging.getLogger("penstock.frontend.http.server")
_quiet.setLevel(
    logging.CRITICAL
)  # bytes that are not HTTP are the client's fault: aiohttp's line about them is not logged


class FrontendServer:
    """Serves one `Frontend` over HTTP until `close`."""

    def __init__(
        self, frontend: Frontend, *, share_port: bool = False, supervisor: DeploymentSupervisor | None = None
    ) -> None:
        """Create the server; `start` opens the port. Raises ConfigError where a file of its settings is wrong.

        Args:
            frontend: what to serve.
            share_port: other frontend processes may listen on the same port; the supervisor reserves it.
            supervisor: tells the page of the whole deployment; None: it shows what this process knows.
        """
        self._frontend = frontend
        self._share_port = share_port
        self._surface = HttpSurface(frontend, supervisor)
        self._tls = None if frontend.config.tls is None else ServerTls(frontend.config.tls)
        self._batches = BatchRunner(frontend)
        self._runner: web.AppRunner | None = None
        self._listening: Listener | None = None

    async def start(self) -> tuple[str, int]:
        """Listen.

        Returns:
            The address and the port; the system chooses the port if 0 is configured.

        Raises:
            ConfigError: the port is taken, or the address is not this machine's.
        """
        config = self._frontend.config
        listener = _listen(config, share_port=self._share_port)
        self._runner = web.AppRunner(
            self._surface.app(),
            handler_cancellation=True,
            shutdown_timeout=_CLOSE_TIMEOUT_S,
        )
        await self._runner.setup()
        self._listening = Listener(
            [listener],
            self.connection,
            on_failure=self._frontend.metrics.accept_failed,
            tls=None if self._tls is None else self._tls.context,
            handshake_timeout_s=config.receive.timeout_s,
            on_refused=self._frontend.refused_handshakes.note,
        )
        host, port = listener.getsockname()[:2]
        _log.info("frontend_listening", host=host, port=port)
        return host, port

    def connection(self) -> ClientConnection:
        """Make the protocol of one accepted connection, once started."""
        assert self._runner is not None, "it has started"
        server, config = self._runner.server, self._frontend.config
        assert server is not None  # set by runner.setup()
        return ClientConnection(
            server,
            refuse=self._surface.refuse,
            raw=self._surface.refuse_raw,
            budget=self._frontend.budget,
            receive=config.receive,
            loop=asyncio.get_running_loop(),
            logger=_quiet,
            keepalive_timeout_s=config.keepalive_timeout_s,
            reader_timeout_s=config.reader_timeout_s,
        )

    async def watch(self) -> None:
        """Read the key file and the certificate again whenever they change, and run batches, for ever."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._batches.run())
            group.create_task(self._frontend.access.tenants.watch())
            if self._tls is not None:
                group.create_task(self._tls.watch())

    async def close(self) -> None:
        """Stop listening, let requests in flight finish for `drain_timeout_s`, then end the rest with an error. Safe twice."""
        runner, self._runner = self._runner, None
        if runner is None:
            return
        self._surface.draining = True
        if self._listening is not None:
            self._listening.close()
            await self._listening.wait_closed()
        await asyncio.sleep(0)  # accepted connections start their requests first
        loop = asyncio.get_running_loop()
        began_s = loop.time()
        ended = await self._frontend.admission.drain(self._frontend.config.drain_timeout_s)
        if ended:
            _log.warning("requests_cancelled", requests=ended, after_s=round(loop.time() - began_s, 1))
        await runner.cleanup()
        await self._frontend.close()
        self._surface.close()
        _log.info("frontend_closed", requests_ended=ended)

    def hurry(self) -> None:
        """Make a running `close` stop waiting: unfinished requests end with an error now."""
        self._frontend.admission.hurry()


def _listen(config: FrontendConfig, *, share_port: bool) -> socket.socket:
    try:
        family, _, _, _, address = socket.getaddrinfo(
            config.host, config.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, socket.SOCK_STREAM)
    except OSError as error:
        raise _unusable(config, error) from error
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if share_port:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        # Accepted connections inherit it. The kernel's default grows to megabytes for a stalled client.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, config.write_buffer_bytes)
        listener.bind(address)
        listener.setblocking(False)
    except OSError as error:
        listener.close()
        raise _unusable(config, error) from error
    return listener


def _unusable(config: FrontendConfig, error: OSError) -> ConfigError:
    return ConfigError(
        f"frontend: cannot listen on {config.host} port {config.port}: {error.strerror or error}; "
        "stop what listens there, or choose another with --port"
    )
