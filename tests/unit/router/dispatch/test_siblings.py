"""Several answers to one prompt: it is computed once, on one worker; each answer stays its own."""

import asyncio

import msgspec
import pytest

from penstock.core.errors import PenstockError
from penstock.core.types.requests import SamplingParams
from penstock.core.wire import unpack_tokens
from penstock.engine.mock import MockConfig, StepTiming, mock_engine
from penstock.engine.runner import RunnerInfo
from penstock.router.config import RouterConfig
from penstock.sim.loop import run_virtual
from tests.support.cluster import MemoryCluster
from tests.support.scene import make_request, scenario, settle

BLOCK = 4
PROMPT = tuple(range(10, 111))  # 25 blocks and a token
SHAPE = RunnerInfo(num_blocks=256, block_size=BLOCK, context_length=400, vocab_size=1000, eos_token_ids=())
TIMING = StepTiming(
    step_s=0.01,
    prefill_s_per_token=0.001,
    prefill_s_per_token2=0.0,
    decode_s_per_request=0.001,
    decode_s_per_context_token=0.0,
)


def choices(count, **sampling):
    for index in range(count):
        request = make_request(f"r-{index}", PROMPT)
        params = SamplingParams(
            **{"max_tokens": 9, "seed": 7, "temperature": 1.0, "ignore_eos": True} | sampling
        )
        yield msgspec.structs.replace(request, choice=index, sampling=params)


async def answer(stream):
    tokens = []
    async with stream:
        async for delta in stream:
            tokens += unpack_tokens(delta.token_ids).tolist()
    return tokens


def open_all(dispatcher, requests):
    streams = []
    for request in requests:
        streams.append(dispatcher.open(request, beside=streams[0] if streams else None))
    return streams


def on_mock_workers(scene, policy="kv", num_workers=4):
    async def main():
        config = RouterConfig(policy=policy)
        async with MemoryCluster() as cluster, cluster.dispatcher(config) as dispatcher:
            for number in range(num_workers):
                await cluster.start(f"w{number}", mock_engine(SHAPE, MockConfig(timing=TIMING)))
            await dispatcher.looked()
            result = await scene(cluster, dispatcher)
            dispatcher.check()
            return result

    return run_virtual(main())


@pytest.mark.parametrize("policy", ["kv", "least-loaded", "round-robin"])
def test_a_prompt_is_computed_once_for_all_its_choices(policy):
    async def scene(_, dispatcher):
        streams = open_all(dispatcher, choices(4))
        answers = await asyncio.gather(*map(answer, streams))
        assert all(len(tokens) == 9 for tokens in answers)
        assert len({tuple(tokens) for tokens in answers}) == 4, "each choice has noise of its own"
        workers = {decision.worker for decision in dispatcher.latest_decisions(99)}
        assert len(workers) == 1
        return sum(len(PROMPT) - stream.cached_tokens for stream in streams)

    assert on_mock_workers(scene, policy) == len(PROMPT) + 3, (
        "and the token past the last full block for each other"
    )


def test_each_choice_moves_with_its_tokens_when_the_worker_is_lost_and_the_prompt_is_computed_once_more():
    async def scene(cluster, dispatcher):
        streams = open_all(dispatcher, choices(4, max_tokens=60))
        tasks = [asyncio.create_task(answer(stream)) for stream in streams]
        await asyncio.sleep(0.5)
        assert all(stream.output_tokens for stream in streams)
        (first,) = {decision.worker for decision in dispatcher.latest_decisions(99)}
        cluster.kill(first)
        answers = await asyncio.gather(*tasks)
        assert [stream.migrations for stream in streams] == [1] * 4
        workers = {decision.worker for decision in dispatcher.latest_decisions(99)}
        assert len(workers) == 2, "they follow each other again"
        return answers

    async def undisturbed(_, dispatcher):
        return [await answer(dispatcher.open(request)) for request in choices(4, max_tokens=60)]

    assert on_mock_workers(scene) == on_mock_workers(undisturbed)


@scenario()
async def test_the_next_one_computes_the_prompt_where_the_first_is_cancelled_or_fails(
    cluster, dispatcher, engines
):
    streams = open_all(dispatcher, choices(3))
    tasks = [asyncio.create_task(answer(stream)) for stream in streams]
    await settle()
    assert sum(len(engine.requests) for engine in engines.values()) == 1, "the others wait"
    tasks[0].cancel()
    await settle()
    await asyncio.sleep(0.1)
    assert sum(len(engine.requests) for engine in engines.values()) == 1
    streams[1].fail(PenstockError("enough"))
    await settle()
    await asyncio.sleep(0.1)
    (engine,) = [engine for engine in engines.values() if engine.requests]
    assert list(engine.requests) == ["r-2"]
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
