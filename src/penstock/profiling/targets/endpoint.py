"""Probes an OpenAI-compatible endpoint before the measurement: model, supported fields, token counts."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import aiohttp
import msgspec

from penstock.bench.client import Address, Client
from penstock.bench.exchange import Exchange, Failure
from penstock.bench.prompts import PROBES, Scale
from penstock.core.config import nearest
from penstock.core.errors import ConfigError, PenstockError, Unavailable

TARGET = "ENGINE_OR_URL"
_LIST_TIMEOUT_S = 10.0
_PROBE_TIMEOUT_S = 60.0
_PROBE_TOKENS = 16
_EXTENSIONS = {"ignore_eos": True, "min_tokens": 0}
_REFUSED = {"http_400", "http_404", "http_405", "http_422", "http_501"}
_UNKNOWN_SCALE = Scale(overhead_tokens=0.0, tokens_per_word=1.3)


class _Model(msgspec.Struct):
    id: str
    max_model_len: int | None = None


class _Models(msgspec.Struct):
    data: list[_Model]


@dataclass(frozen=True, slots=True)
class Dialect:
    """Path and fields that the endpoint supports.

    path:          completions or chat/completions
    fixed_lengths: whether it accepts `ignore_eos` and `min_tokens`, extensions of most servers
    """

    path: str
    fixed_lengths: bool

    def body(self, model: str, prompt: str, output_tokens: int) -> bytes:
        asked: dict[str, Any] = (
            {"prompt": prompt}
            if self.path == "completions"
            else {"messages": [{"role": "user", "content": prompt}]}
        )
        if self.fixed_lengths:
            asked |= _EXTENSIONS | {"min_tokens": output_tokens}
        return msgspec.json.encode(
            asked
            | {
                "model": model,
                "max_tokens": output_tokens,
                "temperature": 0.0,
                "stream": True,
                "stream_options": {"include_usage": True},
            }
        )


_DIALECTS = tuple(
    Dialect(path, fixed) for path in ("completions", "chat/completions") for fixed in (True, False)
)


@dataclass(frozen=True, slots=True)
class Endpoint:
    """A probed endpoint with a client that keeps connections; close it at the end."""

    url: str
    model: str
    server: str
    context_length: int | None
    dialect: Dialect
    scale: Scale
    client: Client

    async def ask(self, prompt: str, output_tokens: int) -> Exchange:
        """Send one request and wait for the end of its stream.

        Raises:
            Unavailable: the request failed.
        """
        exchange = await self.client.send(self.dialect.body(self.model, prompt, output_tokens))
        if exchange.failure == Failure.TIMEOUT:
            raise Unavailable(
                f"{self.url} stopped answering: {exchange.message}; is it stuck? A slow one needs a longer --request-timeout"
            )
        if exchange.failure is not None:
            raise Unavailable(f"{self.url}: {_failure_text(exchange)}")
        return exchange


async def connect(url: str, model: str | None, api_key: str | None, *, request_timeout_s: float) -> Endpoint:
    """Connect to a URL and probe the endpoint.

    Args:
        url: with or without /v1.
        model: model name; None takes the only listed one.
        api_key: sent as a bearer token.
        request_timeout_s: longest seconds of one request, to its last byte.

    Raises:
        ConfigError: invalid URL, unknown model, or the endpoint does not stream.
        Unavailable: no server answers, or with an invalid answer.
    """
    address = Address.parse(url, "models", flag=TARGET)
    base = f"{'https' if address.secure else 'http'}://{address.host}:{address.port}"
    listed, server = await _list_models(f"{base}{address.path}", url, api_key)
    chosen = _choose(listed, model, url)
    refusals = []
    for dialect in _DIALECTS:
        client = Client(
            Address.parse(url, dialect.path, flag=TARGET), timeout_s=request_timeout_s, api_key=api_key
        )
        try:
            async with asyncio.timeout(_PROBE_TIMEOUT_S):
                exchange = await client.send(dialect.body(chosen.id, PROBES[1], _PROBE_TOKENS))
                if exchange.failure is None:
                    _check_streams(exchange, url)
                    scale = await _scale(client, dialect, chosen.id, exchange)
                    return Endpoint(base, chosen.id, server, chosen.max_model_len, dialect, scale, client)
        except TimeoutError as error:
            client.close()
            raise Unavailable(f"{TARGET}: {url}: no whole answer in {_PROBE_TIMEOUT_S:g} s") from error
        except BaseException:
            client.close()
            raise
        client.close()
        if exchange.failure not in _REFUSED:
            raise _wrong(exchange, url, chosen.id)
        refusals.append(exchange)
    raise _wrong(refusals[0], url, chosen.id)


async def _list_models(models_url: str, url: str, api_key: str | None) -> tuple[list[_Model], str]:
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    try:
        async with (
            asyncio.timeout(_LIST_TIMEOUT_S),
            aiohttp.ClientSession() as session,
            session.get(models_url, headers=headers) as response,
        ):
            body = await response.read()
    except TimeoutError as error:
        raise Unavailable(f"{TARGET}: {url}: no answer to GET /v1/models in {_LIST_TIMEOUT_S:g} s") from error
    except (aiohttp.ClientError, OSError) as error:
        raise Unavailable(
            f"{TARGET}: {url}: nobody answers ({_reason(error)}); is the server started?"
        ) from error
    if response.status in {401, 403}:
        raise ConfigError(f"--api-key: {url} answers {response.status} to GET /v1/models")
    try:
        models = msgspec.json.decode(body, type=_Models).data if response.ok else []
    except msgspec.MsgspecError:
        models = []
    return models, response.headers.get("Server", "")


def _choose(listed: Sequence[_Model], model: str | None, url: str) -> _Model:
    known = [entry.id for entry in listed]
    if model is None:
        if len(listed) != 1:
            said = (
                f"lists {len(listed)} models ({', '.join(known[:5])}); name one with --model"
                if listed
                else "does not list its models; name one with --model, or check that it serves /v1/models"
            )
            raise ConfigError(f"{TARGET}: {url} {said}")
        return listed[0]
    found = next((entry for entry in listed if entry.id == model), None)
    if found is None and listed:
        raise ConfigError(f"--model: {url} has no {model!r}{nearest(model, known)}")
    return found or _Model(id=model)


def _check_streams(exchange: Exchange, url: str) -> None:
    if exchange.output_tokens > 1 and not exchange.gaps_s:
        raise ConfigError(
            f"{TARGET}: {url}: {exchange.output_tokens} tokens came in one piece; it has to stream token by token"
            " (a proxy in between may hold the stream back)"
        )


async def _scale(client: Client, dialect: Dialect, model: str, long: Exchange) -> Scale:
    """Fit tokens per word to the server's token counts."""
    short = await client.send(dialect.body(model, PROBES[0], 1))
    if short.failure is not None or short.usage is None or long.usage is None:
        return _UNKNOWN_SCALE
    return Scale.fit((short.usage.prompt_tokens, long.usage.prompt_tokens))


def _wrong(exchange: Exchange, url: str, model: str) -> PenstockError:
    failure = exchange.failure or ""
    if failure == Failure.CONNECT:
        return Unavailable(f"{TARGET}: {url}: nobody answers ({exchange.message}); is the server started?")
    if failure in {"http_401", "http_403"}:
        return ConfigError(f"--api-key: {url} answers {failure.removeprefix('http_')}: {exchange.message}")
    if failure in _REFUSED:
        return ConfigError(
            f"--model {model}: {url} answers {failure.removeprefix('http_')}: {exchange.message}"
        )
    if failure in {Failure.DISCONNECTED, Failure.MALFORMED}:
        return ConfigError(
            f"{TARGET}: {url}: its answer is no stream of server-sent events ({exchange.message});"
            " it has to stream token by token"
        )
    return Unavailable(f"{TARGET}: {url}: a first request failed: {_failure_text(exchange)}")


def _failure_text(exchange: Exchange) -> str:
    return f"{exchange.failure}: {exchange.message}" if exchange.message else str(exchange.failure)


def _reason(error: BaseException) -> str:
    return getattr(error, "strerror", None) or str(error) or type(error).__name__
