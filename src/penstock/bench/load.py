"""Arrival processes: closed loop, Poisson, or trace replay."""

import asyncio
import itertools
import random
from collections.abc import Awaitable, Callable, Iterable, Iterator
from dataclasses import dataclass
from time import perf_counter

from penstock.bench.prompts import Prompts
from penstock.sim.workload.trace import TraceRow


@dataclass(frozen=True, slots=True)
class Planned:
    """A request to send `at_s` seconds after the start; None: when another one ends."""

    prompt: str
    output_tokens: int
    at_s: float | None = None


Send = Callable[[Planned, float | None], Awaitable[None]]
"""Sends a request and waits for its end; the second argument is its planned time, by `perf_counter`."""


def steady(prompts: Prompts, input_tokens: int, output_tokens: int) -> Iterator[Planned]:
    """Yield equal requests for ever."""
    for index in itertools.count():
        yield Planned(prompts.unique(index, input_tokens), output_tokens)


def poisson(
    prompts: Prompts, input_tokens: int, output_tokens: int, *, rate: float, seed: int
) -> Iterator[Planned]:
    """Yield equal requests for ever with Poisson arrivals, `rate` per second."""
    random_ = random.Random(seed)
    at_s = 0.0
    for index in itertools.count():
        yield Planned(prompts.unique(index, input_tokens), output_tokens, at_s)
        at_s += random_.expovariate(rate)


def replay(
    rows: Iterable[TraceRow], prompts: Prompts, *, speed: float, input_max: int | None, output_max: int | None
) -> Iterator[Planned]:
    """Yield a trace's requests, `speed` times as fast, with prompts and answers cut to the limits."""
    for index, row in enumerate(rows):
        input_tokens = min(row.input_tokens, input_max or row.input_tokens)
        output_tokens = max(min(row.output_tokens, output_max or row.output_tokens), 1)
        prompt = (
            prompts.shared(row.prefix_ids, input_tokens)
            if row.prefix_ids
            else prompts.unique(index, input_tokens)
        )
        yield Planned(prompt, output_tokens, row.at_s / speed)


async def run_load(
    plan: Iterator[Planned], send: Send, *, concurrency: int, duration_s: float | None
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

        async def send_one(planned: Planned, due_s: float | None) -> None:
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
