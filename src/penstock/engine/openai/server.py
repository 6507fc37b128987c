"""One server: finds its API, checks its model, and reads its answers and its load."""

import asyncio
import re
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from penstock.core.errors import Overloaded, PenstockError, StepFailed, Unavailable, WrongServerError
from penstock.core.ids import RequestId
from penstock.core.types.instances import Role
from penstock.core.types.load import DeploymentLoads, ModelLoad
from penstock.core.types.requests import Request, SamplingParams
from penstock.core.wire import pack_tokens, unpack_tokens
from penstock.engine.openai.apis.api import UNREADABLE, AnswerPiece, ServerApi
from penstock.engine.openai.apis.completions import Completions
from penstock.engine.openai.apis.llamacpp import LlamaCpp
from penstock.engine.openai.apis.ollama import Ollama
from penstock.engine.openai.apis.sglang import SglangGenerate
from penstock.engine.openai.config import ServerConfig
from penstock.engine.openai.connection import HttpConnection, NotThere, ServerConnection
from penstock.engine.openai.text import TextCodec

_METRIC_LINE = re.compile(r"([A-Za-z_:][\w:]*)(?:\{(.*)\})? +([^ ]+)(?: +-?\d+)?")
_BLOCK_COUNT = re.compile(r'(?:^|,)num_gpu_blocks="([0-9]{1,12})"')
_BLOCK_SIZE = re.compile(r'(?:^|,)block_size="([0-9]{1,6})"')
_RUNNING = ("vllm:num_requests_running", "sglang:num_running_reqs", "llamacpp:requests_processing")
_WAITING = ("vllm:num_requests_waiting", "sglang:num_queue_reqs", "llamacpp:requests_deferred")
_USAGE = ("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc", "sglang:token_usage")
_BLOCKS = "vllm:cache_config_info"
_TOKENS = "sglang:max_total_num_tokens"
_WORKERS_MAX, _COUNT_MAX = 1_000_000, 10**15
_LINE_CHARACTERS_MAX = 16_384
_LINES_MAX = 20_000
"""Lines that are looked at: vLLM has 5,000, and reading goes on at every `load_interval_s`."""


@dataclass(frozen=True, slots=True)
class ServerLoad:
    """A server's load from all of its clients; None for values that the server does not report.

    kv_usage:  share of the KV cache in use, 0 to 1
    kv_tokens: tokens that the KV cache holds
    block_size: tokens of a KV block
    workers:   that share the load; everything is of all of them together
    queued_tokens: prompt tokens not computed yet
    context_tokens: of requests that are answered
    """

    running: int | None = None
    waiting: int | None = None
    kv_usage: float | None = None
    kv_tokens: int | None = None
    block_size: int | None = None
    workers: int = 1
    queued_tokens: int | None = None
    context_tokens: int | None = None


def deployment_load(load: ModelLoad) -> ServerLoad:
    """Give the load of another deployment of Penstock, with each reported number bounded."""
    workers = min(max(load.workers, 1), _WORKERS_MAX)
    size, total = max(load.block_size, 1), max(load.total_blocks, 0)
    return ServerLoad(
        running=_count(load.running_requests),
        waiting=_count(load.waiting_requests),
        kv_usage=min(max(load.active_blocks / total, 0.0), 1.0) if total else None,
        kv_tokens=_count(total * size) or None,
        block_size=size,
        workers=workers,
        queued_tokens=_count(load.queued_prefill_tokens),
        context_tokens=_count(load.context_tokens),
    )


def _count(number: int) -> int:
    return min(max(number, 0), _COUNT_MAX)


def read_load(text: str) -> ServerLoad:
    """Read what is known of vLLM's, SGLang's and llama.cpp's metrics; engines of one server (data parallel) are added.

    TensorRT-LLM answers with the statistics of its latest iterations as JSON, which tell the size of its KV cache.
    """
    if text.lstrip()[:1] == "[":
        return _trtllm_load(text)
    running = waiting = kv_tokens = block_size = None
    usages: list[float] = []
    for name, labels, value in _samples(text):
        if name in _RUNNING:
            running = (running or 0) + round(value)
        elif name in _WAITING:
            waiting = (waiting or 0) + round(value)
        elif name in _USAGE:
            usages.append(value)
        elif name == _BLOCKS:
            blocks, size = _BLOCK_COUNT.search(labels), _BLOCK_SIZE.search(labels)
            if blocks is not None and size is not None:
                block_size = int(size[1])
                kv_tokens = (kv_tokens or 0) + int(blocks[1]) * block_size
        elif name == _TOKENS:
            kv_tokens = (kv_tokens or 0) + round(value)
    usage = min(max(sum(usages) / len(usages), 0.0), 1.0) if usages else None
    return ServerLoad(running, waiting, usage, kv_tokens, block_size)


def _trtllm_load(text: str) -> ServerLoad:
    try:
        iterations = _iterations.decode(text)
    except (msgspec.DecodeError, RecursionError):
        return ServerLoad()
    caches = [each.kv_cache for each in iterations if each.kv_cache is not None]
    if not caches or not 0 <= caches[-1].blocks * caches[-1].block_size <= _COUNT_MAX:
        return ServerLoad()
    return ServerLoad(kv_tokens=caches[-1].blocks * caches[-1].block_size, block_size=caches[-1].block_size)


class _KvCacheStats(msgspec.Struct):
    blocks: int = msgspec.field(name="maxNumBlocks", default=0)
    block_size: int = msgspec.field(name="tokensPerBlock", default=0)


class _Iteration(msgspec.Struct):
    kv_cache: _KvCacheStats | None = msgspec.field(name="kvCacheStats", default=None)


_iterations = msgspec.json.Decoder(list[_Iteration])


def _samples(text: str) -> Iterator[tuple[str, str, float]]:
    """Yield (name, labels, value) of the metrics above; other lines and values that are no count are skipped."""
    wanted = (*_RUNNING, *_WAITING, *_USAGE, _BLOCKS, _TOKENS)
    for line in text.split("\n", _LINES_MAX)[:_LINES_MAX]:
        if not line.startswith(wanted) or len(line) > _LINE_CHARACTERS_MAX:
            continue
        sample = _METRIC_LINE.fullmatch(line.strip())
        if sample is None:
            continue
        try:
            value = float(sample[3])
        except ValueError:
            continue
        if 0 <= value < 1e15:  # neither NaN nor infinite
            yield sample[1], sample[2] or "", value


_SAMPLE = "Hello, world! 12345 naïve 你好 🎉\n\tdef f(x): return x"
_OWNERS = {
    "vllm": "vllm", "sglang": "sglang", "tensorrt_llm": "trtllm", "llamacpp": "llamacpp", "library": "ollama",
    "penstock": "penstock",
}  # fmt: skip
"""APIs by `owned_by` in `/v1/models`."""
SGLANG_TRIAL: dict[str, Any] = {"bootstrap_host": "2.2.2.2", "bootstrap_room": 0}
"""Fields of a request that one SGLang server of a pair answers alone: its `FAKE_BOOTSTRAP_HOST`, as in its own health checks."""
DEPLOYMENT = "penstock"
"""Owner of the models of another deployment of Penstock."""


@dataclass(frozen=True, slots=True)
class ModelAtServer:
    """A model as its server lists it: name, context length (None where the server tells none), and owner."""

    name: str
    context_length: int | None
    owner: str


class EngineServer:
    """A server that runs the model. One event loop owns it."""

    def __init__(
        self,
        url: str,
        config: ServerConfig,
        names: Sequence[str],
        codec: TextCodec,
        *,
        role: Role = Role.AGGREGATED,
        connection: HttpConnection | None = None,
    ) -> None:
        """Describe one; nothing is asked before `check`.

        Args:
            url: where it answers.
            config: limits, and its API if that is known.
            names: names that the model may have there, paths included.
            codec: the model's tokenizer.
            role: its own, of a prefill and decode pair or aggregated.
            connection: to it; None makes one to `url`.

        Raises:
            ConfigError: the key file cannot be read.
        """
        self.url = url
        self.connection: HttpConnection = connection or ServerConnection(url, config.limits, config.api_key())
        self._config = config
        self._names = tuple(names)
        self._codec = codec
        self.role = role
        """Its role in a deployment."""
        self._api: ServerApi | None = None
        self._served: ModelAtServer | None = None

    @property
    def name(self) -> str:
        """The server's name in errors, which clients may read."""
        return self.connection.name

    @property
    def api(self) -> ServerApi:
        """Its API, known after `try_out`."""
        assert self._api is not None, "tried at start"
        return self._api

    @property
    def vocab_size(self) -> int:
        """Size of the vocabulary, with room for a model's padding."""
        return self._codec.vocab_size + _PADDING

    async def close(self) -> None:
        await self.connection.close()

    async def check(self) -> ModelAtServer:
        """Ask whether it is healthy and serves the model.

        Raises:
            Unavailable: it is not healthy, or cannot be reached.
            WrongServerError: it serves others, or asks for another key.
        """
        timeout_s = self._config.health.timeout_s
        try:
            await self.connection.get("/health", timeout_s=timeout_s)
        except NotThere:  # Ollama has none
            pass
        except Overloaded as error:  # loading, or its engine is dead
            raise Unavailable(error.message) from error
        served = await self._find_model(timeout_s)
        if served.owner == DEPLOYMENT:
            speaks = self._config.api in {"auto", DEPLOYMENT}
            served = await self._of_deployment(served) if speaks else replace(served, owner="")
        self._served = served
        return served

    async def try_out(self, served: ModelAtServer) -> None:
        """Find its API unless that is known, compare tokenizers, and ask for one token.

        Raises:
            Unavailable: it does not answer as such a server does.
            WrongServerError: its tokenizer gives other ids, or it cannot transfer KV, which its role needs.
        """
        await self._find_api(served)
        if self.role is not Role.AGGREGATED and transfer_kind(self.api) is None:
            raise WrongServerError(
                f"{self.name}: a prefill or decode server must be vLLM, SGLang or TensorRT-LLM; serve others with --url"
            )

    async def _find_api(self, served: ModelAtServer) -> None:
        await self._compare_tokenizers(served)
        problem: PenstockError | None = None
        for api in self._candidates(served):
            try:
                async with asyncio.timeout(self._config.health.timeout_s):
                    await self._ask_for_one(api)
            except TimeoutError as error:
                raise Unavailable(
                    f"{self.name}: a trial request of one token got no answer within"
                    f" {self._config.health.timeout_s:g} s (health.timeout_s)"
                ) from error
            except Overloaded:  # it serves, and is full
                self._api = api
                return
            except PenstockError as error:
                problem = problem or error
            else:
                self._api = api
                return
        assert problem is not None, "there is a candidate"
        raise Unavailable(f"{self.name}: a trial request of one token failed: {problem.message}") from problem

    async def load(self) -> ServerLoad | None:
        """Read the server's metrics; None where the server has none.

        Raises:
            Unavailable: it does not answer.
        """
        if self._served is not None and self._served.owner == DEPLOYMENT:
            return deployment_load(await self._deployment_load(self._served.name))
        try:
            content = await self.connection.get(
                "/metrics", timeout_s=self._config.health.timeout_s, bytes_max=_METRICS_BYTES_MAX
            )
        except NotThere:
            return None
        return read_load(content.decode("utf-8", "replace"))

    @asynccontextmanager
    async def answer(
        self, request: Request, extra: dict[str, Any], on_sent: Callable[[], None]
    ) -> AsyncIterator[AsyncIterator[AnswerPiece]]:
        """Send a request and yield the pieces of its answer; leaving the context aborts it.

        Args:
            request: its tokens are the prompt.
            extra: fields to add to the body.
            on_sent: called when the request is on its way.
        """
        async with self._opened(self.api, request, extra, on_sent) as pieces:
            yield pieces

    def prompt(self, api: ServerApi, request: Request) -> list[int] | str:
        """Give a request's tokens as the server takes them."""
        token_ids = unpack_tokens(request.token_ids).tolist()
        return token_ids if api.takes_ids else self._codec.prompt_text(token_ids)

    # -- details

    @asynccontextmanager
    async def _opened(
        self, api: ServerApi, request: Request, extra: dict[str, Any], on_sent: Callable[[], None]
    ) -> AsyncIterator[AsyncIterator[AnswerPiece]]:
        body = api.body(request, self.prompt(api, request)) | extra
        headers = {**api.headers, **({} if request.trace is None else request.trace.headers())}
        async with (
            self.connection.stream(api.path, body, on_sent, headers) as lines,
            aclosing(self._pieces(api, request, lines)) as pieces,
        ):
            yield pieces

    async def _pieces(
        self, api: ServerApi, request: Request, lines: AsyncIterator[bytes]
    ) -> AsyncGenerator[AnswerPiece]:
        answer, vocab_size = api.answer(request), self.vocab_size
        async for line in lines:
            piece = answer.read(line)
            if piece is None:
                continue
            if piece.text:
                piece = AnswerPiece(
                    self._codec.spell(piece.text),
                    "",
                    piece.finish_reason,
                    piece.cached_tokens,
                    (),
                    piece.is_last,
                )
            if piece.token_ids and not 0 <= min(piece.token_ids) <= max(piece.token_ids) < vocab_size:
                raise StepFailed(
                    f"{self.name}: sent token ids from {min(piece.token_ids)} to {max(piece.token_ids)}, but this model's"
                    f" end at {self._codec.vocab_size - 1}"
                )
            yield piece

    async def _find_model(self, timeout_s: float) -> ModelAtServer:
        content = await self.connection.get("/v1/models", timeout_s=timeout_s, bytes_max=_MODELS_BYTES_MAX)
        try:
            models = _models.decode(content).data[:_MODELS_MAX]
        except UNREADABLE as error:
            raise Unavailable(f"{self.name}/v1/models: no list of models as OpenAI's ({error})") from error
        wanted = (self._config.model,) if self._config.model is not None else self._names
        short = {_short(name) for name in wanted}
        for exactly in (True, False):
            for model in models:
                said = {model.id, model.root or model.id}
                if (
                    not said.isdisjoint(wanted)
                    if exactly
                    else not {_short(name) for name in said}.isdisjoint(short)
                ):
                    context_length = model.max_model_len
                    if model.owned_by == "llamacpp":
                        context_length = await self._slot_context(timeout_s)
                    if context_length is not None and context_length < 1:
                        context_length = None  # some say 0 or -1 for what they do not know
                    return ModelAtServer(model.id, context_length, model.owned_by or "")
        served = ", ".join(repr(model.id[:_NAME_CHARACTERS_MAX]) for model in models[:8]) or "no model"
        raise WrongServerError(
            f"{self.name}: serves {served}, expected {' or '.join(map(repr, dict.fromkeys(wanted)))}; if it is the same"
            " model, give its name there: --engine-arg model=NAME (penstock router: --set servers.model=NAME)"
        )

    async def _of_deployment(self, served: ModelAtServer) -> ModelAtServer:
        """Check that another deployment has workers of its own. An older deployment without `/load` is treated as any other server.

        Raises:
            Unavailable: it has none now, or does not answer.
        """
        try:
            load = await self._deployment_load(served.name)
        except NotThere:
            return replace(served, owner="")
        if load.workers < 1:
            raise Unavailable(f"{self.name}: no worker of its own serves {served.name!r} now")
        return served

    def load_path(self) -> str:
        """Give the path of another deployment's load."""
        return "/load"

    def take_loads(self, loads: DeploymentLoads) -> None:
        """Look at what another deployment says of itself.

        Raises:
            WrongServerError: it is another one than it should be.
        """

    async def _deployment_load(self, model: str) -> ModelLoad:
        """Ask another deployment of Penstock for a model's load; one without workers where it has none.

        Raises:
            Unavailable: it does not answer, or with something else.
        """
        content = await self.connection.get(self.load_path(), timeout_s=self._config.health.timeout_s)
        try:
            loads = _loads.decode(content)
        except UNREADABLE as error:
            raise Unavailable(f"{self.name}/load: no load of models ({error})") from error
        self.take_loads(loads)
        load = loads.models.get(model, ModelLoad(workers=0, block_size=1))
        if not 0 <= min(msgspec.structs.astuple(load)) <= max(msgspec.structs.astuple(load)) <= _LOAD_MAX:
            raise Unavailable(f"{self.name}/load: {load!r:.200} has numbers that are no counts")
        return load

    async def _slot_context(self, timeout_s: float) -> int | None:
        """Give the context length of a request to llama.cpp, which divides its context between its slots."""
        try:
            content = await self.connection.get("/props", timeout_s=timeout_s)
            return _props.decode(content).default_generation_settings.n_ctx
        except (NotThere, *UNREADABLE):
            return None

    async def _compare_tokenizers(self, served: ModelAtServer) -> None:
        """Compare the ids of a sample where the server tokenizes.

        Raises:
            WrongServerError: they differ.
        """
        expected = self._codec.tokenize(_SAMPLE)
        for body in (
            {"model": served.name, "prompt": _SAMPLE, "add_special_tokens": False},
            {"content": _SAMPLE, "add_special": False},
        ):
            try:
                content = await self.connection.post(
                    "/tokenize", body, timeout_s=self._config.health.timeout_s
                )
                token_ids = _tokenized.decode(content).tokens
            except (PenstockError, *UNREADABLE):
                continue  # it has no such path, or another shape: the ids of its answers are checked at least
            if token_ids and token_ids != expected:
                raise WrongServerError(
                    f"{self.name}: its tokenizer gives other ids than the model's here ({token_ids[:8]} ..., expected"
                    f" {expected[:8]} ...); give the MODEL that it serves"
                )
            if token_ids:
                return

    def _candidates(self, served: ModelAtServer) -> list[ServerApi]:
        """List the APIs that the server may have, the likeliest first."""
        name = served.name
        makers: dict[str, Callable[[], ServerApi]] = {
            "vllm": lambda: Completions(name, "vllm"),
            "trtllm": lambda: Completions(name, "trtllm"),
            "penstock": lambda: Completions(name, "penstock"),
            "sglang": SglangGenerate,
            "llamacpp": LlamaCpp,
            "ollama": lambda: Ollama(name),
            "text": lambda: Completions(name, "text"),
        }
        known = _OWNERS.get(served.owner) if self._config.api == "auto" else self._config.api
        return [makers[known]() for known in ((known,) if known else ("vllm", "text"))]

    async def _ask_for_one(self, api: ServerApi) -> None:
        """Ask for one token after the sample.

        Raises:
            PenstockError: it does not come.
        """
        token_ids = self._codec.tokenize(_SAMPLE)
        request = Request(
            request_id=RequestId("trial"),
            model="",
            token_ids=pack_tokens(token_ids),
            sampling=SamplingParams(max_tokens=1, temperature=0.0),
        )
        room = SGLANG_TRIAL if self.role is not Role.AGGREGATED and isinstance(api, SglangGenerate) else {}
        async with self._opened(api, request, room, lambda: None) as pieces:
            found = False
            async for piece in pieces:
                found |= bool(piece.token_ids or piece.text)
                if piece.finish_reason is not None:
                    return
        raise StepFailed("the answer ended without a finish reason" if found else "the answer was empty")


_NAME_CHARACTERS_MAX = 200
_MODELS_BYTES_MAX, _MODELS_MAX = 1 << 20, 2048
"""The list is read at every health check: more would take longer than 10 ms. vLLM lists its adapters too, in 0.6 KB each."""
_METRICS_BYTES_MAX = 2 << 20
"""Reading more at every `load_interval_s` would delay the streams; vLLM has 100 to 500 KB."""
_LOAD_MAX = 10**12
"""Of any count: tokens of context of a million workers."""
_PADDING = 4096
"""Vocabularies of models are padded beyond their tokenizer's."""


def transfer_kind(api: ServerApi) -> str | None:
    """Name how a server with this API transfers KV; None: not at all, as far as is known here."""
    if isinstance(api, SglangGenerate):
        return "http-sglang-1"
    if isinstance(api, Completions) and api.dialect in {"vllm", "trtllm"}:
        return f"http-{api.dialect}-1"
    return None


def _short(name: str) -> str:
    """Give the last part of a path or hub name, in lower case and without a default tag (`:latest`)."""
    return name.rstrip("/").rpartition("/")[2].removesuffix(":latest").removesuffix(".gguf").lower()


class _Model(msgspec.Struct):
    id: str
    root: str | None = None
    owned_by: str | None = None
    max_model_len: int | None = None


class _Settings(msgspec.Struct):
    n_ctx: int | None = None


class _Props(msgspec.Struct):
    default_generation_settings: _Settings


class _Models(msgspec.Struct):
    data: list[_Model]


class _Tokenized(msgspec.Struct):
    tokens: list[int] = []


_props = msgspec.json.Decoder(_Props)
_models = msgspec.json.Decoder(_Models)
_loads = msgspec.json.Decoder(DeploymentLoads)
_tokenized = msgspec.json.Decoder(_Tokenized)
