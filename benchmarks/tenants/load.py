"""Two tenants' clients: one that asks at a modest rate, and one that floods, each with a key of its own."""

import asyncio
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from time import perf_counter

import aiohttp

from benchmarks.processes.served import Served
from penstock.core.errors import Unavailable

_TIMEOUT_S = 120.0
_PAUSE_S = 0.5
"""A flooding client that was refused asks again so much later, whatever Retry-After says."""
_WORDS = 500
_FIRST_ID = 400
_OK, _TOO_MANY = 200, 429


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompts:
    """Prompts of one length in tokens, no two of which have a block in common; `adapters` are asked for in turn."""

    tokens: int
    output_tokens: int
    adapters: Sequence[str] = ()


@dataclass(slots=True)
class Flooded:
    """What a flood came to."""

    answers: int = 0
    refusals: int = 0
    seconds: float = 0.0
    problems: list[str] = field(default_factory=list)


class Client:
    """One tenant's client. One event loop owns it."""

    def __init__(self, server: Served, http: aiohttp.ClientSession, key: str, prompts: Prompts) -> None:
        """Ask nothing yet.

        Args:
            server: who is asked.
            http: its connections; a session for each client.
            key: the tenant's.
            prompts: what is asked.
        """
        self._server = server
        self._http = http
        self._headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
        self._prompts = prompts
        self._tail = ",".join(str(_FIRST_ID + place % _WORDS) for place in range(prompts.tokens - 2))
        self._asked = random.Random(key).randrange(_WORDS)

    async def ask(self) -> tuple[int, float]:
        """Send one prompt and read its stream to the end.

        Returns:
            status and seconds to the first piece of the stream.

        Raises:
            Unavailable: the stream has an error, or ends too early.
        """
        begin_s = perf_counter()
        url = f"{self._server.url}/v1/completions"
        async with self._http.post(url, data=self._body(), headers=self._headers) as response:
            first = await response.content.readline()
            first_s = perf_counter() - begin_s
            rest = await response.content.read()
            if response.status == _OK and not rest.rstrip().endswith(b"[DONE]"):
                raise Unavailable(f"the stream ended early: {(first + rest)[-200:]!r}")
            if response.status not in {_OK, _TOO_MANY}:
                raise Unavailable(f"HTTP {response.status}: {(first + rest)[:200]!r}")
        return response.status, first_s

    async def ask_at(self, rate_per_s: float, seconds: float, seed: int) -> list[float]:
        """Ask at random times, whether or not earlier answers are there, and give each TTFT in seconds."""
        rng, ttfts_s = random.Random(seed), []
        end_s = perf_counter() + seconds

        async def one() -> None:
            status, ttft_s = await self.ask()
            if status != _OK:
                raise Unavailable(f"HTTP {status}: expected no refusal, the tenant has no limits")
            ttfts_s.append(ttft_s)

        async with asyncio.TaskGroup() as group:
            while perf_counter() < end_s:
                group.create_task(one())
                await asyncio.sleep(rng.expovariate(rate_per_s))
        return ttfts_s

    async def flood(self, connections: int, into: Flooded) -> None:
        """Have so many requests open all the time, until it is cancelled."""
        begin_s = perf_counter()

        async def one() -> None:
            while True:
                status, _ = await self.ask()
                into.answers += status == _OK
                if status == _TOO_MANY:
                    into.refusals += 1
                    await asyncio.sleep(_PAUSE_S)

        try:
            async with asyncio.TaskGroup() as group:
                for _ in range(connections):
                    group.create_task(one())
        finally:
            into.seconds = perf_counter() - begin_s

    def _body(self) -> bytes:
        number = self._asked = self._asked + 1
        adapters = self._prompts.adapters
        model = adapters[number % len(adapters)] if adapters else self._server.model
        first, second = (_FIRST_ID + part for part in divmod(number, _WORDS))
        return (
            f'{{"model":"{model}","prompt":[{first},{second},{self._tail}],"stream":true,"ignore_eos":true,'
            f'"temperature":0,"max_tokens":{self._prompts.output_tokens}}}'
        ).encode()


def session(*, keeps: bool) -> aiohttp.ClientSession:
    """Give connections without a limit, kept or one for each request: the kernel deals connections to frontends."""
    connector = aiohttp.TCPConnector(limit=0, force_close=not keeps)
    return aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=_TIMEOUT_S))
