"""Several answers to one prompt on real engines: each prompt token is computed once, apart or not, and answers are one worker's."""

import asyncio

import msgspec
import pytest

from penstock.core.types.instances import Role
from penstock.core.types.requests import SamplingParams
from penstock.core.wire import pack_tokens, unpack_tokens
from penstock.engine.scheduling.config import SchedulerConfig
from penstock.router.config import DisaggConfig, RouterConfig
from penstock.testing.loop import run_async
from tests.support.cluster import MemoryCluster, small_card
from tests.support.kv_transfer import PRICES, tiny_request

pytest.importorskip("torch")

from penstock.engine.paged.config import PagedConfig
from penstock.engine.paged.engine import paged_engine
from tests.support.checkpoints import make_checkpoint

pytestmark = pytest.mark.engine
BLOCK_SIZE = 8
PROMPT = [2 + (11 * i + i * i) % 500 for i in range(67)]  # 8 blocks and 3 tokens
CHOICES = 4


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return make_checkpoint(tmp_path_factory.mktemp("checkpoint") / "llama", "llama")


def choices():
    sampling = SamplingParams(temperature=1.0, seed=3, max_tokens=12, ignore_eos=True)
    for choice in range(CHOICES):
        yield msgspec.structs.replace(
            tiny_request(f"r-{choice}"), token_ids=pack_tokens(PROMPT), sampling=sampling, choice=choice
        )


async def answer(stream):
    async with stream:
        return [token async for delta in stream for token in unpack_tokens(delta.token_ids).tolist()]


def answered(checkpoint, names, *, beside):
    """Give the answers, what was cached for each, and who was chosen."""

    async def main():
        config = RouterConfig(policy="least-loaded", disagg=DisaggConfig(remote_tokens_min=16))
        async with MemoryCluster() as cluster, cluster.dispatcher(config) as dispatcher:
            for name in names:
                paged = PagedConfig(
                    model=str(checkpoint),
                    dtype="float32",
                    block_size=BLOCK_SIZE,
                    kv_blocks=200,
                    context_length=200,
                )
                engine = paged_engine(paged, SchedulerConfig(max_batch_tokens=40))
                role = {"p": Role.PREFILL, "d": Role.DECODE, "a": Role.AGGREGATED}[name[0]]
                card = small_card(block_size=BLOCK_SIZE)
                await cluster.start(name, engine, card=card, role=role, prices=PRICES)
            await dispatcher.looked()
            first = None
            streams = []
            for request in choices():
                streams.append(dispatcher.open(request, beside=first))
                first = streams[0] if beside else None
            answers = await asyncio.gather(*map(answer, streams))
            decisions = dispatcher.latest_decisions(99)
            workers = {one.worker for one in decisions}
            workers |= {one.prefill.worker for one in decisions if one.prefill and one.prefill.worker}
            return answers, [stream.cached_tokens for stream in streams], workers

    return run_async(main())


@pytest.mark.parametrize("names", [("a0", "a1", "a2"), ("p0", "d0", "d1")], ids=["aggregated", "apart"])
def test_each_prompt_token_is_computed_once(checkpoint, names):
    answers, cached, workers = answered(checkpoint, names, beside=True)
    assert cached == [0] + [64] * (CHOICES - 1)
    assert len(workers) == (1 if names[0] == "a0" else 2)
    alone, _, _ = answered(checkpoint, ("a0",), beside=False)
    assert answers == alone
    assert len({tuple(tokens) for tokens in answers}) == CHOICES
