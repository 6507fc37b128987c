"""Arrival processes: closed loop, Poisson, or trace replay."""

import asyncio
import functools
import itertools
import random
from collections.abc import Awaitable, Callable, Iterable, Iterator
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import numpy as np

from penstock.bench.client import Client, MeasuredRequest
from penstock.core.errors import Unavailable
from penstock.deploy.messages import cause_of
from penstock.sim.trace import PREFIX_BLOCK_TOKENS, TraceRow

_COMMON = (
    "about above after again air all along also always and animal answer any around ask away back because been "
    "before began below between big book both boy build but call came can carry change children city close come "
    "could country cut day did different does done down each early earth eat end enough even every example eye "
    "face family far father feet few find first follow food for form found four from full gave get girl give go "
    "good great group grow had half hand hard has have head hear help her here high him his home house how idea "
    "into just keep kind knew know land large last later learn leave left letter life light like line list little "
    "live long look made make man many may mean men might mile miss more most mother mountain move much must name "
    "near need never new next night north now number off often old once one only open order other our out over "
    "page paper part people picture place plain plan plant play point port press quick read real right river road "
    "rock room run said same saw say school sea second see seem sentence set she ship should show side sleep small "
    "some song soon sound south spell stand star start state stay still stop story study sun take talk tell than "
    "that their them then there these they thing think those thought three time together took tree true try turn "
    "two under until use very voice walk want war water way week well went were what wheel when where which while "
    "white who why will wind with wood word work world would write year you young your"
)
_WORDS = _COMMON.split()
PROBES = (_WORDS[0], " ".join(_WORDS))
"""Two prompts whose tokens the server counts: one word, and every word once."""
_BLOCK_TEXTS_MAX = 4096


@dataclass(frozen=True, slots=True)
class PromptScale:
    """Tokens of a prompt: `overhead_tokens` for the chat template plus `tokens_per_word` per word."""

    overhead_tokens: float
    tokens_per_word: float

    @classmethod
    def fit(cls, counted: tuple[int, int]) -> "PromptScale":
        """Fit to the server's counts for `PROBES`."""
        short_tokens, long_tokens = counted
        slope = max((long_tokens - short_tokens) / (len(_WORDS) - 1), 0.1)
        return cls(max(short_tokens - slope, 0.0), slope)

    def words(self, num_tokens: float) -> int:
        """Give the number of words with `num_tokens` tokens, without the template."""
        return max(round(num_tokens / self.tokens_per_word), 1)


class Prompts:
    def __init__(self, seed: int, scale: PromptScale) -> None:
        self._seed = seed
        self._scale = scale
        self._block = functools.lru_cache(maxsize=_BLOCK_TEXTS_MAX)(self._block_text)

    def unique(self, index: int, num_tokens: int) -> str:
        """Make the prompt of request `index`, which shares no prefix with others."""
        words = self._scale.words(num_tokens - self._scale.overhead_tokens)
        return text(f"{self._seed}/request/{index}", words)

    def shared(self, prefix_ids: tuple[int, ...], num_tokens: int) -> str:
        """Make a prompt of 512-token blocks that depend only on their ids, cut to `num_tokens`."""
        wanted = self._scale.words(num_tokens - self._scale.overhead_tokens)
        words: list[str] = []
        for prefix_id in prefix_ids:
            if len(words) >= wanted:
                break
            words += self._block(prefix_id)
        return " ".join(words[:wanted])

    def _block_text(self, prefix_id: int) -> tuple[str, ...]:
        words = self._scale.words(PREFIX_BLOCK_TOKENS)
        return tuple(text(f"{self._seed}/block/{prefix_id}", words).split())


def text(seed: str, num_words: int) -> str:
    return " ".join(random.Random(seed).choices(_WORDS, k=num_words))


@dataclass(frozen=True, slots=True)
class PlannedRequest:
    """A request to send `at_s` seconds after the start; None: when another one ends."""

    prompt: str
    output_tokens: int
    at_s: float | None = None


Send = Callable[[PlannedRequest, float | None], Awaitable[None]]
"""Sends a request and waits for its end; the second argument is its planned time, by `perf_counter`."""


def steady(prompts: Prompts, input_tokens: int, output_tokens: int) -> Iterator[PlannedRequest]:
    """Yield equal requests for ever."""
    for index in itertools.count():
        yield PlannedRequest(prompts.unique(index, input_tokens), output_tokens)


def poisson(
    prompts: Prompts, input_tokens: int, output_tokens: int, *, rate: float, seed: int
) -> Iterator[PlannedRequest]:
    """Yield equal requests for ever with Poisson arrivals, `rate` per second."""
    random_ = random.Random(seed)
    at_s = 0.0
    for index in itertools.count():
        yield PlannedRequest(prompts.unique(index, input_tokens), output_tokens, at_s)
        at_s += random_.expovariate(rate)


def replay(
    rows: Iterable[TraceRow], prompts: Prompts, *, speed: float, input_max: int | None, output_max: int | None
) -> Iterator[PlannedRequest]:
    """Yield a trace's requests, `speed` times as fast, with prompts and answers cut to the limits."""
    for index, row in enumerate(rows):
        input_tokens = min(row.input_tokens, input_max or row.input_tokens)
        output_tokens = max(min(row.output_tokens, output_max or row.output_tokens), 1)
        prompt = (
            prompts.shared(row.prefix_ids, input_tokens)
            if row.prefix_ids
            else prompts.unique(index, input_tokens)
        )
        yield PlannedRequest(prompt, output_tokens, row.at_s / speed)


async def run_load(
    plan: Iterator[PlannedRequest], send: Send, *, concurrency: int, duration_s: float | None
) -> None:
    """Send the planned requests and wait for the last answer.

    Args:
        plan: requests, all with `at_s` or none.
        send: sends one request.
        concurrency: most requests in flight. A request due beyond that waits, and its wait counts as latency.
        duration_s: seconds after which no request is sent; None sends the whole plan.
    """
    start_s = perf_counter()
    end_s = start_s + (duration_s if duration_s is not None else float("inf"))
    async with asyncio.TaskGroup() as tasks:
        slots = asyncio.Semaphore(concurrency)

        async def send_one(planned: PlannedRequest, due_s: float | None) -> None:
            try:
                await send(planned, due_s)
            finally:
                slots.release()

        for planned in plan:
            due_s = None if planned.at_s is None else start_s + planned.at_s
            if due_s is not None and (wait_s := min(due_s, end_s) - perf_counter()) > 0:
                await asyncio.sleep(wait_s)
            await slots.acquire()
            if perf_counter() >= end_s:
                slots.release()
                break
            tasks.create_task(send_one(planned, due_s))


_ROUNDS, _QUICK_ROUNDS = 3, 1
_SETTLE_S = 1.0  # seconds of load before each burst

MakeClient = Callable[[], Client]
MakeBody = Callable[[int], bytes]


async def measure_burst(
    make_client: MakeClient, make_body: MakeBody, *, size: int, concurrency: int, quick: bool
) -> tuple[dict[str, float], dict[str, list[float]]]:
    """Measure bursts beside a closed-loop load.

    Args:
        make_client: makes a client without connections.
        make_body: makes the body of request number n.
        size: requests in a burst, all sent at once.
        concurrency: concurrent requests of the load.
        quick: one burst of each kind instead of three.

    Returns:
        (figures, TTFT samples in seconds).

    Raises:
        Unavailable: a request of a burst failed.
    """
    numbers = itertools.count()
    seconds: dict[str, list[float]] = {"standing_ttft_s": [], "burst_ttft_s": []}
    load, idle = make_client(), make_client()

    async def keep_busy() -> None:
        while True:
            await load.send(make_body(next(numbers)))

    async def burst(client: Client) -> list[MeasuredRequest]:
        return await asyncio.gather(*(client.send(make_body(next(numbers))) for _ in range(size)))

    try:
        async with asyncio.TaskGroup() as group:
            await burst(idle)  # opens the connections
            busy = [group.create_task(keep_busy()) for _ in range(concurrency)]
            for _ in range(_QUICK_ROUNDS if quick else _ROUNDS):
                await asyncio.sleep(_SETTLE_S)
                seconds["standing_ttft_s"] += _ttfts(await burst(idle))
                await asyncio.sleep(_SETTLE_S)
                new = make_client()
                try:
                    seconds["burst_ttft_s"] += _ttfts(await burst(new))
                finally:
                    new.close()
            for task in busy:
                task.cancel()
    except BaseExceptionGroup as errors:
        raise cause_of(errors) from None
    finally:
        load.close()
        idle.close()
    return _figures(seconds), seconds


def _ttfts(exchanges: list[MeasuredRequest]) -> list[float]:
    failed = [exchange for exchange in exchanges if exchange.failure is not None]
    if failed:
        raise Unavailable(
            f"--burst: {len(failed)} of {len(exchanges)} requests failed: {failed[0].failure}: {failed[0].message}"
        )
    return [exchange.first_token_s - exchange.due_s for exchange in exchanges if exchange.first_token_s]


def _figures(seconds: dict[str, list[float]]) -> dict[str, float]:
    figures: dict[str, Any] = {}
    for name, values in seconds.items():
        kind = name.removesuffix("_s")
        for percent in (50, 99):
            figures[f"{kind}_ms_p{percent}"] = float(np.percentile(values, percent)) * 1e3
    figures["burst_over_standing_ttft_p99"] = figures["burst_ttft_ms_p99"] / figures["standing_ttft_ms_p99"]
    return figures
