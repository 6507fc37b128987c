"""Prompts with media at workers: who is asked, what is refused, and what a failing engine costs."""

import asyncio

import msgspec
import pytest

from penstock.core.errors import EngineError, Overloaded, RequestError, Unavailable
from penstock.core.types.requests import ExpandedPrompt, MediaItem, MediaPrompt
from penstock.core.wire import pack_tokens
from penstock.sim.loop import run_virtual
from penstock.worker.frontends import PROMPTS_MAX, MediaExpansions
from tests.support.cluster import MemoryCluster
from tests.support.manual_engine import ManualEngine
from tests.support.scenes import run_by

PROMPT = MediaPrompt(token_ids=pack_tokens([1, 2]), items=(MediaItem.of("image", b"file"),))
EXPANDED = ExpandedPrompt(token_ids=pack_tokens([1, 9, 9, 2]), positions=(1,))


class SeeingEngine(ManualEngine):
    """Expands by script: waits for `gate`, then gives what `outcome` is or raises it."""

    def __init__(self) -> None:
        super().__init__()
        self.outcome: ExpandedPrompt | Exception = EXPANDED
        self.gate: asyncio.Event | None = None
        self.asked = 0

    async def expand_media(self, prompt: MediaPrompt) -> ExpandedPrompt:
        self.asked += 1
        if self.gate is not None:
            await self.gate.wait()
        if isinstance(self.outcome, Exception):
            raise self.outcome
        return self.outcome


def run_scenario(scenario, engines):
    async def main():
        async with MemoryCluster() as cluster, cluster.dispatcher() as dispatcher:
            for name, engine in engines.items():
                await cluster.start(name, engine)
            await asyncio.sleep(0.1)
            await scenario(
                dispatcher,
                cluster,
                lambda prompt=PROMPT: dispatcher.expand_media(dispatcher.models()["tiny"], prompt),
            )

    run_virtual(main())


def test_the_same_image_goes_to_the_same_worker_and_another_takes_over():
    engines = {name: SeeingEngine() for name in ("w1", "w2", "w3")}

    async def scenario(_dispatcher, cluster, expand):
        for _ in range(5):
            assert await expand() == EXPANDED
        (first,) = (name for name, engine in engines.items() if engine.asked)
        assert engines[first].asked == 5
        for number in range(30):
            await expand(msgspec.structs.replace(PROMPT, items=(MediaItem.of("image", bytes([number])),)))
        assert all(engine.asked >= 3 for engine in engines.values()), "images are spread"
        asked = sum(engine.asked for engine in engines.values())
        engines[first].gate = asyncio.Event()
        waiting = asyncio.ensure_future(expand())
        await asyncio.sleep(0.1)
        cluster.kill(first)
        assert await waiting == EXPANDED
        assert sum(engine.asked for engine in engines.values()) == asked + 2

    run_scenario(scenario, engines)


def test_refusals_are_final_and_bugs_end_one_prompt():
    engine, other = SeeingEngine(), SeeingEngine()

    async def scenario(_dispatcher, _cluster, expand):
        for outcome in (RequestError("image 0 of the request cannot be read"), ValueError("a bug")):
            engine.outcome = other.outcome = outcome
            with pytest.raises(
                RequestError if isinstance(outcome, RequestError) else EngineError, match=str(outcome)
            ):
                await expand()
        assert engine.asked + other.asked == 2, "no worker is asked again about a broken image"
        engine.outcome = other.outcome = EXPANDED
        assert await expand() == EXPANDED

    run_scenario(scenario, {"w1": engine, "w2": other})


@run_by(run_scenario, {"w1": ManualEngine()})
async def test_engines_without_media_refuse_them_by_name(dispatcher, cluster, expand):
    with pytest.raises(RequestError, match=r"worker w1: engine of this worker takes no images"):
        await expand()


@pytest.mark.virtual
async def test_prompts_that_wait_are_bounded():
    engine, answers = SeeingEngine(), []
    engine.gate = asyncio.Event()
    expansions = MediaExpansions(engine, worker="w1", engine_name="manual")
    expansions.begin(PROMPT, None, answers.append)
    assert isinstance(answers.pop(), Unavailable)
    async with asyncio.TaskGroup() as group:
        for _ in range(PROMPTS_MAX + 1):
            expansions.begin(PROMPT, group, answers.append)
        (refused,) = answers
        assert isinstance(refused, Overloaded)
        engine.gate.set()
    assert answers[1:] == [EXPANDED] * PROMPTS_MAX
    async with asyncio.TaskGroup() as group:
        expansions.begin(PROMPT, group, answers.append)
    assert answers[-1] == EXPANDED
