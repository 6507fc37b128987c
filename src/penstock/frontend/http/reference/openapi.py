"""The API's OpenAPI document."""

from dataclasses import dataclass
from functools import cache
from typing import Any

import msgspec

from penstock import __version__
from penstock.frontend.anthropic.bodies import CountRequest, MessagesRequest
from penstock.frontend.anthropic.events import MessagesError
from penstock.frontend.batches.objects import Batch, BatchRequest, Deleted, FileObject, Listing
from penstock.frontend.embeddings.bodies import EmbeddingsAnswer, EmbeddingsRequest
from penstock.frontend.errors import ErrorAnswer
from penstock.frontend.openai.answers import Answer, ChatChoice, CompletionChoice, ModelEntry, ModelList
from penstock.frontend.openai.bodies import ChatRequest, CompletionRequest
from penstock.frontend.responses.bodies import DeletedResponse, ResponsesRequest
from penstock.frontend.tokens.bodies import (
    Detokenized,
    DetokenizeRequest,
    Tokenized,
    TokenizeRequest,
)

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
    _Operation("post", "/v1/chat/completions", "Answer a chat, whole or streamed", Answer[ChatChoice], ChatRequest, streams=True),
    _Operation("post", "/v1/completions", "Continue a prompt, whole or streamed", Answer[CompletionChoice], CompletionRequest, streams=True),
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
    _Operation("get", "/v1/files", "List files, the newest first", Listing[FileObject], queries=(*_LISTED, "purpose", "order")),
    _Operation("get", "/v1/files/{id}", "Describe a file", FileObject),
    _Operation("delete", "/v1/files/{id}", "Delete a file", Deleted),
    _Operation("get", "/v1/files/{id}/content", "Give the bytes of a file", None),
    _Operation("post", "/v1/batches", "Run the requests of a file in the gaps between others", Batch, BatchRequest),
    _Operation("get", "/v1/batches", "List batches, the newest first", Listing[Batch], queries=_LISTED),
    _Operation("get", "/v1/batches/{id}", "Tell how far a batch is", Batch),
    _Operation("post", "/v1/batches/{id}/cancel", "Cancel a batch", Batch),
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
