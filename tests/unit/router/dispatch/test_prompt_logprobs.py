"""Prompt logprobs over workers: a cached prefix is no reason to go anywhere, and a lost worker costs none and repeats none."""

import asyncio

import pytest

from penstock.core.types.requests import PromptLogprobs, Request, SamplingParams
from penstock.core.wire import unpack_tokens
from penstock.engine.mock import MockConfig, mock_engine
from penstock.engine.runner import RunnerInfo
from penstock.engine.scheduling.config import SchedulerConfig
from tests.support.cluster import MemoryCluster
from tests.support.scene import make_request

PROMPT = [(7 * place) % 300 + 5 for place in range(60)]
SHAPE = RunnerInfo(num_blocks=200, block_size=4, context_length=400, vocab_size=1000)


def asked(request_id: str, alternatives: int | None = 2) -> Request:
    sampling = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True, prompt_logprobs=alternatives)
    return make_request(request_id, PROMPT, sampling=sampling)


async def read(stream) -> tuple[list[int], list[PromptLogprobs]]:
    tokens: list[int] = []
    parts: list[PromptLogprobs] = []
    async with stream:
        async for delta in stream:
            parts += delta.prompt_logprobs
            tokens += unpack_tokens(delta.token_ids).tolist()
    return tokens, parts


def check(parts: list[PromptLogprobs]) -> None:
    assert [part.start for part in parts] == [1, *(part.end for part in parts[:-1])]
    assert parts[-1].end == len(PROMPT)
    token_ids = [token for part in parts for token in unpack_tokens(part.token_ids).reshape(-1, 3)[:, 0]]
    assert token_ids == PROMPT[1:]


@pytest.mark.virtual
async def test_a_worker_lost_amid_the_prompt_costs_no_token_and_repeats_none():
    scheduler = SchedulerConfig(max_batch_tokens=8)
    async with MemoryCluster() as cluster, cluster.dispatcher() as dispatcher:
        for name in ("w1", "w2"):
            await cluster.start(name, mock_engine(SHAPE, MockConfig(speedup=1), scheduler))
        await asyncio.sleep(0.01)
        whole, parts = await read(dispatcher.open(asked("a")))
        check(parts)
        assert len(parts) == 8, "one for each chunk"

        reading = asyncio.ensure_future(read(dispatcher.open(asked("b"))))
        await asyncio.sleep(0.014)
        (busy,) = (view.name for view in dispatcher.workers() if view.open_requests)
        cluster.kill(busy)
        tokens, parts = await reading
        assert tokens == whole
        check(parts)


@pytest.mark.virtual
async def test_a_cached_prefix_draws_no_request_whose_prompt_is_computed_anyway():
    async with MemoryCluster() as cluster, cluster.dispatcher() as dispatcher:
        for name in ("w1", "w2"):
            await cluster.start(name, mock_engine(SHAPE, MockConfig(speedup=1)))
        await asyncio.sleep(0.01)
        await read(dispatcher.open(asked("a", None)))
        await asyncio.sleep(1)
        for request, blocks in ((asked("b", None), 15), (asked("c"), 0)):
            async with dispatcher.open(request):
                (decision,) = dispatcher.explain(request.request_id)
                assert max(each.overlap_blocks for each in decision.candidates) == blocks
