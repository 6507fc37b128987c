"""The body of `/route`, by which a gateway asks the standalone router for a server."""

from typing import Any, TypeVar

import msgspec

from penstock.core.errors import RequestError
from penstock.core.wire import TokenArray
from penstock.frontend.limits.headers import ITL_MS, TTFT_MS, target_s
from penstock.frontend.openai.body_error import body_error, check_levels
from penstock.frontend.openai.validation import CACHE_SALT_CHARACTERS_MAX
from penstock.frontend.requests.route.model import RouteModel
from penstock.router.service.gateway import Query, tokens_of

_SESSION_CHARACTERS_MAX = 256
_Body = TypeVar("_Body", bound=msgspec.Struct)


class RouteBody(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Exactly one of `token_ids`, `prompt` and `messages` is given. Latency targets are in milliseconds.

    Requests of different `cache_salt` share no blocks.
    """

    model: str
    token_ids: list[int] | None = None
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    cache_salt: str | None = None
    session: str | None = None
    exclude: tuple[str, ...] = ()
    slo_ttft_ms: float | None = None
    slo_itl_ms: float | None = None


def decode_body(body: bytes, kind: type[_Body]) -> _Body:
    """Decode a JSON body.

    Raises:
        RequestError: the body is no `kind`.
    """
    try:
        check_levels(body)
        return msgspec.json.decode(body, type=kind)
    except (ValueError, RecursionError) as error:
        raise body_error(error, body, kind) from error


def decode_query(body: bytes, model: RouteModel | None = None) -> Query:
    """Decode and check a body of `/route`; token ids come as an array.

    Args:
        body: JSON.
        model: tokenizes the text of requests for it.

    Raises:
        RequestError: the body is invalid.
    """
    return _query_of(decode_body(body, RouteBody), model)


def _query_of(body: RouteBody, model: RouteModel | None) -> Query:
    """Convert a body to the router's query.

    Raises:
        RequestError: a field has an invalid value.
    """
    given = [name for name in ("token_ids", "prompt", "messages") if getattr(body, name) is not None]
    if len(given) != 1:
        raise RequestError(f"give one of token_ids, prompt and messages, got {' and '.join(given) or 'none'}")
    if body.session is not None and len(body.session) > _SESSION_CHARACTERS_MAX:
        raise RequestError(
            f"session: must have at most {_SESSION_CHARACTERS_MAX} characters, got {len(body.session)}",
            param="session",
        )
    if body.cache_salt is not None and not 0 < len(body.cache_salt) <= CACHE_SALT_CHARACTERS_MAX:
        raise RequestError(
            f"cache_salt: must have 1 to {CACHE_SALT_CHARACTERS_MAX} characters, got {len(body.cache_salt)}",
            param="cache_salt",
        )
    ttft_ms, itl_ms = body.slo_ttft_ms, body.slo_itl_ms
    return Query(
        model=body.model,
        prompt=_prompt_of(body, None if model is None or body.model not in model.names else model),
        cache_salt=body.cache_salt,
        session=body.session,
        exclude=body.exclude,
        slo_ttft_s=None if ttft_ms is None else target_s("slo_ttft_ms", ttft_ms, TTFT_MS),
        slo_itl_s=None if itl_ms is None else target_s("slo_itl_ms", itl_ms, ITL_MS),
    )


def _prompt_of(body: RouteBody, model: RouteModel | None) -> TokenArray | str:
    if body.token_ids is not None:
        return tokens_of(body.token_ids)
    if body.prompt is not None:
        return body.prompt if model is None else model.prompt(body.prompt)
    messages = body.messages or []
    return text_of(messages) if model is None else model.chat(messages)


def text_of(messages: list[dict[str, Any]]) -> str:
    """Join messages in order, so that a conversation's text is a prefix of its next request's."""
    return "".join(msgspec.json.encode(message).decode() + "\n" for message in messages)
