"""Real KV where blocks are short: preempted, computed again, cached on one side only; answers are those of one worker."""

import asyncio
from dataclasses import dataclass, field

import msgspec
import pytest

from penstock.core.hashing import block_hashes
from penstock.core.types.instances import Role
from penstock.core.types.requests import SamplingParams
from penstock.core.wire import pack_tokens, unpack_tokens
from penstock.engine.scheduling.config import SchedulerConfig
from penstock.router.config import DisaggConfig, RouterConfig
from penstock.testing.loop import run_async
from tests.support.cluster import MemoryCluster, small_card
from tests.support.kv_transfer import PRICES, check_nothing_is_held, tiny_request

pytest.importorskip("torch")

import torch

from penstock.engine.paged.config import PagedConfig
from penstock.engine.paged.engine import paged_engine
from tests.support.checkpoints import make_checkpoint

pytestmark = [pytest.mark.engine, pytest.mark.slow]
BLOCK_SIZE = 8
PLENTY = 300
LENGTHS = (39, 40, 41, 68, 47, 64, 55, 73)
"""Of prompts: up to a block's end, one past it, and in between."""
TOKENS = 60
ALWAYS = RouterConfig(policy="least-loaded", disagg=DisaggConfig(remote_tokens_min=1))
SAMPLED = (
    SamplingParams(temperature=0.0, max_tokens=TOKENS, ignore_eos=True, logprobs=2),
    SamplingParams(temperature=0.9, top_p=0.95, seed=11, max_tokens=TOKENS, ignore_eos=True, logprobs=0),
    SamplingParams(
        temperature=1.2,
        top_k=40,
        min_p=0.01,
        seed=5,
        presence_penalty=0.4,
        frequency_penalty=0.3,
        repetition_penalty=1.1,
        max_tokens=TOKENS,
        ignore_eos=True,
    ),
)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return make_checkpoint(tmp_path_factory.mktemp("checkpoint") / "llama", "llama")


@dataclass
class Told:
    """An answer, whole."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[tuple[int, float]] = field(default_factory=list)
    reason: str | None = None
    cached_tokens: int | None = None

    def check_same(self, other):
        assert (self.tokens, self.reason) == (other.tokens, other.reason)
        assert [token for token, _ in self.logprobs] == [token for token, _ in other.logprobs]
        assert [value for _, value in self.logprobs] == pytest.approx(
            [value for _, value in other.logprobs], abs=1e-3
        )


def request(number, name="", prompt=None):
    """Ask in one of three ways, and for one of two choices of it."""
    tokens = prompt or [2 + (number * 37 + 11 * i + i * i) % 500 for i in range(LENGTHS[number])]
    return msgspec.structs.replace(
        tiny_request(f"r{number}{name}"),
        token_ids=pack_tokens(tokens),
        sampling=SAMPLED[number % 3],
        choice=number % 2,
    )


async def tell(dispatcher, asked):
    told = Told()
    async with dispatcher.open(asked) as stream:
        async for delta in stream:
            told.tokens += unpack_tokens(delta.token_ids).tolist()
            told.logprobs += [(one.token_id, one.logprob) for one in delta.logprobs]
            told.reason = delta.finish_reason or told.reason
            told.cached_tokens = delta.cached_tokens if told.cached_tokens is None else told.cached_tokens
    return told


def run_scenario(checkpoint, scene, *, dtype="float32", **workers):
    """Run a scene with workers of these names, `p...` and `d...`, or one alone `a`; each with so many blocks."""

    async def start(cluster, name, kv_blocks=PLENTY):
        engine = paged_engine(
            PagedConfig(
                model=str(checkpoint),
                dtype=dtype,
                block_size=BLOCK_SIZE,
                kv_blocks=kv_blocks,
                context_length=200,
            ),
            SchedulerConfig(max_batch_tokens=40),
        )
        role = {"p": Role.PREFILL, "d": Role.DECODE, "a": Role.AGGREGATED}[name[0]]
        await cluster.start(name, engine, card=small_card(block_size=BLOCK_SIZE), role=role, prices=PRICES)

    async def main():
        async with MemoryCluster() as cluster, cluster.dispatcher(ALWAYS) as dispatcher:
            for name, kv_blocks in workers.items():
                await start(cluster, name, kv_blocks)
            await dispatcher.looked()
            found = await scene(cluster, dispatcher, start)
            await asyncio.sleep(0.5)  # the last word that blocks were read
            for name in cluster.names:
                check_nothing_is_held(cluster.worker(name), cluster.engine(name))
            return found

    return run_async(main())


@pytest.fixture(scope="module")
def alone(checkpoint):
    """What one worker with plenty of room answers to each, one after the other."""

    async def scene(cluster, dispatcher, start):
        del cluster, start
        answers = [await tell(dispatcher, request(number)) for number in range(len(LENGTHS))]
        assert [len(told.logprobs) for told in answers[:3]] == [TOKENS, TOKENS, 0]
        return answers

    return run_scenario(checkpoint, scene, a=PLENTY)


@pytest.mark.parametrize(("prefill", "decode"), [(PLENTY, 40), (30, PLENTY), (30, 34)])
def test_preempted_requests_answer_as_one_worker_with_plenty_of_room_does(checkpoint, alone, prefill, decode):
    """All eight at once need 112 blocks where they are answered, and 58 where their prompts are computed."""

    async def scene(cluster, dispatcher, start):
        del start
        async with asyncio.TaskGroup() as group:
            asked = [group.create_task(tell(dispatcher, request(number))) for number in range(len(LENGTHS))]
        assert cluster.worker("d").kv_transfer.incoming.fetched_blocks > 0
        return [task.result() for task in asked], cluster.engine("d").load()

    answers, load = run_scenario(checkpoint, scene, p=prefill, d=decode)
    for told, expected in zip(answers, alone, strict=True):
        told.check_same(expected)
    assert (load.preemptions > 0) is (decode < PLENTY)


@pytest.mark.parametrize("side", ["prefill", "decode"])
def test_a_prefix_that_only_one_side_has_is_used_there(checkpoint, side):
    """The other side's worker is a new one."""
    before = [2 + (11 * i + i * i) % 500 for i in range(66)]
    cases = [request(number, "-again", before + [7 + number] * 30) for number in range(3)]

    async def whole(cluster, dispatcher, start):
        del cluster, start
        return [await tell(dispatcher, one) for one in cases]

    async def scene(cluster, dispatcher, start):
        found = []
        for turn, one in enumerate(cases):
            await tell(dispatcher, request(0, f"-before-{turn}", before))
            gone, new = (f"d{turn}", f"d{turn + 1}") if side == "prefill" else (f"p{turn}", f"p{turn + 1}")
            cluster.kill(gone)
            await start(cluster, new)
            await asyncio.sleep(0.1)
            other = cluster.worker(new if side == "prefill" else "d0").kv_transfer
            fetched = other.incoming.fetched_blocks
            found.append(await tell(dispatcher, one))
            has = 66 // BLOCK_SIZE
            assert other.incoming.fetched_blocks - fetched == (12 if side == "prefill" else 12 - has)
            assert found[-1].cached_tokens == (has * BLOCK_SIZE if side == "prefill" else 0)
            assert other.incoming.failures == {}
        return found

    apart = run_scenario(checkpoint, scene, p0=PLENTY, d0=PLENTY)
    for told, expected in zip(apart, run_scenario(checkpoint, whole, a=PLENTY), strict=True):
        told.check_same(expected)


def kv_bytes(cluster, name, asked):
    """What a worker keeps of a prompt's full blocks: (blocks, bytes of each)."""
    engine = cluster.engine(name)
    block_ids = engine.pin(block_hashes(asked.token_ids, BLOCK_SIZE))
    engine.unpin(block_ids)
    ((storage,),) = engine.kv_memory()
    return storage[list(block_ids)].flatten(1).view(torch.uint8)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_in_16_bits_kv_is_equal_to_the_byte_and_logprobs_are_close(checkpoint, dtype):
    """Kernels round by what else is in their step, so that tokens that are about as likely may change places."""
    numbers = [number for number in range(len(LENGTHS)) if SAMPLED[number % 3].logprobs is not None]

    async def together(cluster, dispatcher, start):
        del start
        answers = await asyncio.gather(*(tell(dispatcher, request(number)) for number in numbers))
        if "d" in cluster.names:
            assert cluster.worker("d").kv_transfer.incoming.failures == {}
            for number in numbers:
                here, there = (kv_bytes(cluster, name, request(number)) for name in ("d", "p"))
                assert len(here) == LENGTHS[number] // BLOCK_SIZE
                assert torch.equal(here, there)
        return answers

    apart = run_scenario(checkpoint, together, dtype=dtype, p=PLENTY, d=PLENTY)
    for told, expected in zip(apart, run_scenario(checkpoint, together, dtype=dtype, a=PLENTY), strict=True):
        compared = 0
        for (token, logprob), (other, likewise) in zip(told.logprobs, expected.logprobs, strict=True):
            if token != other:
                break
            assert logprob == pytest.approx(likewise, abs=0.1)
            compared += 1
        assert compared > 0
