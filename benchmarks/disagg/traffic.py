"""Sends the workload to a running deployment over HTTP, from one process."""

import asyncio
import contextlib
import itertools
import random
import statistics
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from time import perf_counter

import msgspec

from benchmarks.disagg.workload import Arrival, StreamsAndPrompts
from benchmarks.processes.served import Served
from penstock.bench.client import Client, MeasuredRequest, ServerAddress
from penstock.core.errors import Unavailable

_TIMEOUT_S = 120.0
_WARM_UP_S = 2.0
_QUIET_TOKENS = 24


@dataclass(frozen=True, slots=True)
class Asked:
    """An answered prompt: `request_id` as in the workers' step logs, due time by `perf_counter`, and TTFT as the client saw it."""

    request_id: str
    due_s: float
    ttft_s: float


@dataclass(slots=True)
class Traffic:
    """Answered prompts, and the measured time by `perf_counter`."""

    begin_s: float = 0.0
    end_s: float = 0.0
    quiet: list[Asked] = field(default_factory=list)
    """Prompts one after the other, before the streams."""
    prompts: list[Asked] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)


class Users:
    """All users of one deployment. The event loop owns it."""

    def __init__(self, deployment: Served, workload: StreamsAndPrompts, vocab_size: int) -> None:
        self.traffic = Traffic()
        self._client = Client(ServerAddress.parse(deployment.url, "completions"), timeout_s=_TIMEOUT_S)
        self._model = deployment.model
        self._workload = workload
        self._vocab_size = vocab_size
        self._numbers = itertools.count()

    async def ask_quietly(self, count: int) -> None:
        """Send prompts of mean length one after the other; the first does not count."""
        tokens = round(self._workload.prompt_tokens_mean)
        for number in range(count + 1):
            asked = await self._ask(tokens, _QUIET_TOKENS, perf_counter())
            if number and asked is not None:
                self.traffic.quiet.append(asked)

    def quiet_ttft_s(self) -> float:
        """Give the median TTFT of the quiet prompts.

        Raises:
            Unavailable: none was answered.
        """
        if not self.traffic.quiet:
            raise Unavailable(f"no prompt was answered: {'; '.join(self.traffic.problems)}")
        return statistics.median(asked.ttft_s for asked in self.traffic.quiet)

    async def run(self, arrivals: Sequence[Arrival]) -> None:
        """Begin the streams, send each prompt when it is due, and wait for the last one's answer."""
        traffic = self.traffic
        async with self._streams(), asyncio.TaskGroup() as tasks:
            await asyncio.sleep(_WARM_UP_S)
            traffic.begin_s = perf_counter()
            traffic.end_s = traffic.begin_s + self._workload.seconds
            for arrival in arrivals:
                due_s = traffic.begin_s + arrival.at_s
                await asyncio.sleep(max(due_s - perf_counter(), 0))
                tasks.create_task(self._ask_long(arrival, due_s))
            await asyncio.sleep(max(traffic.end_s - perf_counter(), 0))

    def close(self) -> None:
        self._client.close()

    @asynccontextmanager
    async def _streams(self) -> AsyncIterator[None]:
        async with asyncio.TaskGroup() as tasks:
            streams = [tasks.create_task(self._stream(n)) for n in range(self._workload.streams)]
            try:
                yield
            finally:
                for stream in streams:
                    stream.cancel()

    async def _stream(self, number: int) -> None:
        """Send one request after the other; first answers have different lengths, so that streams do not begin in step."""
        load = self._workload
        share = (number + 1) / load.streams
        output_tokens = round(load.stream_output_tokens * share)
        with contextlib.suppress(asyncio.CancelledError):
            while await self._ask(load.stream_input_tokens, max(output_tokens, 2), perf_counter()):
                output_tokens = load.stream_output_tokens

    async def _ask_long(self, arrival: Arrival, due_s: float) -> None:
        asked = await self._ask(arrival.input_tokens, self._workload.prompt_output_tokens, due_s)
        if asked is not None:
            self.traffic.prompts.append(asked)

    async def _ask(self, input_tokens: int, output_tokens: int, due_s: float) -> Asked | None:
        """Send a new prompt; None if it failed."""
        random_ = random.Random(f"{self._workload.seed}/{next(self._numbers)}")
        body = msgspec.json.encode(
            {
                "model": self._model,
                "prompt": [random_.randrange(1, self._vocab_size) for _ in range(input_tokens)],
                "max_tokens": output_tokens,
                "ignore_eos": True,
                "temperature": 0.0,
                "stream": True,
            }
        )
        exchange = await self._client.send(body, due_s)
        if exchange.failure is not None:
            self.traffic.problems.append(f"a request failed: {exchange.failure}: {exchange.message}")
            return None
        return Asked(_worker_id(exchange), due_s, exchange.ttft_s)


def _worker_id(exchange: MeasuredRequest) -> str:
    """Give the request id of the step logs: the answer's id and the choice's index."""
    if not exchange.answer_id:
        raise Unavailable("an answer came without an id; is this a Penstock server?")
    return f"{exchange.answer_id}-0"
