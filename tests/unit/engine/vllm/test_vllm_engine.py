"""The engine over a fake of vLLM's core client: what it sends, and what it makes of answers."""

import asyncio
from collections.abc import Coroutine
from types import SimpleNamespace
from typing import Any

from penstock.core.types.requests import FinishReason, Request, SamplingParams
from penstock.core.wire import pack_tokens
from penstock.engine.spec import EngineSpec
from penstock.engine.vllm.engine import VllmEngine


class FakeCore:
    """Notes what is sent; its answers are what a test puts."""

    def __init__(self) -> None:
        self.vllm_config = SimpleNamespace(model_config=SimpleNamespace(get_vocab_size=lambda: 512))
        self.sent: list[Any] = []
        self.answers: asyncio.Queue[Any] = asyncio.Queue()
        self.cannot_encode: set[str] = set()

    async def add_request_async(self, request: Any) -> None:
        if request.request_id in self.cannot_encode:
            raise OverflowError("Integer value out of range")
        self.sent.append(request)

    async def abort_requests_async(self, ids: list[str]) -> None:
        self.sent.append(("abort", ids))

    async def get_output_async(self) -> Any:
        return await self.answers.get()


class FakeInputs:
    def make(self, vllm_id: str, request: Request, arguments: dict[str, Any], rank: int) -> Any:
        return SimpleNamespace(request_id=vllm_id, arguments=arguments)


class Engine(VllmEngine):
    """With what `start` would find, and no vLLM."""

    def stand_in(self, core: FakeCore) -> None:
        self._core, self._inputs = core, FakeInputs()  # type: ignore[assignment]


def request(request_id: str) -> Request:
    return Request(
        request_id=request_id, model="m", token_ids=pack_tokens([1, 2]), sampling=SamplingParams(max_tokens=3)
    )


def run(scene: Coroutine[Any, Any, None]) -> None:
    async def limited() -> None:
        async with asyncio.timeout(10):
            await scene

    asyncio.run(limited())


def test_a_request_that_cannot_be_encoded_ends_with_the_reason_and_others_go_on() -> None:
    async def scene() -> None:
        core, engine = FakeCore(), Engine(EngineSpec(model="m", block_size=32))
        engine.stand_in(core)
        core.cannot_encode.add("bad-0")
        engine.submit(request("bad"))
        engine.submit(request("good"))
        step = await anext(engine.steps())
        (delta,) = step.deltas
        assert (delta.request_id, delta.finish_reason) == ("bad", FinishReason.ERROR)
        assert delta.error is not None
        assert delta.error.code == "invalid_request_error"
        assert "cannot be sent this request: Integer value out of range" in delta.error.message
        assert [sent.request_id for sent in core.sent] == ["good-1"]
        assert step.load is not None
        assert step.load.waiting_requests + step.load.running_requests == 1
        engine.submit(request("bad"))  # its id is free again

    run(scene())
