"""Trials of chaos on virtual time, and bugs planted to be caught by them."""

import asyncio
import random
from collections import Counter
from collections.abc import Callable, Coroutine, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import pytest

from penstock.core.errors import DeadlineExceeded, Overloaded, PenstockError, Unavailable
from penstock.core.types.requests import FinishReason, Request
from penstock.core.wire import unpack_tokens
from penstock.router.dispatch.dispatcher import Dispatcher
from penstock.sim.loop import Deadlock, run, run_virtual
from tests.support.cluster import MemoryCluster
from tests.support.kv_transfer import tiny_engine, tiny_request, whole_answer

Main = Callable[[random.Random], Coroutine[Any, Any, Counter[str]]]
Prompt = tuple[int, int]
"""Length and seed."""


def seeds(quick: int, everything: int) -> list[Any]:
    """Give parameters of a test: so many seeds, the first `quick` of them always, the others in `make nightly`."""
    later = [pytest.param(seed, marks=pytest.mark.nightly) for seed in range(quick, everything)]
    return [*range(quick), *later]


def run_trial(main: Main, seed: int) -> Counter[str]:
    """Run a trial; of a group of errors the first is raised, from the group."""
    try:
        return run(main, seed)
    except BaseExceptionGroup as group:
        error: BaseException = group
        while isinstance(error, BaseExceptionGroup):
            error = error.exceptions[0]
        raise error from group


def run_trials(run_one: Callable[[int], Counter[str]], of: Iterable[int]) -> Counter[str]:
    """Run trials of several seeds; add up their outcomes. An error has a note of its seed."""
    outcomes: Counter[str] = Counter()
    for seed in of:
        try:
            outcomes += run_one(seed)
        except BaseException as error:
            error.add_note(f"seed {seed}")
            raise
    return outcomes


class Mutants(dict[str, Callable[[], AbstractContextManager[None]]]):
    """Planted bugs by name; each is there while its context is open."""

    def plant(self, bug: Callable[[], Iterator[None]]) -> Callable[[], Iterator[None]]:
        """Decorate a generator that plants a bug and removes it."""
        self[bug.__name__] = contextmanager(bug)
        return bug

    def caught_by(self, name: str, run_one: Callable[[int], object], of: Iterable[int]) -> int | None:
        """Give the first seed whose trial fails with the bug."""
        for seed in of:
            try:
                with self[name]():
                    run_one(seed)
            except (AssertionError, PenstockError, Deadlock, TimeoutError):
                return seed
        return None


def references(prompts: Sequence[Prompt], tokens: int) -> dict[Prompt, list[int]]:
    """Say what one worker alone answers."""
    answers: dict[Prompt, list[int]] = {}

    async def main() -> None:
        async with MemoryCluster() as cluster, cluster.dispatcher() as dispatcher:
            await cluster.start("alone", tiny_engine())
            for length, seed in prompts:
                asked = tiny_request(f"{length}-{seed}", length, tokens, seed)
                answers[length, seed] = (await whole_answer(dispatcher, asked))[0]

    run_virtual(main())
    return answers


async def read_and_compare(
    dispatcher: Dispatcher,
    request: Request,
    expected: list[int],
    *,
    leaves_s: float | None,
    pause_s: float = 0.0,
) -> str:
    """Read an answer, or leave it after a time; give the finish reason, the error's code, or "left".

    Raises:
        AssertionError: it is not the beginning of what is expected, or all of it where it ended by itself.
    """
    found: list[int] = []
    outcome: FinishReason | str | None = None
    try:
        async with asyncio.timeout(leaves_s), dispatcher.open(request) as stream:
            async for delta in stream:
                found += unpack_tokens(delta.token_ids).tolist()
                outcome = delta.finish_reason
                await asyncio.sleep(pause_s)
    except TimeoutError:
        outcome = "left"
    except (Unavailable, DeadlineExceeded, Overloaded) as error:
        outcome = error.code
    assert found == expected[: len(found)], f"{request.request_id}: not the answer of one worker"
    if isinstance(outcome, FinishReason):
        assert outcome is FinishReason.LENGTH
        assert len(found) == len(expected)
    return str(outcome)


def cut_between_workers(cluster: MemoryCluster, rng: random.Random) -> bool:
    """Break a link over which one worker reads another one's KV, if there is one; both live."""
    transfers = [cluster.worker(name).kv_transfer for name in cluster.names]
    links = [
        peer.link for one in transfers if one is not None for peer in one._agent.peers.values() if peer.link
    ]
    if links:
        rng.choice(links).close("it was cut")
    return bool(links)
