"""Readers that are slower than their engine: their requests leave it until what there is has been read, and nothing is lost."""

import asyncio

import msgspec
import pytest

from penstock.core.types.requests import FinishReason, SamplingParams
from penstock.core.wire import unpack_tokens
from penstock.runtime.config import PlaneConfig
from tests.support.cluster import MemoryCluster
from tests.support.kv_transfer import tiny_engine, tiny_request, whole_answer

TOKENS = 300
SMALL = PlaneConfig(window_tokens=8, stream_bytes_max=1024, connection_bytes_max=1 << 20)


def sampled(name, temperature=1.0):
    asked = tiny_request(name, max_tokens=TOKENS, logprobs=3)
    return msgspec.structs.replace(
        asked, sampling=SamplingParams(max_tokens=TOKENS, temperature=temperature, seed=5, logprobs=3)
    )


async def read_slowly(dispatcher, request, pause_s):
    """Read an answer with a pause before each part: its tokens, logprobs and finish reason."""
    tokens, logprobs, reason = [], [], None
    async with dispatcher.open(request) as stream:
        while reason is None:
            await asyncio.sleep(pause_s)
            delta = await anext(stream)
            tokens += unpack_tokens(delta.token_ids).tolist()
            logprobs += delta.logprobs
            reason = delta.finish_reason
    return tokens, [logprob.token_id for logprob in logprobs], reason


@pytest.mark.parametrize(
    ("workers", "limits"),
    [
        (2, SMALL),
        pytest.param(1, SMALL, marks=pytest.mark.nightly),
        pytest.param(2, SMALL.model_copy(update={"connection_bytes_max": 2048}), marks=pytest.mark.nightly),
    ],
)
@pytest.mark.virtual
async def test_a_slow_reader_gets_every_token_once_while_its_engine_does_without_it(workers, limits):
    async with MemoryCluster(plane=limits) as cluster, cluster.dispatcher() as dispatcher:
        for number in range(workers):
            await cluster.start(f"w{number}", tiny_engine(400))
        await dispatcher.looked()
        expected, *_ = await whole_answer(dispatcher, sampled("quick"))
        before = cluster.figure("parked_requests_total")
        loop = asyncio.get_running_loop()
        async with asyncio.TaskGroup() as group:
            slow = [group.create_task(read_slowly(dispatcher, sampled(f"s{n}"), 0.5)) for n in range(4)]
            await asyncio.sleep(5)
            assert sum(cluster.engine(name).load().running_requests for name in cluster.names) == 0, (
                "all are parked"
            )
            begun_s = loop.time()
            assert (await whole_answer(dispatcher, sampled("other")))[0] == expected
            assert loop.time() - begun_s < 5, "others are as quick as alone"
        for reading in slow:
            assert reading.result() == (expected, expected, FinishReason.LENGTH)
        assert cluster.figure("parked_requests_total") > before
        assert cluster.figure("migrations_total", outcome="moved") == 0
        dispatcher.check()
        for name in cluster.names:
            cluster.worker(name).check()
            assert cluster.engine(name).load().active_blocks == 0


@pytest.mark.virtual
async def test_who_never_reads_again_costs_what_is_held_and_no_engine():
    async with MemoryCluster(plane=SMALL) as cluster, cluster.dispatcher() as dispatcher:
        await cluster.start("w0", tiny_engine(400))
        await dispatcher.looked()
        async with dispatcher.open(sampled("gone")) as stream:
            await anext(stream)
            await asyncio.sleep(100)
            load = cluster.engine("w0").load()
            assert (load.running_requests, load.active_blocks) == (0, 0)
            assert load.generated_tokens < TOKENS / 2
        await asyncio.sleep(1)
        cluster.worker("w0").check()
