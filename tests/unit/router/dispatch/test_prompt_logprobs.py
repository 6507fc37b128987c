"""Prompt logprobs over workers: a cached prefix is no reason to go anywhere, and a lost worker costs none and repeats none."""

import asyncio

from penstock.core.ids import RequestId
from penstock.core.types.requests import PromptLogprobs, Request, SamplingParams
from penstock.core.wire import pack_tokens, unpack_tokens
from penstock.engine.mock.engine import MockConfig, mock_engine
from penstock.engine.runner import RunnerInfo
from penstock.engine.scheduling.config import SchedulerConfig
from penstock.router.dispatch.progress import Progress
from penstock.sim.loop.loop import run_virtual
from tests.support.cluster import MemoryCluster

PROMPT = [(7 * place) % 300 + 5 for place in range(60)]
SHAPE = RunnerInfo(num_blocks=200, block_size=4, context_length=400, vocab_size=1000)


def make_request(request_id: str, alternatives: int | None = 2) -> Request:
    return Request(
        request_id=RequestId(request_id),
        model="tiny",
        token_ids=pack_tokens(PROMPT),
        sampling=SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True, prompt_logprobs=alternatives),
        salt=b"tiny-1",
    )


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


def test_a_worker_lost_amid_the_prompt_costs_no_token_and_repeats_none() -> None:
    async def main() -> None:
        scheduler = SchedulerConfig(max_batch_tokens=8)
        async with MemoryCluster() as cluster, cluster.dispatcher() as dispatcher:
            for name in ("w1", "w2"):
                await cluster.start(name, mock_engine(SHAPE, MockConfig(speedup=1), scheduler))
            await asyncio.sleep(0.01)
            whole, parts = await read(dispatcher.open(make_request("a")))
            check(parts)
            assert len(parts) == 8, "one for each chunk"

            reading = asyncio.ensure_future(read(dispatcher.open(make_request("b"))))
            await asyncio.sleep(0.014)
            (busy,) = (view.name for view in dispatcher.workers() if view.open_requests)
            cluster.kill(busy)
            tokens, parts = await reading
            assert tokens == whole
            check(parts)

    run_virtual(main())


def test_a_cached_prefix_draws_no_request_whose_prompt_is_computed_anyway() -> None:
    async def main() -> None:
        async with MemoryCluster() as cluster, cluster.dispatcher() as dispatcher:
            for name in ("w1", "w2"):
                await cluster.start(name, mock_engine(SHAPE, MockConfig(speedup=1)))
            await asyncio.sleep(0.01)
            await read(dispatcher.open(make_request("a", None)))
            await asyncio.sleep(1)
            router, pool = dispatcher._shared.router, dispatcher._shared.fleet.pools["tiny"]
            for request, blocks in ((make_request("b", None), 15), (make_request("c"), 0)):
                hashed = Progress(request, pool.card, dispatcher._shared.hash_key).request()
                scored = router.score(hashed, set())
                assert scored is not None
                assert scored.context.overlap_blocks.max() == blocks

    run_virtual(main())
