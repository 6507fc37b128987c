"""Streams put on frontends: each is compared with what the same prompt said before, and those that a killed frontend had are counted separately."""

import asyncio
import random
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import aiohttp
import msgspec

_TIMEOUT_S = 120.0
_RETRY_S = 0.2
_MODEL = "penstock-demo"


@dataclass(slots=True)
class Frontend:
    """One frontend as its clients see it; `troubles` are the times from its kill until it answers again."""

    url: str
    troubles: list[list[float]] = field(default_factory=list)

    def was_in_trouble(self, since_s: float) -> bool:
        """Whether it was away at any moment since then."""
        return any(end_s >= since_s for _, end_s in self.troubles)

    @property
    def is_away(self) -> bool:
        return bool(self.troubles) and self.troubles[-1][1] == float("inf")


@dataclass(slots=True)
class Outcome:
    """What became of requests: `completed`, `excused` (their frontend was killed), `lost`, `wrong`, `repeated`."""

    counts: Counter[str] = field(default_factory=Counter)
    latencies_s: list[float] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    def note(self, kind: str, problem: str = "") -> None:
        self.counts[kind] += 1
        if problem and len(self.problems) < 20:
            self.problems.append(f"{kind}: {problem}")


class Load:
    """Seeded prompts with known answers. One event loop owns it."""

    def __init__(self, frontends: Sequence[Frontend], *, output_tokens: int, prompts: int, seed: int) -> None:
        """Ask nothing yet."""
        self._frontends = frontends
        self._output_tokens = output_tokens
        self._rng = random.Random(seed)
        words = [f"word{number}" for number in range(400)]
        self._prompts = [" ".join(self._rng.choices(words, k=40)) for _ in range(prompts)]
        self._answers: dict[str, str] = {}
        self.outcome = Outcome()

    async def learn(self, session: aiohttp.ClientSession) -> None:
        """Ask each prompt twice while nothing disturbs; the answers must agree."""
        for prompt in self._prompts:
            first, second = [await self._ask(session, frontend, prompt) for frontend in self._frontends[:2]]
            if first != second:
                raise AssertionError(f"{prompt[:40]}: two answers without a fault: {first!r}, {second!r}")
            self._answers[prompt] = first

    async def put(self, session: aiohttp.ClientSession, requests: int, concurrency: int) -> Outcome:
        """Ask so many times, and compare."""
        self.outcome = Outcome()
        left = iter(range(requests))

        async def client() -> None:
            for _ in left:
                await self._one(session)

        async with asyncio.TaskGroup() as group:
            for _ in range(concurrency):
                group.create_task(client())
        return self.outcome

    async def _one(self, session: aiohttp.ClientSession) -> None:
        """Ask until a frontend that is not killed meanwhile has answered."""
        prompt, outcome = self._rng.choice(self._prompts), self.outcome
        while True:
            frontend = self._rng.choice([each for each in self._frontends if not each.is_away])
            began_s = time.monotonic()
            try:
                text = await self._ask(session, frontend, prompt)
            except (aiohttp.ClientError, OSError, TimeoutError, ValueError) as error:
                if frontend.was_in_trouble(began_s):
                    outcome.note("excused")
                    await asyncio.sleep(_RETRY_S)
                    continue
                outcome.note("lost", f"{type(error).__name__}: {error}")
                return
            expected = self._answers[prompt]
            outcome.latencies_s.append(time.monotonic() - began_s)
            if text == expected:
                outcome.note("completed")
            elif len(text) > len(expected):
                outcome.note("repeated", f"{len(text)} characters instead of {len(expected)}")
            else:
                outcome.note("wrong", f"{text[:60]!r} instead of {expected[:60]!r}")
            return

    async def _ask(self, session: aiohttp.ClientSession, frontend: Frontend, prompt: str) -> str:
        """Return the text of a stream.

        Raises:
            ValueError: the stream has an error, or no end.
        """
        body = {
            "model": _MODEL, "messages": [{"role": "user", "content": prompt}], "seed": 7, "ignore_eos": True,
            "max_tokens": self._output_tokens, "stream": True,
        }  # fmt: skip
        timeout = aiohttp.ClientTimeout(total=_TIMEOUT_S)
        url = f"{frontend.url}/v1/chat/completions"
        async with session.post(url, json=body, timeout=timeout) as response:
            data = await response.read()
            if response.status != 200:
                raise ValueError(f"HTTP {response.status}: {data[:300]!r}")
        if not data.rstrip().endswith(b"[DONE]"):
            raise ValueError(f"the stream has no end: {data[-300:]!r}")
        parts = []
        for line in data.split(b"\n"):
            if line.startswith(b"data: {"):
                event = msgspec.json.decode(line[6:])
                if "error" in event:
                    raise ValueError(f"the stream has an error: {event['error']}")
                parts += [choice["delta"].get("content") or "" for choice in event["choices"]]
        return "".join(parts)
