"""Routes that tell what is served and how the server is: models, health, metrics, version, OpenAPI."""

from collections.abc import Callable

from aiohttp import web

from penstock import __version__
from penstock.core import wire
from penstock.frontend.frontend import Frontend
from penstock.frontend.http.reference.openapi import openapi
from penstock.frontend.http.reference.page import HEADERS, reference_page
from penstock.frontend.http.replies import json_response
from penstock.frontend.limits.prefix_query import PrefixQuery
from penstock.frontend.openai.answers import encode
from penstock.frontend.tenants.tenants import Tenant


class InfoRoutes:
    """Handlers of one `Frontend`'s informative routes."""

    def __init__(
        self, frontend: Frontend, tenant: Callable[[], Tenant], is_draining: Callable[[], bool]
    ) -> None:
        self._frontend = frontend
        self._tenant = tenant
        self._is_draining = is_draining
        self._version = encode({"version": __version__})
        self._openapi: bytes | None = None
        self._docs = ""

    def routes(self) -> list[web.RouteDef]:
        return [
            web.get("/v1/models", self._models),
            web.get("/v1/models/", self._models),
            web.get("/v1/models/{model:.+}", self._model),
            web.get("/tokenizer_info", self._tokenizer_info),
            web.get("/health", self._health),
            web.get("/live", self._live),
            web.get("/load", self._load),
            web.get("/prefixes", self._prefixes),
            web.get("/ping", self._health),
            web.post("/ping", self._health),
            web.get("/version", self._show_version),
            web.get("/metrics", self._metrics),
            web.get("/openapi.json", self._show_openapi),
            web.get("/docs", self._show_docs),
        ]

    async def _models(self, _: web.Request) -> web.Response:
        return json_response(encode(self._frontend.models()))

    async def _model(self, request: web.Request) -> web.Response:
        return json_response(encode(self._frontend.model(request.match_info["model"])))

    async def _tokenizer_info(self, request: web.Request) -> web.Response:
        return json_response(encode(await self._frontend.tokenizer_info(request.query.get("model"))))

    async def _health(self, _: web.Request) -> web.Response:
        reason = "the server is shutting down" if self._is_draining() else self._frontend.unhealthy()
        if reason is not None:
            return json_response(encode({"status": "unavailable", "reason": reason}), status=503)
        return json_response(encode({"status": "ok", "models": sorted(self._frontend.dispatcher.models())}))

    async def _load(self, request: web.Request) -> web.Response:
        self._frontend.region_links.asked_load(request.query)
        return json_response(encode(self._frontend.loads()))

    async def _prefixes(self, request: web.Request) -> web.Response:
        asked = PrefixQuery.read(request.query)
        summary = self._frontend.dispatcher.prefix_summary(
            asked.model, self._tenant().cache_salt, asked.after, asked.interval_s
        )
        if summary is None:
            return json_response(encode({"error": "no prefixes are told of this model"}), status=404)
        self._frontend.region_links.asked_prefixes(request.headers, asked.root, summary.root)
        return web.Response(body=wire.encode(summary), content_type="application/msgpack")

    async def _live(self, _: web.Request) -> web.Response:
        return json_response(b'{"status":"live"}')

    async def _show_version(self, _: web.Request) -> web.Response:
        return json_response(self._version)

    async def _metrics(self, request: web.Request) -> web.Response:
        access = self._frontend.access
        names = str if access.is_admin(request.headers) else access.tenants.alias  # anybody may ask
        text = self._frontend.metrics.expose(names)
        return web.Response(body=text, headers={"Content-Type": "text/plain; version=0.0.4; charset=utf-8"})

    async def _show_openapi(self, _: web.Request) -> web.Response:
        if self._openapi is None:
            self._openapi = encode(openapi())
        return json_response(self._openapi)

    async def _show_docs(self, _: web.Request) -> web.Response:
        self._docs = self._docs or reference_page(openapi())
        return web.Response(text=self._docs, content_type="text/html", headers=HEADERS)
