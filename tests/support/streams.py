"""Streams against a running deployment, one after another in several tasks; each has to be whole and exact."""

import asyncio
import json
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from types import TracebackType
from typing import Self

import aiohttp

MODEL = "penstock-demo"
TOKENS = 48


class Load:
    """Streams that run one after another in several tasks, each prompt with its answer; all must be whole and equal."""

    def __init__(
        self,
        url: str | Callable[[], str],
        prompts: Sequence[str],
        *,
        tokens: int = TOKENS,
        pause_s: float = 0.0,
    ) -> None:
        """Begin at `async with`.

        Args:
            url: the deployment, or what gives the frontend of each stream.
            prompts: one task each.
            tokens: output tokens of each stream.
            pause_s: seconds between two streams of a task.
        """
        self.url, self.prompts = url, prompts
        self._tokens, self._pause_s = tokens, pause_s
        self.answers: dict[str, set[str]] = {prompt: set() for prompt in prompts}
        self._done = asyncio.Semaphore(0)
        self._ends = False
        self._stack = AsyncExitStack()

    async def stream(self, session: aiohttp.ClientSession, prompt: str) -> None:
        body: dict[str, object] = {
            "model": MODEL,
            "prompt": prompt,
            "max_tokens": self._tokens,
            "temperature": 0,
            "stream": True,
            "ignore_eos": True,
        }
        body["stream_options"] = {"include_usage": True}
        text, usage = "", None
        url = self.url if isinstance(self.url, str) else self.url()
        async with session.post(f"{url}/v1/completions", json=body) as response:
            assert response.status == 200, await response.text()
            async for line in response.content:
                data = line.removeprefix(b"data: ").strip()
                if data.startswith(b"{"):
                    event = json.loads(data)
                    assert "error" not in event, event
                    usage = event.get("usage") or usage
                    text += "".join(choice["text"] for choice in event["choices"])
        assert usage is not None
        assert usage["completion_tokens"] == self._tokens
        self.answers[prompt].add(text)
        self._done.release()

    async def _repeat(self, session: aiohttp.ClientSession, prompt: str) -> None:
        while not self._ends:
            await self.stream(session, prompt)
            await asyncio.sleep(self._pause_s)

    async def __aenter__(self) -> Self:
        self._session = await self._stack.enter_async_context(aiohttp.ClientSession())
        self._group = await self._stack.enter_async_context(asyncio.TaskGroup())
        for prompt in self.prompts:
            self._group.create_task(self._repeat(self._session, prompt))
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ends = True
        await self._stack.__aexit__(kind, error, trace)

    async def more(self, count: int) -> None:
        """Wait until `count` more streams have ended."""
        for _ in range(count):
            await self._done.acquire()
