"""Measures an endpoint by URL; times include HTTP, queue and tokenizer, as for its users."""

import asyncio
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, count
from typing import Any, Self

import aiohttp
import msgspec

from penstock.bench.client import Client, MeasuredRequest, RequestFailure, ServerAddress
from penstock.bench.load import PROBES, PromptScale, text
from penstock.core.config import nearest
from penstock.core.errors import ConfigError, PenstockError, Unavailable
from penstock.perf.profile import DecodePoint, PrefillPoint
from penstock.profiling.target import SETTLING_STEPS, DecodeCell, Description, Limits, PrefillCell

TARGET = "ENGINE_OR_URL"
_LIST_TIMEOUT_S = 10.0
_PROBE_TIMEOUT_S = 60.0
_PROBE_TOKENS = 16
_EXTENSIONS = {"ignore_eos": True, "min_tokens": 0}
_REFUSED = {"http_400", "http_404", "http_405", "http_422", "http_501"}
_UNKNOWN_SCALE = PromptScale(overhead_tokens=0.0, tokens_per_word=1.3)


class _Model(msgspec.Struct):
    id: str
    max_model_len: int | None = None


class _Models(msgspec.Struct):
    data: list[_Model]


@dataclass(frozen=True, slots=True)
class EndpointDialect:
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
    EndpointDialect(path, fixed) for path in ("completions", "chat/completions") for fixed in (True, False)
)


@dataclass(frozen=True, slots=True)
class ProfiledEndpoint:
    """A probed endpoint with a client that keeps connections; close it at the end."""

    url: str
    model: str
    server: str
    context_length: int | None
    dialect: EndpointDialect
    scale: PromptScale
    client: Client

    async def ask(self, prompt: str, output_tokens: int) -> MeasuredRequest:
        """Send one request and wait for the end of its stream.

        Raises:
            Unavailable: the request failed.
        """
        exchange = await self.client.send(self.dialect.body(self.model, prompt, output_tokens))
        if exchange.failure == RequestFailure.TIMEOUT:
            raise Unavailable(
                f"{self.url} stopped answering: {exchange.message}; is it stuck? A slow one needs a longer --request-timeout"
            )
        if exchange.failure is not None:
            raise Unavailable(f"{self.url}: {_failure_text(exchange)}")
        return exchange


async def connect(
    url: str, model: str | None, api_key: str | None, *, request_timeout_s: float
) -> ProfiledEndpoint:
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
    address = ServerAddress.parse(url, "models", flag=TARGET)
    base = f"{'https' if address.secure else 'http'}://{address.host}:{address.port}"
    listed, server = await _list_models(f"{base}{address.path}", url, api_key)
    chosen = _choose(listed, model, url)
    refusals = []
    for dialect in _DIALECTS:
        client = Client(
            ServerAddress.parse(url, dialect.path, flag=TARGET), timeout_s=request_timeout_s, api_key=api_key
        )
        try:
            async with asyncio.timeout(_PROBE_TIMEOUT_S):
                exchange = await client.send(dialect.body(chosen.id, PROBES[1], _PROBE_TOKENS))
                if exchange.failure is None:
                    _check_streams(exchange, url)
                    scale = await _scale(client, dialect, chosen.id, exchange)
                    return ProfiledEndpoint(
                        base, chosen.id, server, chosen.max_model_len, dialect, scale, client
                    )
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


def _check_streams(exchange: MeasuredRequest, url: str) -> None:
    if exchange.output_tokens > 1 and not exchange.gaps_s:
        raise ConfigError(
            f"{TARGET}: {url}: {exchange.output_tokens} tokens came in one piece; it has to stream token by token"
            " (a proxy in between may hold the stream back)"
        )


async def _scale(client: Client, dialect: EndpointDialect, model: str, long: MeasuredRequest) -> PromptScale:
    """Fit tokens per word to the server's token counts."""
    short = await client.send(dialect.body(model, PROBES[0], 1))
    if short.failure is not None or short.usage is None or long.usage is None:
        return _UNKNOWN_SCALE
    return PromptScale.fit((short.usage.prompt_tokens, long.usage.prompt_tokens))


def _wrong(exchange: MeasuredRequest, url: str, model: str) -> PenstockError:
    failure = exchange.failure or ""
    if failure == RequestFailure.CONNECT:
        return Unavailable(f"{TARGET}: {url}: nobody answers ({exchange.message}); is the server started?")
    if failure in {"http_401", "http_403"}:
        return ConfigError(f"--api-key: {url} answers {failure.removeprefix('http_')}: {exchange.message}")
    if failure in _REFUSED:
        return ConfigError(
            f"--model {model}: {url} answers {failure.removeprefix('http_')}: {exchange.message}"
        )
    if failure in {RequestFailure.DISCONNECTED, RequestFailure.MALFORMED}:
        return ConfigError(
            f"{TARGET}: {url}: its answer is no stream of server-sent events ({exchange.message});"
            " it has to stream token by token"
        )
    return Unavailable(f"{TARGET}: {url}: a first request failed: {_failure_text(exchange)}")


def _failure_text(exchange: MeasuredRequest) -> str:
    return f"{exchange.failure}: {exchange.message}" if exchange.message else str(exchange.failure)


def _reason(error: BaseException) -> str:
    return getattr(error, "strerror", None) or str(error) or type(error).__name__


_STEPS_MIN = 4
_BLOCK_TOKENS = 64
"""Cached prefixes are multiples of this; the server reports how many tokens were cached."""


class EndpointTarget:
    """Requests streams of a known length. Prompts with a timed first token share no prefix with others.

    Decode cells and cached prefixes use a library of prompts, one per sequence of a batch, sent to the server before the
    measurement.
    """

    def __init__(self, endpoint: ProfiledEndpoint, *, hardware: str, run: str) -> None:
        """Create the target.

        Args:
            endpoint: result of `connect`.
            hardware: hardware name given by the user.
            run: id that makes prompts differ from those of earlier runs, which may be cached.
        """
        self._endpoint = endpoint
        self._run = run
        self._numbers = count()
        self._library_tokens: dict[int, int] = {}  # by row: tokens already sent to the server
        self.limits = Limits(
            context_length=endpoint.context_length,
            block_size=_BLOCK_TOKENS,
            caches=False,
            batches_prompts=False,
        )
        self.description = Description(
            engine=endpoint.url,
            model=endpoint.model,
            engine_version=endpoint.server,
            hardware=hardware,
            machine="",
        )

    async def __aenter__(self) -> Self:
        """Check whether the server reports cached tokens."""
        try:
            for _ in range(2):
                exchange = await self._endpoint.ask(self._library(0, 4 * _BLOCK_TOKENS), 1)
        except BaseException:
            self._endpoint.client.close()
            raise
        if exchange.cached_tokens:
            self.limits = Limits(
                context_length=self.limits.context_length, block_size=_BLOCK_TOKENS, batches_prompts=False
            )
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        self._endpoint.client.close()

    async def prefill(self, cell: PrefillCell) -> PrefillPoint:
        prefix = ""
        if cell.cached_tokens:
            await self._show(1, cell.cached_tokens)
            prefix = self._library(0, cell.cached_tokens) + " "
        overhead = 0.0 if prefix else self._endpoint.scale.overhead_tokens
        words = self._endpoint.scale.words(cell.new_tokens - overhead)
        prompt = prefix + text(f"{self._run}/{next(self._numbers)}", words)
        exchange = await self._endpoint.ask(prompt, 1)
        cached = exchange.cached_tokens or 0
        total = _prompt_tokens(exchange, cell.new_tokens + cell.cached_tokens)
        return PrefillPoint(new_tokens=total - cached, cached_tokens=cached, seconds=exchange.ttft_s)

    async def decode(self, cell: DecodeCell) -> DecodePoint:
        await self._show(cell.batch, cell.prompt_tokens)
        prompts = [self._library(row, cell.prompt_tokens) for row in range(cell.batch)]
        exchanges = await self._ask_all(prompts, cell.generated_tokens)
        times = [list(accumulate(e.gaps_s, initial=e.first_token_s or 0.0)) for e in exchanges]
        begin_s = max(of[min(SETTLING_STEPS, len(of) - 1)] for of in times)
        end_s = min(of[-1] for of in times)
        steps_s, contexts = [], []
        for exchange, of in zip(exchanges, times, strict=True):
            within = [index for index, at_s in enumerate(of) if begin_s <= at_s <= end_s]
            tokens_per_chunk = exchange.output_tokens / len(of)
            if len(within) < _STEPS_MIN:
                raise Unavailable(
                    f"{self._endpoint.url}: only {len(within)} parts of an answer of {exchange.output_tokens} tokens"
                    f" came while all {cell.batch} were streaming; take smaller --batches, or an endpoint that knows"
                    " ignore_eos"
                )
            first, last = within[0], within[-1]
            steps_s.append((of[last] - of[first]) / (last - first) / tokens_per_chunk)
            prompt_tokens = _prompt_tokens(exchange, cell.prompt_tokens)
            contexts.append(prompt_tokens + tokens_per_chunk * (first + last) / 2)
        return DecodePoint(
            batch=cell.batch, context=round(statistics.mean(contexts)), seconds=statistics.median(steps_s)
        )

    def _library(self, row: int, tokens: int) -> str:
        """Make about the first `tokens` tokens of a row's prompt."""
        scale = self._endpoint.scale
        return text(f"{self._run}/library/{row}", scale.words(tokens - scale.overhead_tokens))

    async def _show(self, rows: int, tokens: int) -> None:
        """Send rows not sent yet, so that they are in the server's prefix cache."""
        unseen = [row for row in range(rows) if self._library_tokens.get(row, 0) < tokens]
        await self._ask_all([self._library(row, tokens) for row in unseen], 1)
        for row in unseen:
            self._library_tokens[row] = tokens

    async def _ask_all(self, prompts: Sequence[str], output_tokens: int) -> list[MeasuredRequest]:
        """Send all requests at once and wait for all.

        Raises:
            Unavailable: a request failed; the others are cancelled.
        """
        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(self._endpoint.ask(prompt, output_tokens)) for prompt in prompts]
        except ExceptionGroup as failed:
            raise failed.exceptions[0] from None
        return [task.result() for task in tasks]


def _prompt_tokens(exchange: MeasuredRequest, expected: int) -> int:
    """Give the server's count of prompt tokens, else the expected one."""
    counted = 0 if exchange.usage is None else exchange.usage.prompt_tokens
    return counted or expected
