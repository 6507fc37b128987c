"""Streams that end badly: each ends its own request, and nothing hangs."""

import asyncio

import pytest
from msgspec.structs import replace

from penstock.core.errors import EngineError, Overloaded
from penstock.core.types.events import AllBlocksCleared, BlockStored
from penstock.core.types.requests import FinishReason
from penstock.core.wire import pack_hashes
from penstock.engine.streams import engine as streams
from penstock.engine.streams.backend import Output, Serving
from penstock.engine.streams.engine import StreamedEngine
from penstock.testing.engines.probe import EngineProbe, make_request
from penstock.testing.loop import run_async


class ScriptedBackend:
    """Answers each request by the script of its id: outputs, exceptions to raise, and `None` to wait for ever."""

    def __init__(self, scripts, events=()) -> None:
        self.scripts = scripts
        self.cancelled = []
        self.closed = 0
        self.dead = asyncio.Event()
        self._events = events

    async def start(self) -> Serving:
        return Serving(
            block_size=4,
            num_blocks=100,
            context_length=64,
            vocab_size=100,
            max_running_requests=2,
            max_batch_tokens=32,
            kv_events=bool(self._events),
        )

    def check(self, call) -> None:
        pass

    async def generate(self, call):
        for each in self.scripts[call.request.request_id]:
            if each is None:
                await asyncio.Event().wait()
            if isinstance(each, BaseException):
                raise each
            await asyncio.sleep(0)
            yield each

    def cancel(self, call) -> None:
        self.cancelled.append(call.request.request_id)

    async def events(self):
        for each in self._events:
            if isinstance(each, BaseException):
                raise each
            yield each
        await asyncio.Event().wait()

    async def active_blocks(self) -> None:
        return None

    async def died(self) -> str:
        await self.dead.wait()
        return "the engine burnt down"

    async def close(self) -> None:
        self.closed += 1


def token(number: int, reason: FinishReason | None = None) -> Output:
    return Output(token_ids=[number], finish_reason=reason)


END = token(9, FinishReason.LENGTH)


def run(scripts, scenario, *, events=(), max_waiting=10):
    async def main():
        backend = ScriptedBackend(scripts, events)
        async with EngineProbe(StreamedEngine(backend, max_waiting_requests=max_waiting)) as probe:
            await scenario(probe, backend)
        assert backend.closed == 1

    run_async(main())


def test_a_stream_that_fails_ends_its_own_request_alone() -> None:
    async def scenario(probe, backend) -> None:
        failed, good, silent = await probe.run(
            *(make_request(name, range(5)) for name in ("failed", "good", "silent"))
        )
        assert failed.error is not None
        assert failed.error.code == "step_failed", "a router tries it elsewhere"
        assert "KeyError: 'broken'" in failed.error.message
        assert failed.token_ids == [1], "what came before it counts"
        assert good.token_ids == [1, 9]
        assert silent.error is not None
        assert "without a reason" in silent.error.message

    run({"failed": [token(1), KeyError("broken")], "good": [token(1), END], "silent": [token(1)]}, scenario)


def test_an_engine_that_dies_ends_the_steps() -> None:
    async def scenario(probe, backend) -> None:
        probe.submit(make_request("a", range(5)))
        backend.dead.set()
        with pytest.raises(EngineError, match="the engine burnt down"):
            await probe.finish()

    run({"a": [None]}, scenario)


def test_a_prompt_whose_kv_nobody_takes_is_cancelled(monkeypatch) -> None:
    monkeypatch.setattr(streams, "KV_TTL_S", 0.05)

    async def scenario(probe, backend) -> None:
        request = replace(make_request("a", range(8), max_tokens=1), prefill_only=True)
        probe.submit(request)
        (delta,) = (await probe.step()).deltas or (await probe.step()).deltas
        assert delta.kv is not None
        assert (delta.kv.payload, delta.kv.num_tokens, delta.kv.ttl_s) == (b"here", 8, 0.05)
        load = probe.engine.load()
        assert (load.running_requests, load.queued_prefill_tokens) == (1, 8), "it is still computed"
        while probe.engine.load().running_requests:
            await probe.step()
        assert backend.cancelled == ["a"]

    run({"a": [Output(finish_reason=FinishReason.LENGTH, kv_payload=b"here"), None]}, scenario)


def test_more_than_may_wait_are_refused() -> None:
    async def scenario(probe, backend) -> None:
        probe.submit(*(make_request(name, range(5)) for name in "abc"))
        with pytest.raises(Overloaded, match="3 requests wait, the most allowed is 3"):
            probe.engine.submit(make_request("d", range(5)))
        await probe.step()  # two of them run
        probe.submit(make_request("d", range(5)))
        load = probe.engine.load()
        assert (load.running_requests, load.waiting_requests) == (2, 2)

    run({name: [None] for name in "abcd"}, scenario, max_waiting=3)


def test_lost_kv_events_clear_what_routers_know() -> None:
    stored = BlockStored(block_hashes=pack_hashes([1, 2]), parent_block_hash=None, block_size=4)

    async def scenario(probe, backend) -> None:
        while len(probe.events) < 2:
            await probe.step()
        assert probe.events == [stored, AllBlocksCleared()]
        assert probe.engine.load().cached_blocks == 0
        (answer,) = await probe.run(make_request("a", range(5)))
        assert answer.error is None, "requests go on"

    run({"a": [END]}, scenario, events=[(0, [stored]), ConnectionError("gone")])
