"""Whether a first token waited for prefill or for decode workers, in whole deployments on virtual time."""

import asyncio

from penstock.router.config import DisaggConfig, QueueConfig, RouterConfig
from tests.support.kv_transfer import tiny_engine, tiny_request
from tests.support.kv_transfer_scene import beside_streams, scenario

PLACES = 4
PROMPT_TOKENS, ANSWER_TOKENS = 60, 100
LONGER_PROMPTS_MOVE = RouterConfig(policy="least-loaded", disagg=DisaggConfig(remote_tokens_min=20))
QUEUED = RouterConfig(
    policy="kv",
    disagg=DisaggConfig(remote_tokens_min=4, local_tokens_max=1, kv_transfer_s=0.0),
    queue=QueueConfig(threshold_s=0.05),
)
"""Every prompt goes to a prefill worker, and waits at the router while that or the decode worker is busy."""


async def waits(dispatcher, count, *, prompt_tokens=PROMPT_TOKENS, max_tokens=ANSWER_TOKENS):
    """Send requests at once; give (TTFT, whether it waited for decode workers) of each."""
    loop = asyncio.get_running_loop()

    async def one(number):
        opened_s = loop.time()
        request = tiny_request(f"r{number}", prompt_tokens, max_tokens, seed=number)
        found = None
        async with dispatcher.open(request) as stream:
            assert not stream.waited_for_decode
            async for _ in stream:
                found = found or (loop.time() - opened_s, stream.waited_for_decode)
        return found

    return await asyncio.gather(*(one(number) for number in range(count)))


@scenario(router=LONGER_PROMPTS_MOVE)
async def test_prompts_wait_for_the_workers_that_compute_them(cluster, dispatcher):
    for prompt_tokens, is_decode in ((PROMPT_TOKENS, False), (10, True)):
        found = await waits(dispatcher, 3, prompt_tokens=prompt_tokens)
        assert [waited for _, waited in found] == [is_decode] * 3


@scenario(router=QUEUED, engine=lambda _name: tiny_engine(kv_blocks=4000, places=PLACES))
async def test_what_is_queued_until_a_decode_worker_has_a_batch_slot_waits_for_that(cluster, dispatcher):
    async def crowd():
        return await waits(dispatcher, 6, max_tokens=10)

    found = await beside_streams(dispatcher, crowd, streams=PLACES, prompt_tokens=8)
    assert min(ttft_s for ttft_s, _ in found) > 1.0, "streams of 380 tokens keep all batch slots"
    assert all(waited for _, waited in found)
