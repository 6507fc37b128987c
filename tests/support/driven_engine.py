"""Engines in front of servers, whose steps are read by a task."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

from tokenizers import Tokenizer

from penstock.core.ids import RequestId
from penstock.core.types.events import KvEvent
from penstock.core.types.load import WorkerLoad
from penstock.core.types.requests import Delta, Request, SamplingParams
from penstock.core.wire import pack_tokens, token_list
from penstock.demo import MODEL_NAME
from penstock.engine.openai.engine import ServerEngine, Serving
from tests.support.tokenizer import tiny_tokenizer_json

TOKENIZER = Tokenizer.from_buffer(tiny_tokenizer_json())
SERVING = Serving(
    block_size=16, context_length=2048,
    vocab_size=TOKENIZER.get_vocab_size(), eos_token_ids=(0,), max_running_requests=64, max_waiting_requests=64,
    max_batch_tokens=512,
)  # fmt: skip
PROMPT = TOKENIZER.encode("the quick brown fox jumps over the lazy dog").ids


class Driven:
    """An engine whose steps are read by a task."""

    def __init__(self, engine: ServerEngine) -> None:
        self.engine = engine
        self.deltas: dict[str, list[Delta]] = {}
        self.begun: list[str] = []
        self.events: list[KvEvent] = []
        self.load = WorkerLoad()
        """As the latest step tells routers."""
        self.problems: list[str | None] = []
        self._news = asyncio.Event()
        engine.announce(self.begun.extend)
        engine.report_health(self.problems.append)

    async def read(self) -> None:
        async for step in self.engine.steps():
            self.events += step.events
            self.load = step.load or self.load
            for delta in step.deltas:
                self.deltas.setdefault(delta.request_id, []).append(delta)
            self._news.set()

    async def until(self, holds: Callable[[], bool]) -> None:
        async with asyncio.timeout(60):
            while not holds():  # noqa: ASYNC110 - the state is another task's
                await asyncio.sleep(0.005)

    async def ends(self, name: str) -> Delta:
        await self.until(
            lambda: bool(self.deltas.get(name)) and self.deltas[name][-1].finish_reason is not None
        )
        return self.deltas[name][-1]

    def tokens(self, name: str) -> list[int]:
        return [token for delta in self.deltas[name] for token in token_list(delta.token_ids)]

    async def ask(self, name: str = "a", prompt: list[int] | None = None, **sampling: Any) -> Delta:
        self.engine.submit(make_request(name, prompt, **sampling))
        return await self.ends(name)


def make_request(
    name: str, prompt: list[int] | None = None, *, num_emitted: int = 0, **sampling: Any
) -> Request:
    fields = {"max_tokens": 12, "temperature": 0.0} | sampling
    return Request(
        request_id=RequestId(name),
        model=MODEL_NAME,
        token_ids=pack_tokens(prompt or PROMPT),
        sampling=SamplingParams(**fields),
        num_emitted=num_emitted,
    )


@asynccontextmanager
async def started(engine: ServerEngine) -> AsyncIterator[Driven]:
    """Start an engine, read its steps, and close it at the end."""
    try:
        await engine.start()
        case = Driven(engine)
        async with asyncio.TaskGroup() as group:
            reading = group.create_task(case.read())
            try:
                yield case
            finally:
                await engine.close()
                await reading
    finally:
        await engine.close()
