"""When requests are sent: so many at a time, at random moments, or as a trace has them."""

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
    """A request to be sent `at_s` seconds after the start; None: as soon as another one has ended."""

    prompt: str
    output_tokens: int
    at_s: float | None = None


Send = Callable[[Planned, float | None], Awaitable[None]]
"""Sends a request and waits for its end; the second argument is when it was due, by `perf_counter`."""


def steady(prompts: Prompts, input_tokens: int, output_tokens: int) -> Iterator[Planned]:
    """Plan equal requests without end."""
    for index in itertools.count():
        yield Planned(prompts.unique(index, input_tokens), output_tokens)


def poisson(
    prompts: Prompts, input_tokens: int, output_tokens: int, *, rate: float, seed: int
) -> Iterator[Planned]:
    """Plan equal requests without end that come independently of each other, `rate` a second."""
    random_ = random.Random(seed)
    at_s = 0.0
    for index in itertools.count():
        yield Planned(prompts.unique(index, input_tokens), output_tokens, at_s)
        at_s += random_.expovariate(rate)


def replay(
    rows: Iterable[TraceRow], prompts: Prompts, *, speed: float, input_max: int | None, output_max: int | None
) -> Iterator[Planned]:
    """Plan a trace's requests, `speed` times as fast, with prompts and answers cut to what is allowed."""
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
    """Send what is planned, and wait for the last answer.

    Args:
        plan: all with `at_s`, or none.
        send: does it.
        concurrency: the most requests under way. One that is due while so many are waits, and its wait counts.
        duration_s: after this nothing new is sent; None sends the whole plan.
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
