"""A prefill or decode server, which transfers KV to or from servers of its own kind by itself."""

import random

import msgspec

from penstock.core.errors import Overloaded
from penstock.core.types.instances import EngineInfo
from penstock.core.types.requests import Delta, FinishReason, KvHandle, Request
from penstock.core.wire import num_tokens
from penstock.engine.openai.apis.completions import Completions
from penstock.engine.openai.apis.sglang import SglangGenerate
from penstock.engine.openai.config import ServerConfig
from penstock.engine.openai.engine import ServerEngine, Serving
from penstock.engine.openai.pairs import (
    VLLM_PREFILL,
    fields_of,
    sglang_handle,
    transfer_kind,
    vllm_handle,
)
from penstock.engine.openai.server import Server
from penstock.engine.openai.streams import Stream


class PairedServerEngine(ServerEngine):
    """Implements `NativeKvTransfer` too, with vLLM's `kv_transfer_params` or SGLang's bootstrap rooms."""

    def __init__(
        self, server: Server, config: ServerConfig, serving: Serving, *, rng: random.Random | None = None
    ) -> None:
        """Make an engine; `rng` chooses SGLang's rooms."""
        super().__init__(server, config, serving)
        self._rng = rng or random.SystemRandom()

    async def start(self) -> EngineInfo:
        info = await super().start()
        if isinstance(self._server.api, SglangGenerate):
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

    async def _compute(self, stream: Stream) -> None:
        if not stream.request.prefill_only:
            await super()._compute(stream)
        elif isinstance(self._server.api, SglangGenerate):
            await self._prefill_beside(stream)
        else:
            await self._prefill_before(stream)

    async def _prefill_before(self, stream: Stream) -> None:
        """Compute a prompt with vLLM; its answer says where the decode server finds the KV."""
        api, server, request = self._server.api, self._server, stream.request
        assert isinstance(api, Completions), "checked at start"
        body = api.whole_body(request, server.prompt(api, request)) | VLLM_PREFILL
        content = await server.connection.post(
            api.path, body, timeout_s=self._config.limits.silence_s, on_sent=self._begun(stream)
        )
        self._end_prefill(stream, vllm_handle(content, num_tokens(request.token_ids)))

    async def _prefill_beside(self, stream: Stream) -> None:
        """Give the decode worker a bootstrap room at once: SGLang's prefill ends when the decode server has fetched the KV."""
        handle = sglang_handle(
            self._server.url, self._config, num_tokens(stream.request.token_ids), self._rng
        )
        room = fields_of(handle.payload)
        begun = self._begun(stream)

        def sent() -> None:
            begun()
            stream.keeps = True
            self._end_prefill(stream, handle)

        async with self._server.answer(stream.request, room, sent) as pieces:
            async for _ in pieces:  # its one token is the decode server's to give
                pass

    def _end_prefill(self, stream: Stream, handle: KvHandle) -> None:
        self._push(
            stream,
            Delta(request_id=stream.request.request_id, finish_reason=FinishReason.LENGTH, kv=handle),
        )
