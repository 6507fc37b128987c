"""A prefill or decode server, which transfers KV to or from servers of its own kind by itself.

vLLM: the prefill's answer has `kv_transfer_params`, which go into the decode request as they are. TensorRT-LLM: the answer to a
context-only request has `disaggregated_params`, which go into a generation-only request. SGLang: both requests get one bootstrap
host, port and room, and run at the same time.
"""

import random
from typing import Any
from urllib.parse import urlsplit

import msgspec

from penstock.core.errors import Overloaded, StepFailed
from penstock.core.types.instances import EngineInfo, Role
from penstock.core.types.requests import Delta, FinishReason, KvHandle, Request
from penstock.core.wire import NO_TOKENS, num_tokens, pack_tokens
from penstock.engine.openai.apis.api import UNREADABLE, ServerApi, TokenId, finish_of
from penstock.engine.openai.apis.completions import Completions
from penstock.engine.openai.apis.sglang import SglangGenerate
from penstock.engine.openai.config import ServerConfig
from penstock.engine.openai.engine import ServerEngine, ServerStream, Serving
from penstock.engine.openai.server import EngineServer, transfer_kind

KV_TTL_S = 60.0
"""Time in which the decode worker must fetch the KV; vLLM's own limit is longer (VLLM_NIXL_ABORT_REQUEST_TIMEOUT, 480 s)."""
_VLLM_PARAMS = "kv_transfer_params"
_TRTLLM_PARAMS = "disaggregated_params"
_ONE_TOKEN: dict[str, Any] = {"max_tokens": 1, "min_tokens": 1}
"""Fields of a request for a prefill: its token is the decode server's to give."""
_VLLM_PREFILL: dict[str, Any] = _ONE_TOKEN | {
    _VLLM_PARAMS: {
        "do_remote_decode": True,
        "do_remote_prefill": False,
        "remote_engine_id": None,
        "remote_block_ids": None,
        "remote_host": None,
        "remote_port": None,
    }
}
"""Fields of a prefill for another worker, as vLLM's NIXL connector takes them."""
_TRTLLM_PREFILL: dict[str, Any] = {_TRTLLM_PARAMS: {"request_type": "context_only"}}
_WHOLE: dict[str, Any] = {"stream": False, "stream_options": None, "max_completion_tokens": None}
"""Fields of a prefill request whose answer is short, whatever the client asked for."""
_ROOMS = 1 << 62


class PairedServerEngine(ServerEngine):
    """Implements `NativeKvTransfer` too."""

    def __init__(
        self,
        server: EngineServer,
        config: ServerConfig,
        serving: Serving,
        *,
        rng: random.Random | None = None,
    ) -> None:
        """Make an engine; `rng` chooses SGLang's rooms."""
        super().__init__(server, config, serving)
        self._rng = rng or random.SystemRandom()

    async def start(self) -> EngineInfo:
        info = await super().start()
        if isinstance(self._server.api, SglangGenerate) and self._server.role is not Role.AGGREGATED:
            info = self._info = msgspec.structs.replace(info, transferred_prompts_only=True)
        return info

    def submit(self, request: Request) -> None:
        needs_kv = self._info is not None and self._info.transferred_prompts_only and not request.prefill_only
        if needs_kv and (request.kv is None or not request.kv.payload):
            raise Overloaded(
                f"{self._server.url}: SGLang's decode servers compute no prompts, and no prefill server has; see that one is ready",
                retry_after_s=1.0,
            )
        super().submit(request)

    def kv_transfer_kind(self) -> str:
        kind = transfer_kind(self._server.api)
        assert kind is not None, "checked at start"
        return kind

    async def _compute(self, stream: ServerStream) -> None:
        if not stream.request.prefill_only or self._server.role is Role.AGGREGATED:
            await super()._compute(stream)
        elif isinstance(self._server.api, SglangGenerate):
            await self._prefill_beside(stream)
        else:
            await self._prefill_before(stream)

    async def _prefill_before(self, stream: ServerStream) -> None:
        """Compute a prompt with vLLM or TensorRT-LLM; its answer says where the decode server finds the KV."""
        api, server, request = self._server.api, self._server, stream.request
        assert isinstance(api, Completions), "checked at start"
        is_vllm = api.dialect == "vllm"
        fields = _VLLM_PREFILL if is_vllm else _TRTLLM_PREFILL
        content = await server.connection.post(
            api.path,
            api.whole_body(request, server.prompt(api, request)) | fields,
            timeout_s=self._config.limits.silence_s,
            on_sent=self._begun(stream),
        )
        self._end_prefill(stream, _vllm_end(content, request) if is_vllm else _trtllm_end(content, request))

    async def _prefill_beside(self, stream: ServerStream) -> None:
        """Give the decode worker a bootstrap room at once: SGLang's prefill ends when the decode server has fetched the KV."""
        ranks = self._serving.ranks
        room = sglang_room(self._server.url, self._config, self._rng, ranks=ranks, rank=stream.rank)
        payload = msgspec.json.encode(room)
        end = _end(
            stream.request, kv=KvHandle.native(payload, num_tokens(stream.request.token_ids), KV_TTL_S)
        )
        begun = self._begun(stream)

        def sent() -> None:
            begun()
            stream.keeps = True
            self._end_prefill(stream, end)

        async with self._server.answer(stream.request, room, sent) as pieces:
            async for piece in pieces:  # its one token is the decode server's to give
                stream.note_cached(piece)
        self._count_prompt(stream)

    def _end_prefill(self, stream: ServerStream, end: Delta) -> None:
        if not stream.keeps:
            self._count_prompt(stream)
        self._push(stream, end)


def sglang_room(
    url: str, config: ServerConfig, rng: random.Random, *, ranks: int = 1, rank: int = 0
) -> dict[str, Any]:
    """Choose a bootstrap room at an SGLang prefill server; both requests have these fields.

    Of several data-parallel ranks, number `room % ranks` computes the prompt, by which decode servers find it.
    """
    return {
        "bootstrap_host": config.bootstrap_host or urlsplit(url).hostname or "",
        "bootstrap_port": config.bootstrap_port,
        "bootstrap_room": rng.randrange(_ROOMS) // ranks * ranks + rank,
    }


def has_gateway_fields(api: ServerApi) -> bool:
    """Say whether `http_transfer` describes transfers between servers with this API."""
    return isinstance(api, SglangGenerate) or (isinstance(api, Completions) and api.dialect == "vllm")


def http_transfer(
    url: str, api: ServerApi, config: ServerConfig, rng: random.Random
) -> tuple[dict[str, Any], dict[str, Any], tuple[str, ...]]:
    """Make the fields of one transfer from a prefill server, for a gateway that asks both servers over their OpenAI API.

    Returns:
        fields of the prefill request, fields of the decode request, and fields that go from the prefill's answer into the decode
        request. None as a value replaces the client's own.
    """
    if isinstance(api, SglangGenerate):
        room = sglang_room(url, config, rng)
        return _WHOLE | _ONE_TOKEN | room, room, ()
    return _WHOLE | _VLLM_PREFILL, {}, (_VLLM_PARAMS,)


def _vllm_end(content: bytes, request: Request) -> Delta:
    """Read the answer to a vLLM prefill.

    Raises:
        StepFailed: it has no `kv_transfer_params`.
    """
    params = _decoded(content).kv_transfer_params
    if not params:
        raise StepFailed(
            "the prefill server gave no kv_transfer_params; start it with --kv-transfer-config, kv_role kv_producer or kv_both"
        )
    return _handed_over(request, {_VLLM_PARAMS: params})


def _trtllm_end(content: bytes, request: Request) -> Delta:
    """Read the answer to a context-only request of TensorRT-LLM.

    An answer that ends with its first token has no generation request. Neither has one whose first token's logprobs the server does
    not pass on: then the decode worker computes the prompt itself.

    Raises:
        StepFailed: it has no `disaggregated_params`.
    """
    choices = _decoded(content).choices
    params = choices[0].disaggregated_params if choices else None
    if not choices or params is None:
        raise StepFailed(
            "the prefill server gave no disaggregated_params; start it with cache_transceiver_config: {backend: DEFAULT}"
        )
    choice = choices[0]
    reason = (
        FinishReason.LENGTH if choice.finish_reason == "not_finished" else finish_of(choice.finish_reason)
    )
    if reason is FinishReason.STOP:
        return _end(request, reason, token_ids=choice.token_ids or [])
    if request.sampling.logprobs is not None and not params.get("first_gen_log_probs"):
        return _end(request)
    said = {name: value for name, value in params.items() if value is not None}
    return _handed_over(request, {_TRTLLM_PARAMS: said | {"request_type": "generation_only"}})


def _handed_over(request: Request, fields: dict[str, Any]) -> Delta:
    payload = msgspec.json.encode(fields)
    return _end(request, kv=KvHandle.native(payload, num_tokens(request.token_ids), KV_TTL_S))


def _end(
    request: Request,
    reason: FinishReason = FinishReason.LENGTH,
    *,
    token_ids: list[int] | None = None,
    kv: KvHandle | None = None,
) -> Delta:
    tokens = pack_tokens(token_ids) if token_ids else NO_TOKENS
    return Delta(request_id=request.request_id, token_ids=tokens, finish_reason=reason, kv=kv)


def _decoded(content: bytes) -> "_Prefilled":
    try:
        return _prefilled.decode(content)
    except UNREADABLE as error:
        raise StepFailed(f"the prefill server's answer cannot be read ({error})") from error


class _PrefilledChoice(msgspec.Struct):
    finish_reason: str | None = None
    token_ids: list[TokenId] | None = None
    disaggregated_params: dict[str, Any] | None = None


class _Prefilled(msgspec.Struct):
    kv_transfer_params: dict[str, Any] | None = None
    choices: list[_PrefilledChoice] = []


_prefilled = msgspec.json.Decoder(_Prefilled)
