"""Routes that tell what is served and how the server is: models, health, metrics, version, and the API's reference."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from html import escape
from typing import Any

import msgspec
from aiohttp import web

from penstock import __version__
from penstock.core import wire
from penstock.core.json_text import encode_json
from penstock.frontend.apis.bodies import ChatRequest, CompletionRequest
from penstock.frontend.apis.chat import ChatChoice, CompletionChoice, ModelEntry, ModelList, OpenAiAnswer
from penstock.frontend.apis.messages_answer import MessagesError
from penstock.frontend.apis.messages_body import CountRequest, MessagesRequest
from penstock.frontend.apis.responses_body import DeletedResponse, ResponsesRequest
from penstock.frontend.apis.tokens import Detokenized, DetokenizeRequest, Tokenized, TokenizeRequest
from penstock.frontend.batch_store import BatchObject, BatchRequest, Deleted, FileObject, ObjectList
from penstock.frontend.embeddings import EmbeddingsAnswer, EmbeddingsRequest
from penstock.frontend.errors import ErrorAnswer
from penstock.frontend.frontend import Frontend
from penstock.frontend.http.replies import json_response
from penstock.frontend.limits.regions import PrefixQuery
from penstock.frontend.limits.tenants import Tenant

_UPLOAD = {
    "type": "object",
    "properties": {"file": {"type": "string", "format": "binary"}, "purpose": {"const": "batch"}},
    "required": ["file", "purpose"],
}
_LISTED = ("after", "limit")
_QUERIES: dict[str, dict[str, Any]] = {
    "after": {"description": "The last id of the page before", "schema": {"type": "string"}},
    "limit": {"description": "Most items of a page", "schema": {"type": "integer", "minimum": 1}},
    "purpose": {"description": "Only files of it", "schema": {"type": "string"}},
    "order": {"description": "By time", "schema": {"enum": ["asc", "desc"]}},
}


@dataclass(frozen=True, slots=True)
class _Operation:
    """One method of a path; `answer` None: lines of text. `streams`: it may come as server-sent events too."""

    method: str
    path: str
    summary: str
    answer: Any
    body: Any = None
    form: dict[str, Any] | None = None
    queries: tuple[str, ...] = ()
    error: Any = ErrorAnswer
    streams: bool = False


_OPERATIONS = (
    _Operation("post", "/v1/chat/completions", "Answer a chat, whole or streamed", OpenAiAnswer[ChatChoice], ChatRequest, streams=True),
    _Operation("post", "/v1/completions", "Continue a prompt, whole or streamed", OpenAiAnswer[CompletionChoice], CompletionRequest, streams=True),
    _Operation("post", "/v1/responses", "Answer by the Responses API, whole or streamed", dict[str, Any], ResponsesRequest, streams=True),
    _Operation("get", "/v1/responses/{id}", "Give a kept answer", dict[str, Any]),
    _Operation("delete", "/v1/responses/{id}", "Delete a kept answer", DeletedResponse),
    _Operation("post", "/v1/messages", "Answer by Anthropic's API, whole or streamed", dict[str, Any], MessagesRequest, error=MessagesError, streams=True),
    _Operation("post", "/v1/messages/count_tokens", "Count the tokens of a prompt of Anthropic's API", dict[str, int], CountRequest, error=MessagesError),
    _Operation("post", "/v1/embeddings", "Give the embeddings of texts or tokens", EmbeddingsAnswer, EmbeddingsRequest),
    _Operation("post", "/tokenize", "Give the tokens of a text or a chat", Tokenized, TokenizeRequest),
    _Operation("post", "/detokenize", "Give the text of tokens", Detokenized, DetokenizeRequest),
    _Operation("get", "/v1/models", "List the models served now", ModelList),
    _Operation("get", "/v1/models/{model}", "Describe one model", ModelEntry),
    _Operation("post", "/v1/files", "Upload a file", FileObject, form=_UPLOAD),
    _Operation("get", "/v1/files", "List files, the newest first", ObjectList[FileObject], queries=(*_LISTED, "purpose", "order")),
    _Operation("get", "/v1/files/{id}", "Describe a file", FileObject),
    _Operation("delete", "/v1/files/{id}", "Delete a file", Deleted),
    _Operation("get", "/v1/files/{id}/content", "Give the bytes of a file", None),
    _Operation("post", "/v1/batches", "Run the requests of a file in the gaps between others", BatchObject, BatchRequest),
    _Operation("get", "/v1/batches", "List batches, the newest first", ObjectList[BatchObject], queries=_LISTED),
    _Operation("get", "/v1/batches/{id}", "Tell how far a batch is", BatchObject),
    _Operation("post", "/v1/batches/{id}/cancel", "Cancel a batch", BatchObject),
)  # fmt: skip


@cache
def openapi() -> dict[str, Any]:
    """Make the document, of OpenAPI 3.1."""
    types = {kind for it in _OPERATIONS for kind in (it.body, it.answer, it.error) if kind is not None}
    ordered = sorted(types, key=str)
    refs, components = msgspec.json.schema_components(ordered, ref_template="#/components/schemas/{name}")
    schema = dict(zip(ordered, refs, strict=True))
    paths: dict[str, Any] = {}
    for it in _OPERATIONS:
        failure = {"description": "Refused or failed", "content": _json(schema[it.error])}
        content = {"application/jsonl": {}} if it.answer is None else _json(schema[it.answer])
        if it.streams:
            content |= {"text/event-stream": {}}
        operation: dict[str, Any] = {
            "operationId": f"{it.method}_{it.path.strip('/').translate(str.maketrans('/.', '__', '{}'))}",
            "summary": it.summary,
            "responses": {"200": {"description": "The answer", "content": content}, "default": failure},
        }
        if it.body is not None:
            operation["requestBody"] = {"required": True, "content": _json(schema[it.body])}
        if it.form is not None:
            form = {"multipart/form-data": {"schema": it.form}}
            operation["requestBody"] = {"required": True, "content": form}
        if parameters := _parameters(it):
            operation["parameters"] = parameters
        paths.setdefault(it.path, {})[it.method] = operation
    return {
        "openapi": "3.1.0",
        "info": {"title": "Penstock", "version": __version__},
        "paths": paths,
        "components": {"schemas": components},
    }


def _parameters(it: _Operation) -> list[dict[str, Any]]:
    queries = [{"name": name, "in": "query", **_QUERIES[name]} for name in it.queries]
    if "{" not in it.path:
        return queries
    name = it.path.partition("{")[2].partition("}")[0]
    return [{"name": name, "in": "path", "required": True, "schema": {"type": "string"}}, *queries]


def _json(schema: dict[str, Any]) -> dict[str, Any]:
    return {"application/json": {"schema": schema}}


_STYLE = """
:root { color-scheme: light dark; }
body { font: 1rem/1.5 system-ui, sans-serif; max-width: 70rem; margin: 0 auto; padding: 1rem; }
code { font-family: ui-monospace, monospace; }
h2 { border-top: 1px solid; padding-top: .5rem; }
table { border-collapse: collapse; }
th, td { text-align: left; vertical-align: top; padding: .15rem 1rem .15rem 0; }
summary { cursor: pointer; }
"""
HEADERS = {
    "Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'",
    "X-Content-Type-Options": "nosniff",
}


def reference_page(document: dict[str, Any]) -> str:
    """Render an OpenAPI document."""
    operations = [
        (method.upper(), path, operation)
        for path, methods in document["paths"].items()
        for method, operation in methods.items()
    ]
    contents = "".join(
        f'<li><a href="#{escape(it["operationId"])}"><code>{method} {escape(path)}</code></a> {escape(it["summary"])}</li>'
        for method, path, it in operations
    )
    sections = "".join("".join(_operation(*operation)) for operation in operations)
    schemas = "".join("".join(_schema(*item)) for item in sorted(document["components"]["schemas"].items()))
    info = document["info"]
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{escape(info["title"])} API</title>'
        f'<meta name="viewport" content="width=device-width"><style>{_STYLE}</style></head><body><main>'
        f"<h1>{escape(info['title'])} API {escape(info['version'])}</h1>"
        '<p>As a document for programs: <a href="/openapi.json">OpenAPI</a>. Keys go in <code>Authorization: Bearer</code>.</p>'
        f"<nav aria-label='Operations'><ul>{contents}</ul></nav>{sections}<h2>Types</h2>{schemas}</main></body></html>"
    )


def _operation(method: str, path: str, it: dict[str, Any]) -> Iterator[str]:
    yield f'<section id="{escape(it["operationId"])}"><h2><code>{method} {escape(path)}</code></h2>'
    yield f"<p>{escape(it['summary'])}.</p>"
    if parameters := it.get("parameters"):
        rows = "".join(
            f"<tr><th scope='row'><code>{escape(one['name'])}</code></th><td>{one['in']}</td>"
            f"<td>{_type(one['schema'])}</td></tr>"
            for one in parameters
        )
        yield f"<table><caption>Parameters</caption>{rows}</table>"
    for content in it.get("requestBody", {}).get("content", {}).items():
        yield f"<p>Body, <code>{content[0]}</code>: {_type(content[1]['schema'])}</p>"
    for status, answer in it["responses"].items():
        kinds = ", ".join(
            f"<code>{kind}</code> {_type(item.get('schema', {}))}" for kind, item in answer["content"].items()
        )
        yield f"<p>{escape(status)}: {kinds}</p>"
    yield "</section>"


def _schema(name: str, schema: dict[str, Any]) -> Iterator[str]:
    yield f'<details id="type-{escape(name)}"><summary><code>{escape(name)}</code></summary>'
    if text := schema.get("description"):
        yield f"<p>{escape(text)}</p>"
    if "properties" not in schema:
        yield f"<p>{_type(schema)}</p></details>"
        return
    required = set(schema.get("required", ()))
    yield "<table><thead><tr><th>field</th><th>type</th><th>default</th></tr></thead><tbody>"
    for field, kind in schema["properties"].items():
        default = "required" if field in required else escape(str(kind.get("default", "")))
        yield f"<tr><th scope='row'><code>{escape(field)}</code></th><td>{_type(kind)}</td><td>{default}</td></tr>"
    yield "</tbody></table></details>"


def _type(schema: dict[str, Any]) -> str:
    """Say a type in HTML."""
    if reference := schema.get("$ref"):
        name = escape(reference.rpartition("/")[2])
        return f'<a href="#type-{name}"><code>{name}</code></a>'
    if options := schema.get("anyOf"):
        return " or ".join(map(_type, options))
    if "const" in schema:
        return f"<code>{escape(repr(schema['const']))}</code>"
    if values := schema.get("enum"):
        return " or ".join(f"<code>{escape(repr(value))}</code>" for value in values)
    kind = escape(str(schema.get("type", "anything")))
    if kind == "array":
        return f"list of {_type(schema.get('items', {}))}"
    properties = schema.get("properties")
    return f"{kind} with <code>{escape(', '.join(properties))}</code>" if properties else kind


class InfoRoutes:
    """Handlers of one `Frontend`'s informative routes."""

    def __init__(
        self, frontend: Frontend, tenant: Callable[[], Tenant], is_draining: Callable[[], bool]
    ) -> None:
        self._frontend = frontend
        self._tenant = tenant
        self._is_draining = is_draining
        self._version = encode_json({"version": __version__})
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
        return json_response(encode_json(self._frontend.models()))

    async def _model(self, request: web.Request) -> web.Response:
        return json_response(encode_json(self._frontend.model(request.match_info["model"])))

    async def _tokenizer_info(self, request: web.Request) -> web.Response:
        return json_response(encode_json(await self._frontend.tokenizer_info(request.query.get("model"))))

    async def _health(self, _: web.Request) -> web.Response:
        reason = "the server is shutting down" if self._is_draining() else self._frontend.unhealthy()
        if reason is not None:
            return json_response(encode_json({"status": "unavailable", "reason": reason}), status=503)
        return json_response(
            encode_json({"status": "ok", "models": sorted(self._frontend.dispatcher.models())})
        )

    async def _load(self, request: web.Request) -> web.Response:
        self._frontend.region_links.asked_load(request.query)
        return json_response(encode_json(self._frontend.loads()))

    async def _prefixes(self, request: web.Request) -> web.Response:
        asked = PrefixQuery.read(request.query)
        summary = self._frontend.dispatcher.prefix_summary(
            asked.model, self._tenant().cache_salt, asked.after, asked.interval_s
        )
        if summary is None:
            return json_response(encode_json({"error": "no prefixes are told of this model"}), status=404)
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
            self._openapi = encode_json(openapi())
        return json_response(self._openapi)

    async def _show_docs(self, _: web.Request) -> web.Response:
        self._docs = self._docs or reference_page(openapi())
        return web.Response(text=self._docs, content_type="text/html", headers=HEADERS)
