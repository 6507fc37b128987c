"""Tokens of a request that is run with a `DirectSink` go by its rule, and where that ends none is lost or comes twice."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from tokenizers import Tokenizer

from penstock.core.types.requests import Delta, FinishReason
from penstock.frontend.text.tokens import Detokenizer
from penstock.router.dispatch.open_request import OpenRequest
from penstock.runtime.requests.direct_streams import DirectStream
from penstock.seams import DirectClient, Interrupt
from tests.support.direct_client import FakeTransport
from tests.support.manual_engine import ManualEngine
from tests.support.tokenizer import tiny_tokenizer_json
from tests.unit.router.dispatch.test_dispatcher import Setting, ids, make_request, scenario, settle

_TOKENIZER = Tokenizer.from_buffer(tiny_tokenizer_json())
_DETOKENIZER = Detokenizer(_TOKENIZER, tiny_tokenizer_json())


class Reader:
    """A sink and a `DirectSink` that keep what each gets; `way` lists both in order."""

    def __init__(self, stream: OpenRequest) -> None:
        self.stream = stream
        self.transport = FakeTransport()
        self.way: list[str] = []
        self.tokens: list[int] = []
        self.free = asyncio.Event()
        self.is_available = True
        self.rule = DirectStream(_DETOKENIZER.stream(), b"", b"", is_chunked=False)
        self.transport.write = self.write  # type: ignore[method-assign]

    def write(self, chunk: bytes) -> None:
        self.way.append("direct")
        self.tokens += _TOKENIZER.encode(json.loads(chunk)).ids

    def take(self, delta: Delta) -> None:
        self.way.append("sink")
        self.tokens += ids(delta)

    def open(self, interrupt: Interrupt) -> tuple[DirectStream, DirectClient] | None:
        if not self.is_available:
            return None
        gone = ConnectionResetError("the client is gone")
        return self.rule, DirectClient(
            self.transport,  # type: ignore[arg-type]
            100,
            lambda _gap_s: None,
            lambda is_gone: interrupt(gone if is_gone else self.free.wait),
        )

    def run(self) -> asyncio.Task[None]:
        return asyncio.create_task(self.stream.run(self.take, self))


@asynccontextmanager
async def reading(
    setting: Setting,
) -> AsyncIterator[tuple[ManualEngine, Reader, asyncio.Task[None]]]:
    """Open a request that a `Reader` runs, and give the engine that has it."""
    async with setting.dispatcher.open(make_request()) as stream:
        await settle()
        reader = Reader(stream)
        yield setting.engines[setting.holder()], reader, reader.run()


LETTERS = _TOKENIZER.encode("abcdefgh").ids


@scenario(1)
async def test_after_the_early_steps_tokens_go_by_the_rule_and_the_end_by_the_sink(setting):
    async with reading(setting) as (engine, reader, running):
        for token in LETTERS[:-1]:
            engine.emit("r", token)
            await settle()
            assert reader.stream.output_tokens == len(reader.tokens)
        engine.emit("r", LETTERS[-1], finish=FinishReason.LENGTH)
        await running
    assert reader.tokens == LETTERS
    assert reader.way == ["sink", "sink", *["direct"] * (len(LETTERS) - 3), "sink"]
    assert reader.stream.output_tokens == len(LETTERS)


@scenario()
async def test_a_request_whose_worker_is_lost_goes_on_with_all_its_tokens(setting):
    async with setting.dispatcher.open(make_request()) as stream:
        await settle()
        first = setting.holder()
        reader = Reader(stream)
        running = reader.run()
        for token in LETTERS[:5]:
            setting.engines[first].emit("r", token)
            await settle()
        assert reader.way[-1] == "direct"
        setting.kill(first)
        await asyncio.sleep(1)
        engine = setting.engines[setting.holder()]
        moved = engine.requests["r"]
        assert moved.num_emitted == 5
        for token in LETTERS[5:]:
            engine.emit("r", token)
            await settle()
        assert reader.way[-1] == "direct", "the new worker's tokens go the same way"
        engine.emit("r", finish=FinishReason.LENGTH)
        await running
    assert reader.tokens == LETTERS


@scenario(1)
async def test_a_client_that_is_behind_is_waited_for(setting):
    async with reading(setting) as (engine, reader, running):
        for token in LETTERS[:3]:
            engine.emit("r", token)
            await settle()
        reader.transport.unsent_bytes = 101
        engine.emit("r", LETTERS[3])
        await settle()
        for token in LETTERS[4:6]:
            engine.emit("r", token)
            await settle()
        assert reader.tokens == LETTERS[:4], "no more before it has read"
        assert reader.stream.output_tokens == 6
        reader.transport.unsent_bytes = 0
        reader.free.set()
        await settle()
        assert reader.tokens == LETTERS[:6]
        engine.emit("r", LETTERS[6])
        await settle()
        assert reader.way[-2:] == ["sink", "direct"]
        engine.emit("r", LETTERS[7], finish=FinishReason.LENGTH)
        await running
    assert reader.tokens == LETTERS


@scenario(1)
async def test_a_client_that_is_gone_ends_its_request(setting):
    async with reading(setting) as (engine, reader, running):
        for token in LETTERS[:3]:
            engine.emit("r", token)
            await settle()
        reader.transport.is_closed = True
        engine.emit("r", LETTERS[3])
        with pytest.raises(ConnectionResetError):
            await running
    assert reader.tokens == LETTERS[:3]


@scenario(1)
async def test_tokens_by_the_rule_are_granted_to_the_worker(setting):
    async with setting.dispatcher.open(make_request(max_tokens=10_000)) as stream:
        await settle()
        engine = setting.engines[setting.holder()]
        reader = Reader(stream)
        running = reader.run()
        for _ in range(50):
            engine.emit("r", *LETTERS * 10)
            await settle()
        assert len(reader.tokens) == 50 * 10 * len(LETTERS), "many windows"
        assert reader.way.count("sink") < 5
        engine.emit("r", finish=FinishReason.LENGTH)
        await running
