"""Streams that end badly: each ends its own request, and nothing hangs."""

import asyncio

import pytest

from penstock.core.errors import EngineError
from penstock.core.types.events import AllBlocksCleared, BlockStored
from penstock.core.types.requests import FinishReason
from penstock.core.wire import pack_hashes
from penstock.engine.streams.backend import Output, Serving
from penstock.engine.streams.engine import StreamedEngine
from penstock.testing.engines.probe import EngineProbe, make_request

STORED = BlockStored(block_hashes=pack_hashes([1, 2]), parent_block_hash=None, block_size=4)
END = Output(token_ids=[9], finish_reason=FinishReason.LENGTH)


class ScriptedBackend:
    """Answers each request by the script of its id: outputs, exceptions to raise, and `None` to wait for ever."""

    def __init__(self, **scripts) -> None:
        self.scripts = scripts
        self.dead = asyncio.Event()

    async def start(self) -> Serving:
        return Serving(
            block_size=4, num_blocks=100, context_length=64, vocab_size=100, max_running_requests=2, max_batch_tokens=32,
            kv_events=True,
        )  # fmt: skip

    def check(self, call) -> None: ...

    async def generate(self, call):
        for each in self.scripts[call.request.request_id]:
            if each is None:
                await asyncio.Event().wait()
            if isinstance(each, BaseException):
                raise each
            yield each

    def cancel(self, call) -> None: ...

    async def events(self):
        yield 0, [STORED]
        raise ConnectionError("gone")

    async def active_blocks(self) -> None: ...

    async def died(self) -> str:
        await self.dead.wait()
        return "the engine burnt down"

    async def close(self) -> None: ...


async def test_a_stream_that_fails_ends_its_own_request_alone_and_lost_events_clear_what_routers_know() -> (
    None
):
    one = Output(token_ids=[1])
    backend = ScriptedBackend(failed=[one, KeyError("broken")], good=[one, END], silent=[one])
    async with EngineProbe(StreamedEngine(backend, max_waiting_requests=10)) as probe:
        failed, good, silent = await probe.run(*(make_request(name, range(5)) for name in backend.scripts))
        assert failed.error is not None
        assert failed.error.code == "step_failed", "a router tries it elsewhere"
        assert "KeyError: 'broken'" in failed.error.message
        assert failed.token_ids == [1], "what came before it counts"
        assert good.token_ids == [1, 9]
        assert silent.error is not None
        assert "without a reason" in silent.error.message
        assert probe.events == [STORED, AllBlocksCleared()]
        assert probe.engine.load().cached_blocks == 0


async def test_an_engine_that_dies_ends_the_steps() -> None:
    backend = ScriptedBackend(a=[None])
    async with EngineProbe(StreamedEngine(backend, max_waiting_requests=10)) as probe:
        probe.submit(make_request("a", range(5)))
        backend.dead.set()
        with pytest.raises(EngineError, match="the engine burnt down"):
            await probe.finish()
