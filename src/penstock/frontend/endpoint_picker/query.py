"""The body of a request to a server, as the query that chooses the server."""

from typing import Any

import msgspec

from penstock.core.errors import RequestError
from penstock.core.wire import TokenArray
from penstock.frontend.requests.route.body import text_of
from penstock.frontend.requests.route.model import RouteModel
from penstock.router.service.gateway import Query, tokens_of

_NO_PROMPT = "\n"
"""Routes requests without a prompt, such as GET /v1/models."""


class _Body(msgspec.Struct):
    """What chooses a server; what is right in the other fields is the server's concern."""

    model: str | None = None
    messages: list[dict[str, Any]] | None = None
    prompt: str | list[int | str | list[int]] | None = None
    cache_salt: str | None = None


def query_of(
    body: bytes, models: list[str], tokenizing: RouteModel | None, exclude: tuple[str, ...]
) -> Query:
    """Read what chooses a server from a body. What this cannot read is routed by its bytes, and the server refuses it.

    Args:
        body: of any API, whole; empty where there is none.
        models: known names; a request that names no model may go to any.
        tokenizing: makes tokens of text for its model; None: text is matched by its bytes.
        exclude: names of servers not to choose.

    Raises:
        RequestError: no model is known, or a token id is no token id.
    """
    try:
        read = msgspec.json.decode(body, type=_Body) if body else _Body()
    except (ValueError, RecursionError):
        read = _Body(prompt=body.decode(errors="replace"))
    if not models:
        raise RequestError("no server is known yet", http_status=503)
    model = read.model or models[0]
    own = tokenizing if tokenizing is not None and model in tokenizing.names else None
    return Query(
        model=model, prompt=_prompt_of(read, own), cache_salt=read.cache_salt or None, exclude=exclude
    )


def _prompt_of(body: _Body, model: RouteModel | None) -> TokenArray | str:
    if body.messages is not None:
        try:
            return text_of(body.messages) if model is None else model.chat(body.messages)
        except (
            RequestError
        ):  # images, or what the template refuses: not what the server has cached, but the same each time
            return text_of(body.messages)
    prompt: str | int | list[int | str | list[int]] | list[int] | None = body.prompt
    if isinstance(prompt, list) and prompt and not isinstance(prompt[0], int):
        prompt = prompt[0]  # several prompts go to one server: the first stands for them
    if isinstance(prompt, list) and prompt:
        return tokens_of([number for number in prompt if isinstance(number, int)])
    if not isinstance(prompt, str) or not prompt:
        return _NO_PROMPT
    return prompt if model is None else model.prompt(prompt)
