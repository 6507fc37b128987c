"""Conversations with a running server, as streams of server-sent events: several turns, prefixes that many share."""

import asyncio
import random
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any

import aiohttp
import msgspec

from benchmarks.processes.served import Served
from penstock.bench.prompts import text
from penstock.core.errors import Unavailable

_TIMEOUT_S = 300.0
_OK = 200


@dataclass(slots=True)
class Answer:
    """One streamed answer, as the client saw it."""

    text: str = ""
    ttft_s: float = 0.0
    gaps_s: list[float] = field(default_factory=list)
    """Between two pieces of text."""
    pieces: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversations:
    """Groups of conversations that share a system prompt, of which `concurrency` go on at a time."""

    groups: int
    conversations_per_group: int
    turns: int
    system_words: int
    turn_words: int
    answer_tokens: int
    concurrency: int
    seed: int = 0


@dataclass(slots=True)
class Asked:
    """What a load of conversations came to."""

    answers: list[Answer] = field(default_factory=list)
    duration_s: float = 0.0

    def total(self, name: str) -> int:
        return sum(getattr(answer, name) for answer in self.answers)


class Chats:
    """Sends chats to one server. One event loop owns it."""

    def __init__(self, server: Served, http: aiohttp.ClientSession) -> None:
        self._server = server
        self._http = http

    async def ask(
        self, messages: Sequence[dict[str, str]], tokens: int, *, on_piece: Callable[[], None] = lambda: None
    ) -> Answer:
        """Stream one greedy answer of exactly `tokens` tokens.

        Args:
            messages: the conversation so far.
            tokens: of the answer.
            on_piece: called with each piece of text.
        """
        body: dict[str, Any] = {
            "model": self._server.model, "messages": list(messages), "max_tokens": tokens, "temperature": 0,
            "ignore_eos": True, "stream": True, "stream_options": {"include_usage": True},
        }  # fmt: skip
        answer, begin_s = Answer(), perf_counter()
        last_s = begin_s
        async with self._http.post(f"{self._server.url}/v1/chat/completions", json=body) as response:
            if response.status != _OK:
                raise Unavailable(f"the server answered with {response.status}: {await response.text()}")
            async for line in response.content:
                if not line.startswith(b"data: {"):
                    continue
                chunk = msgspec.json.decode(line[6:])
                piece = "".join(choice["delta"].get("content") or "" for choice in chunk.get("choices", ()))
                if usage := chunk.get("usage"):
                    answer.prompt_tokens = usage["prompt_tokens"]
                    answer.cached_tokens = (usage.get("prompt_tokens_details") or {}).get(
                        "cached_tokens"
                    ) or 0
                if piece:
                    now_s = perf_counter()
                    if answer.pieces:
                        answer.gaps_s.append(now_s - last_s)
                    else:
                        answer.ttft_s = now_s - begin_s
                    last_s = now_s
                    answer.pieces += 1
                    answer.text += piece
                    on_piece()
        return answer

    async def converse(self, load: Conversations) -> Asked:
        """Hold all conversations; each turn waits for the one before it, and turns of different ones mix."""
        rng = random.Random(load.seed)
        systems = [text(f"system {load.seed} {group}", load.system_words) for group in range(load.groups)]
        open_ = [
            [{"role": "system", "content": system}]
            for system in systems
            for _ in range(load.conversations_per_group)
        ]
        asked, begin_s = Asked(), perf_counter()
        free = asyncio.Semaphore(load.concurrency)

        async def turn(messages: list[dict[str, str]], words: str) -> None:
            async with free:
                messages.append({"role": "user", "content": words})
                answer = await self.ask(messages, load.answer_tokens)
                messages.append({"role": "assistant", "content": answer.text})
                asked.answers.append(answer)

        for number in range(load.turns):
            order = list(enumerate(open_))
            rng.shuffle(order)
            words = {index: text(f"{load.seed} {number} {index}", load.turn_words) for index, _ in order}
            await asyncio.gather(*(turn(messages, words[index]) for index, messages in order))
        asked.duration_s = perf_counter() - begin_s
        return asked


async def chatting(server: Served, work: Callable[[Chats], Awaitable[Any]]) -> Any:
    """Run `work` with a client of the server."""
    timeout = aiohttp.ClientTimeout(total=_TIMEOUT_S)
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(timeout=timeout, connector=connector, read_bufsize=1 << 20) as http:
        return await work(Chats(server, http))
