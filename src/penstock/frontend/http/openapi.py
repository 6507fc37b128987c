"""The API's OpenAPI document, made from the types of its bodies and answers."""

from typing import Any

import msgspec

from penstock import __version__
from penstock.frontend.anthropic.bodies import CountRequest, MessagesRequest
from penstock.frontend.embeddings.bodies import EmbeddingsAnswer, EmbeddingsRequest
from penstock.frontend.errors import ErrorAnswer
from penstock.frontend.openai.answers import Answer, ChatChoice, CompletionChoice, ModelEntry, ModelList
from penstock.frontend.openai.bodies import ChatRequest, CompletionRequest
from penstock.frontend.responses.bodies import ResponsesRequest
from penstock.frontend.tokens.bodies import (
    Detokenized,
    DetokenizeRequest,
    Tokenized,
    TokenizeRequest,
)

_POSTS: dict[str, tuple[str, Any, Any]] = {
    "/v1/chat/completions": ("Answer a chat, whole or streamed", ChatRequest, Answer[ChatChoice]),
    "/v1/completions": ("Continue a prompt, whole or streamed", CompletionRequest, Answer[CompletionChoice]),
    "/v1/responses": ("Answer by the Responses API, whole or streamed", ResponsesRequest, dict[str, Any]),
    "/v1/messages": ("Answer by Anthropic's API, whole or streamed", MessagesRequest, dict[str, Any]),
    "/v1/messages/count_tokens": (
        "Count the tokens of a prompt of Anthropic's API",
        CountRequest,
        dict[str, int],
    ),
    "/v1/embeddings": ("Give the embeddings of texts or tokens", EmbeddingsRequest, EmbeddingsAnswer),
    "/tokenize": ("Give the tokens of a text or a chat", TokenizeRequest, Tokenized),
    "/detokenize": ("Give the text of tokens", DetokenizeRequest, Detokenized),
}
_GETS: dict[str, tuple[str, Any]] = {
    "/v1/models": ("List the models served now", ModelList),
    "/v1/models/{model}": ("Describe one model", ModelEntry),
}


def openapi() -> dict[str, Any]:
    """Make the document, of OpenAPI 3.1."""
    types: set[Any] = {ErrorAnswer}
    for _, body, answer in _POSTS.values():
        types |= {body, answer}
    types |= {answer for _, answer in _GETS.values()}
    ordered = sorted(types, key=str)
    refs, components = msgspec.json.schema_components(ordered, ref_template="#/components/schemas/{name}")
    schema = dict(zip(ordered, refs, strict=True))
    failure = {"description": "Refused or failed", "content": _json(schema[ErrorAnswer])}

    def operation(name: str, summary: str, answer: Any) -> dict[str, Any]:
        responses = {
            "200": {"description": "The answer", "content": _json(schema[answer])},
            "default": failure,
        }
        return {"operationId": name, "summary": summary, "responses": responses}

    paths: dict[str, Any] = {}
    for path, (summary, body, answer) in _POSTS.items():
        post = operation(_name(path), summary, answer)
        post["requestBody"] = {"required": True, "content": _json(schema[body])}
        paths[path] = {"post": post}
    for path, (summary, answer) in _GETS.items():
        paths[path] = {"get": operation(_name(path), summary, answer)}
    model = {"name": "model", "in": "path", "required": True, "schema": {"type": "string"}}
    paths["/v1/models/{model}"]["get"]["parameters"] = [model]
    return {
        "openapi": "3.1.0",
        "info": {"title": "Penstock", "version": __version__},
        "paths": paths,
        "components": {"schemas": components},
    }


def _json(schema: dict[str, Any]) -> dict[str, Any]:
    return {"application/json": {"schema": schema}}


def _name(path: str) -> str:
    return path.strip("/").translate(str.maketrans("/.", "__", "{}"))
