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
from penstock.bench.load import text
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
    talk: int = 0
    """Number of its conversation."""
    turn: int = 0
    worker: str = ""
    """Where it came from, if the server explains that."""


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

    def begin(self) -> "Talks":
        """Return all conversations before their first turn."""
        systems = [text(f"system {self.seed} {group}", self.system_words) for group in range(self.groups)]
        return [
            [{"role": "system", "content": system}]
            for system in systems
            for _ in range(self.conversations_per_group)
        ]


Talks = list[list[dict[str, str]]]
"""The messages of each conversation so far."""


@dataclass(slots=True)
class Asked:
    """What a load of conversations came to."""

    answers: list[Answer] = field(default_factory=list)
    duration_s: float = 0.0

    def total(self, name: str) -> int:
        return sum(getattr(answer, name) for answer in self.answers)


class Chats:
    """Sends chats to one server. One event loop owns it."""

    def __init__(self, server: Served, http: aiohttp.ClientSession, *, explains: bool = False) -> None:
        """Send to a server, which tells the workers of its answers if it `explains`."""
        self._server = server
        self._http = http
        self._headers = {"X-Penstock-Explain": "1"} if explains else {}

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
        url = f"{self._server.url}/v1/chat/completions"
        async with self._http.post(url, json=body, headers=self._headers) as response:
            if response.status != _OK:
                raise Unavailable(f"the server answered with {response.status}: {await response.text()}")
            async for line in response.content:
                if not line.startswith(b"data: {"):
                    continue
                chunk = msgspec.json.decode(line[6:])
                piece = "".join(choice["delta"].get("content") or "" for choice in chunk.get("choices", ()))
                if explained := chunk.get("penstock"):
                    answer.worker = explained["decisions"][-1]["worker"]
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

    async def converse(
        self, load: Conversations, talks: Talks | None = None, turns: range | None = None
    ) -> Asked:
        """Hold all conversations; each turn waits for the one before it, and turns of different ones mix.

        Args:
            load: what to say.
            talks: conversations that `load.begin` has begun, and that go on here; None begins them.
            turns: which turns to take; None is all.
        """
        rng = random.Random(load.seed)
        open_ = load.begin() if talks is None else talks
        asked, begin_s = Asked(), perf_counter()
        free = asyncio.Semaphore(load.concurrency)

        async def turn(number: int, talk: int, words: str) -> None:
            async with free:
                messages = open_[talk]
                messages.append({"role": "user", "content": words})
                answer = await self.ask(messages, load.answer_tokens)
                answer.talk, answer.turn = talk, number
                messages.append({"role": "assistant", "content": answer.text})
                asked.answers.append(answer)

        for number in range(load.turns):
            order = list(range(len(open_)))
            rng.shuffle(order)
            if turns is None or number in turns:
                words = {talk: text(f"{load.seed} {number} {talk}", load.turn_words) for talk in order}
                await asyncio.gather(*(turn(number, talk, words[talk]) for talk in order))
        asked.duration_s = perf_counter() - begin_s
        return asked


async def chatting(server: Served, work: Callable[[Chats], Awaitable[Any]], *, explains: bool = False) -> Any:
    """Run `work` with a client of the server, which tells the workers of its answers if it `explains`."""
    timeout = aiohttp.ClientTimeout(total=_TIMEOUT_S)
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(timeout=timeout, connector=connector, read_bufsize=1 << 20) as http:
        return await work(Chats(server, http, explains=explains))
