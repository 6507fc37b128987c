"""The engine over a fake of vLLM's core client: what it sends, and what it makes of answers."""

import asyncio
import re
from collections.abc import Coroutine
from types import SimpleNamespace
from typing import Any

import pytest

from penstock.core.errors import EngineError, PenstockError, RequestError
from penstock.core.types.requests import FinishReason, MediaPrompt, Request, SamplingParams
from penstock.core.wire import pack_tokens
from penstock.engine.spec import EngineSpec
from penstock.engine.vllm.engine import VllmEngine
from penstock.engine.vllm.requests import MediaReader
from penstock.seams import Sleeping


class FakeCore:
    """Notes what is sent; its answers are what a test puts."""

    def __init__(self, *, sleep_mode: bool = False) -> None:
        self.vllm_config = SimpleNamespace(
            model_config=SimpleNamespace(get_vocab_size=lambda: 512, enable_sleep_mode=sleep_mode)
        )
        self.sent: list[Any] = []
        self.answers: asyncio.Queue[Any] = asyncio.Queue()
        self.fails: dict[str, BaseException] = {}
        """By request id in vLLM."""

    async def add_request_async(self, request: Any) -> None:
        if request.request_id in self.fails:
            raise self.fails[request.request_id]
        self.sent.append(request)

    async def abort_requests_async(self, ids: list[str]) -> None:
        self.sent.append(("abort", ids))

    async def get_output_async(self) -> Any:
        return await self.answers.get()

    async def sleep_async(self, level: int) -> None:
        self.sent.append(("sleep", level))

    async def wake_up_async(self, tags: list[str] | None = None) -> bool:
        self.sent.append(("wake_up", tags))
        return True

    async def collective_rpc_async(self, method: str) -> list[None]:
        self.sent.append(method)
        return [None]


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
        async with asyncio.timeout(60):
            await scene

    asyncio.run(limited())


class Panic(BaseException):
    """As Rust's, which is no Exception."""


@pytest.mark.parametrize(
    ("error", "code", "says"),
    [
        (OverflowError("Integer value out of range"), "invalid_request_error", "Integer value out of range"),
        (KeyError("pixel_values"), "step_failed", r"KeyError\('pixel_values'\)"),
        (MemoryError(), "step_failed", "MemoryError"),
        (Panic("index out of bounds"), "step_failed", "index out of bounds"),
        (asyncio.CancelledError(), "step_failed", "CancelledError"),
        (EngineError("other tokens"), "engine_error", "other tokens"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_a_request_that_is_not_sent_ends_with_the_reason_and_others_go_on(
    error: BaseException, code: str, says: str
) -> None:
    async def scene() -> None:
        core, engine = FakeCore(), Engine(EngineSpec(model="m", block_size=32))
        engine.stand_in(core)
        core.fails["bad-0"] = error
        engine.submit(request("bad"))
        engine.submit(request("good"))
        step = await anext(engine.steps())
        (delta,) = step.deltas
        assert (delta.request_id, delta.finish_reason) == ("bad", FinishReason.ERROR)
        assert delta.error is not None
        assert delta.error.code == code
        assert re.search(says, delta.error.message)
        assert [sent.request_id for sent in core.sent] == ["good-1"]
        assert step.load is not None
        assert step.load.waiting_requests + step.load.running_requests == 1
        engine.submit(request("bad"))  # its id is free again

    run(scene())


@pytest.mark.parametrize(
    ("error", "code", "says"),
    [
        (KeyError("pixel_values"), "invalid_request_error", "KeyError('pixel_values')"),
        (OSError("image file is truncated"), "invalid_request_error", "image file is truncated"),
        (OSError(28, "No space left on device"), "engine_error", "No space left on device"),
        (MemoryError(), "engine_error", "MemoryError()"),
        (Panic("index out of bounds"), "engine_error", "index out of bounds"),
        (asyncio.CancelledError(), "engine_error", "CancelledError()"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_whatever_a_media_processor_raises_is_an_error_of_the_request(
    error: BaseException, code: str, says: str
) -> None:
    async def process(*_args: Any, **_options: Any) -> None:
        raise error

    processor = SimpleNamespace(
        renderer=SimpleNamespace(_process_multimodal_async=process),
        model_config=None,
        supports_mm_inputs=False,
    )

    async def scene() -> None:
        with pytest.raises(PenstockError) as refused:
            await MediaReader(processor).expand(MediaPrompt(token_ids=pack_tokens([1]), items=()))
        assert refused.value.code == code
        assert f"vLLM refuses the media of the request: {says}" in refused.value.message.replace(
            "[Errno 28] ", ""
        )

    run(scene())


def test_after_level_2_weights_are_read_again_before_there_is_a_kv_cache() -> None:
    async def scene() -> None:
        core, engine = (
            FakeCore(sleep_mode=True),
            Engine(EngineSpec(model="m", block_size=32, device="cuda:0")),
        )
        engine.stand_in(core)
        assert isinstance(engine, Sleeping)
        for level in (1, 2):
            engine.check_sleep(level)
            await engine.sleep(level)
            await engine.wake_up()
        assert core.sent == [
            *(("sleep", 1), ("wake_up", None)),
            *(("sleep", 2), ("wake_up", ["weights"]), "reload_weights", ("wake_up", ["kv_cache"])),
        ]

    run(scene())


@pytest.mark.parametrize(
    ("fields", "sleep_mode", "level", "why"),
    [
        ({"device": "cpu"}, False, 1, "vLLM does not support sleep mode on CPUs"),
        ({"device": "cuda:0"}, False, 1, "without sleep mode; set engine_args enable_sleep_mode: true"),
        (
            {"device": "cuda:0", "adapters": ("sql",)},
            True,
            2,
            "LoRA adapters again after level 2; use level 1",
        ),
    ],
)
def test_where_vllm_cannot_sleep_the_reason_is_said(
    fields: dict[str, Any], sleep_mode: bool, level: int, why: str
) -> None:
    async def scene() -> None:
        core = FakeCore(sleep_mode=sleep_mode)
        engine = Engine(EngineSpec(model="m", block_size=32, **fields))
        engine.stand_in(core)
        with pytest.raises(RequestError, match=f"engine vllm cannot sleep: .*{why}") as refusal:
            engine.check_sleep(level)
        assert refusal.value.http_status == 409
        assert "\n" not in refusal.value.message
        assert core.sent == []

    run(scene())
