"""Messages between a gateway and the router alone: servers, queries, choices, feedback."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any
from urllib.parse import urlsplit

import msgspec

from penstock.core.errors import RequestError
from penstock.core.hashing import as_tokens
from penstock.core.types.instances import InstanceState, Prices
from penstock.core.wire import TokenArray
from penstock.router.fleet.prices import PRICE_S_MAX

TOKEN_ID_MAX = 2**31 - 1
"""Token ids are from 0 to this."""
COUNT_MAX = 2**31 - 1
"""Tokens of an answer, and blocks of a cache, are at most so many."""
_CHARACTERS_MAX = 256
_URL_CHARACTERS_MAX = 2048
_ADAPTERS_MAX = 4096


class GatewayServer(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One server, as its gateway describes it.

    `total_blocks` is its KV cache's size in blocks; 0 is unknown. `prices` are what its work takes; without, it is
    taken to be like the others. `adapters` are the LoRA adapters that it serves, each as a model of its own. `host` to
    `region` say where it is, as far as is known.
    """

    url: str
    model: str
    total_blocks: int = 0
    state: InstanceState = InstanceState.READY
    prices: Prices | None = None
    adapters: tuple[str, ...] = ()
    host: str = ""
    rack: str = ""
    zone: str = ""
    region: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Query:
    """A request that needs a server: its prompt, as token ids (0 to `TOKEN_ID_MAX`) or as text. `exclude` are names not to give.

    `model` may be an adapter's name. Prompts share blocks only with others of the same `cache_salt`, the field of vLLM's API.
    """

    model: str
    prompt: TokenArray | Sequence[int] | str
    cache_salt: str | None = None
    session: str | None = None
    exclude: tuple[str, ...] = ()
    slo_ttft_s: float | None = None
    slo_itl_s: float | None = None


class ServerKvTransfer(msgspec.Struct, frozen=True, kw_only=True):
    """Fields that make a prefill server and a decode server transfer one prompt's KV.

    prefill:     fields to set in the request to the prefill server
    decode:      fields to set in the request to the decode server
    from_answer: fields of the prefill server's answer that go into the decode request as well; without any, both requests
                 are sent at once
    """

    prefill: dict[str, Any]
    decode: dict[str, Any]
    from_answer: tuple[str, ...] = ()


class PrefillChoice(msgspec.Struct, frozen=True, kw_only=True):
    """The prefill server of a request, and the fields as in `ServerKvTransfer`; a null among them replaces the request's own value."""

    worker: str
    url: str
    fields: dict[str, Any]
    from_answer: tuple[str, ...]


class ServerChoice(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Where a request goes. Give `id` with all feedback.

    Where `prefill` is given, its server computes the prompt, and `worker` answers with `fields` set in the request.
    """

    id: str
    worker: str
    url: str
    fields: dict[str, Any] = {}
    prefill: PrefillChoice | None = None


class RequestStage(StrEnum):
    """Stages of a request in feedback; all but FINISHED or FAILED, which end it, are optional."""

    STARTED = "started"
    PREFILLED = "prefilled"  # its prefill server has answered
    FIRST_TOKEN = "first_token"  # noqa: S105 - no password
    FINISHED = "finished"
    FAILED = "failed"  # the server broke off or answered with 5xx; its own refusals are FINISHED


def tokens_of(token_ids: TokenArray | Sequence[int]) -> TokenArray:
    """Give a prompt's token ids as an array.

    Raises:
        RequestError: they are not integers from 0 to `TOKEN_ID_MAX`, or not one after the other.
    """
    expected = f"token_ids: must be integers from 0 to {TOKEN_ID_MAX}"
    try:
        tokens = as_tokens(token_ids)
    except (ValueError, OverflowError, TypeError) as error:
        reason = str(error).removeprefix("token_ids: ")
        raise RequestError(f"{expected}: {reason}", param="token_ids") from error
    if len(tokens) and (lowest := int(tokens.min())) < 0:
        raise RequestError(f"{expected}, got {lowest}", param="token_ids")
    return tokens


def check_targets(query: Query) -> None:
    """Check a query's targets.

    Raises:
        RequestError: one is not a number of seconds.
    """
    for name in ("slo_ttft_s", "slo_itl_s"):
        target_s = getattr(query, name)
        if target_s is not None and not 0 < target_s < math.inf:
            raise RequestError(f"{name}: must be seconds > 0, got {target_s:g}", param=name)


def check_server(server: GatewayServer) -> None:
    """Check a server's fields.

    Raises:
        RequestError: a field is invalid; `param` names it.
    """
    if not _is_http(server.url):
        raise RequestError(f"url: must be http://HOST or https://HOST, got {server.url[:100]!r}", param="url")
    if not server.model:
        raise RequestError("model: must have a name, got ''", param="model")
    if not 0 <= server.total_blocks <= COUNT_MAX:
        raise RequestError(
            f"total_blocks: must be >= 0 and <= {COUNT_MAX}, got {server.total_blocks}", param="total_blocks"
        )
    _check_length("url", server.url, _URL_CHARACTERS_MAX)
    for name in ("model", "host", "rack", "zone", "region"):
        _check_length(name, getattr(server, name))
    _check_adapters(server)
    if server.prices is not None:
        _check_prices(server.prices)


def _check_length(name: str, text: str, most: int = _CHARACTERS_MAX) -> None:
    if len(text) > most:
        raise RequestError(f"{name}: must have at most {most} characters, got {len(text)}", param=name)


def _check_adapters(server: GatewayServer) -> None:
    names = server.adapters
    if len(names) > _ADAPTERS_MAX:
        raise RequestError(f"adapters: at most {_ADAPTERS_MAX}, got {len(names)}", param="adapters")
    for name in names:
        _check_length("adapters", name)
    if "" in names or server.model in names or len(set(names)) < len(names):
        raise RequestError(
            f"adapters: must have names, each its own and none the model's, got {list(names[:16])}",
            param="adapters",
        )


def _check_prices(prices: Prices) -> None:
    for field in msgspec.structs.fields(Prices):
        value = getattr(prices, field.name)
        for seconds in value if isinstance(value, tuple) else (value,):
            if not 0 <= seconds <= PRICE_S_MAX:
                name = f"prices.{field.name}"
                raise RequestError(
                    f"{name}: must be seconds, >= 0 and <= {PRICE_S_MAX:g}, got {seconds:g}", param=name
                )


def _is_http(url: str) -> bool:
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError:
        return False
    return parts.scheme in ("http", "https") and bool(parts.hostname) and port != 0
