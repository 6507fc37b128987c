"""HTTP API of the standalone router, for gateways (docs/router.md); the logic is `RoutingService`."""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Self, TypeVar

import msgspec
import pydantic
from aiohttp import web
from prometheus_client import CollectorRegistry, generate_latest

from penstock.core.config import Config, ListenHost
from penstock.core.errors import ConfigError, PenstockError, RequestError
from penstock.core.json_text import encode_json
from penstock.core.listening import Address, Listener, listen
from penstock.core.log import get_logger
from penstock.frontend.apis.chat import RoutingDecisions
from penstock.frontend.apis.decoding import decode_body
from penstock.frontend.config import ReceiveConfig, check_bodies
from penstock.frontend.encoders import LARGE_BYTES, EncoderPool
from penstock.frontend.errors import ReceiveTimeoutError
from penstock.frontend.http.admin import explain_latest, explain_one
from penstock.frontend.http.connection import ClientConnection
from penstock.frontend.http.replies import json_response
from penstock.frontend.http.server import error_response, garbage_refusal, payload_refusal, raw_error
from penstock.frontend.limits.admission import BodyReader, ReceiveBudget, ReceiveMetrics, RequestSlot
from penstock.frontend.limits.headers import OwnNames, wants_explanation
from penstock.frontend.limits.tenants import ApiAccess
from penstock.frontend.prepare import THREAD_BYTES
from penstock.frontend.route_query import RouteModel, decode_query
from penstock.router.gateway import GatewayServer, Query, RequestStage
from penstock.router.routing_service import RoutingService, RoutingServiceConfig

_NAME_CHARACTERS_MAX = 128
_ENCODERS = 2
"""Encoder processes at most; they decode bodies of `/route` over 64 KiB."""
_OPEN = ("/health", "/metrics")
_log = get_logger()

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
_Body = TypeVar("_Body", bound=msgspec.Struct)


class RoutingHttpConfig(Config):
    """Settings of the standalone router."""

    host: ListenHost = "127.0.0.1"
    """Address to listen on; 0.0.0.0 is every interface."""
    hosts: tuple[str, ...] = ()
    """Names by which the router may be asked on a loopback address, beside `localhost` and IP addresses; any other in `Host`, or a page of another site, gets 403. `*` is any. Elsewhere names are checked only where some are given."""
    api_key_file: str | None = None
    """YAML file of tenants with hashes of their API keys (docs/tenants.md), read again when it changes; their limits have no effect here. With it, or with PENSTOCK_API_KEY set, every request but `/health` and `/metrics` needs a key."""
    port: int = pydantic.Field(default=8100, ge=0, le=65535)
    """TCP port; 0 lets the system choose."""
    body_bytes_max: int = pydantic.Field(default=8 << 20, ge=1024)
    """Largest request body, after decompression; a larger one gets 413."""
    receive: ReceiveConfig = ReceiveConfig()
    """Limits while requests are received."""
    keepalive_timeout_s: float = pydantic.Field(default=75.0, gt=0)
    """How long an idle connection stays open."""
    service: RoutingServiceConfig = RoutingServiceConfig()
    """Routing policy, block size and limits."""

    @pydantic.model_validator(mode="after")
    def _check_bodies(self) -> Self:
        check_bodies(self.body_bytes_max, self.receive)
        return self


class _FeedbackBody(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    id: str
    stage: RequestStage
    cached_tokens: int | None = None
    output_tokens: int | None = None
    worker: str | None = None


class RoutingServer:
    """Serves one `RoutingService` until `close`."""

    def __init__(
        self,
        service: RoutingService,
        config: RoutingHttpConfig,
        registry: CollectorRegistry,
        access: ApiAccess | None = None,
        *,
        model: RouteModel | None = None,
    ) -> None:
        """Create the server.

        Args:
            service: the router.
            config: where to listen, and limits.
            registry: what /metrics shows.
            access: the keys; None: no key is needed.
            model: tokenizes the text of requests for it; text for others is matched by its bytes.
        """
        self._access = access or ApiAccess()
        self._service = service
        self._config = config
        self._registry = registry
        self._model = model
        self._own_names = OwnNames(config.host, config.hosts, setting="hosts")
        self._receiving = ReceiveMetrics(registry, "penstock_router")
        self._bodies = BodyReader(config.body_bytes_max, self._receiving, settings="")
        self.budget = ReceiveBudget(config.receive.bytes_max, self._receiving, settings="")
        """Receive budget of all connections."""
        self._encoders = EncoderPool(_ENCODERS)
        self._runner: web.AppRunner | None = None
        self._listener: Listener | None = None

    async def start(self) -> tuple[str, int]:
        """Listen.

        Returns:
            The address and the port; the system chooses the port if 0 is configured.

        Raises:
            ConfigError: the port is taken, or the address is not this machine's.
        """
        config = self._config
        app = web.Application(middlewares=[self._answer, self._check], client_max_size=0)
        app.add_routes(
            [
                web.post("/route", self._route),
                web.post("/feedback", self._feedback),
                web.get("/workers", self._workers),
                web.put("/workers/{name}", self._put),
                web.delete("/workers/{name}", self._delete),
                web.get("/explain", self._explain_latest),
                web.get("/explain/{id}", self._explain_one),
                web.get("/health", self._health),
                web.get("/metrics", self._metrics),
            ]
        )
        runner = self._runner = web.AppRunner(app)
        await runner.setup()
        server = runner.server
        assert server is not None  # set by runner.setup()
        loop = asyncio.get_running_loop()
        # Bytes that are not HTTP are the client's fault: aiohttp's line about them is not logged.
        quiet = logging.getLogger("penstock.frontend.http.router")
        quiet.setLevel(logging.CRITICAL)
        try:
            self._listener, bound = await listen(
                lambda: ClientConnection(
                    server,
                    refuse=_refuse,
                    raw=self._refuse_raw,
                    budget=self.budget,
                    receive=config.receive,
                    loop=loop,
                    logger=quiet,
                    keepalive_timeout_s=config.keepalive_timeout_s,
                ),
                Address(host=config.host, port=config.port),
                on_failure=self._receiving.accept_failed,
            )
        except ConfigError as error:
            await self.close()
            raise ConfigError(
                f"router: cannot listen on {config.host} port {config.port}: {_reason(error)}; stop what listens"
                " there, or choose another with --port"
            ) from error
        return bound.host, bound.port

    async def close(self) -> None:
        """Stop listening and end the requests in flight. Safe twice."""
        listener, self._listener = self._listener, None
        if listener is not None:
            listener.close()
            await listener.wait_closed()
        runner, self._runner = self._runner, None
        if runner is not None:
            await runner.cleanup()
        await self._encoders.close()

    async def _read(self, request: web.Request, kind: type[_Body]) -> _Body:
        """Receive a body and decode it.

        Raises:
            PenstockError: the body came too late, exceeds the receive budget, or is no `kind`.
        """
        slot = self._slot()
        with self.budget.hold(slot.end) as received:
            with slot.limit():
                body = b"".join(await self._bodies.read(request, received))
            return decode_body(body, kind)

    async def _read_query(self, request: web.Request) -> Query:
        """Receive and decode a body of `/route`; an encoder process decodes a large one.

        Raises:
            PenstockError: the body came too late, exceeds the receive budget, or is invalid.
        """
        slot = self._slot()
        with self.budget.hold(slot.end) as received:
            with slot.limit():
                pieces = await self._bodies.read(request, received)
                if sum(map(len, pieces)) > LARGE_BYTES:
                    return await self._encoders.decode_query(pieces, self._model)
                body = b"".join(pieces)
                if self._model is not None and len(body) > THREAD_BYTES:
                    return await asyncio.to_thread(decode_query, body, self._model)
            return decode_query(body, self._model)

    def _slot(self) -> RequestSlot:
        timeout_s = self._config.receive.timeout_s
        now_s = asyncio.get_running_loop().time()
        return RequestSlot(now_s, now_s + timeout_s, timeout_s, settings="")

    def _refuse_raw(self, error: PenstockError) -> bytes:
        """Encode a whole error response, for a connection without a request."""
        if isinstance(error, ReceiveTimeoutError):
            self._receiving.refused_body("headers_late")
        return raw_error(error)

    @web.middleware
    async def _answer(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Convert every error to the API's JSON."""
        if isinstance(request.protocol, ClientConnection):
            request.protocol.request_began()
        try:
            return await handler(request)
        except PenstockError as error:
            if isinstance(error, ReceiveTimeoutError):
                self._receiving.refused_body("body_late")
            return error_response(error)
        except web.HTTPException as error:
            text = f"{request.method} {request.path}: {error.reason}"
            if isinstance(error, web.HTTPNotFound):
                text = f"{request.path} does not exist; see docs/router.md"
            return error_response(RequestError(text, http_status=error.status), error.headers.get("Allow"))
        except web.RequestPayloadError as error:
            return error_response(payload_refusal(error))
        except (asyncio.CancelledError, ConnectionError):
            raise
        except Exception:  # noqa: BLE001 - the last handler of a request's errors
            _log.exception("request_failed", path=request.path)
            return error_response(PenstockError("the router failed on this request; its log says more"))

    @web.middleware
    async def _check(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        self._own_names.check(request)
        if request.path not in _OPEN:
            self._access.tenant_of(request.headers)
        return await handler(request)

    async def _route(self, request: web.Request) -> web.Response:
        query, is_asked_why = await self._read_query(request), wants_explanation(request.headers)
        choice = self._service.route(query)
        answer = msgspec.to_builtins(choice)
        if is_asked_why:
            answer["why"] = RoutingDecisions(self._service.explain(choice.id))
        return json_response(encode_json(answer))

    async def _feedback(self, request: web.Request) -> web.Response:
        body = await self._read(request, _FeedbackBody)
        self._service.feedback(body.id, body.stage, body.cached_tokens, body.output_tokens, body.worker)
        return json_response(encode_json({"id": body.id, "stage": body.stage}))

    async def _workers(self, _: web.Request) -> web.Response:
        return json_response(encode_json({"workers": self._service.workers()}))

    async def _put(self, request: web.Request) -> web.Response:
        name, server = request.match_info["name"], await self._read(request, GatewayServer)
        if len(name) > _NAME_CHARACTERS_MAX:
            raise RequestError(f"name: must have at most {_NAME_CHARACTERS_MAX} characters, got {len(name)}")
        if not name.isprintable():
            raise RequestError(f"name: must have printable characters only, got {name!r}")
        return json_response(encode_json(await self._service.put(name, server)))

    async def _delete(self, request: web.Request) -> web.Response:
        name = request.match_info["name"]
        await self._service.remove(name)
        return json_response(encode_json({"removed": name}))

    async def _explain_latest(self, request: web.Request) -> web.Response:
        return json_response(encode_json(explain_latest(self._service, request)))

    async def _explain_one(self, request: web.Request) -> web.Response:
        return json_response(encode_json(explain_one(self._service, request)))

    async def _health(self, _: web.Request) -> web.Response:
        return json_response(b'{"status":"ok"}')

    async def _metrics(self, _: web.Request) -> web.Response:
        text = generate_latest(self._registry)
        return web.Response(body=text, headers={"Content-Type": "text/plain; version=0.0.4; charset=utf-8"})


def _reason(error: ConfigError) -> str:
    cause = error.__cause__
    return (cause.strerror if isinstance(cause, OSError) else None) or error.message


def _refuse(error: BaseException | None, status: int) -> web.Response:
    """Make the response to bytes that are no valid request."""
    response = error_response(garbage_refusal(error, status))
    response.force_close()
    return response
