"""Real KV between paged engines: answers are those of one worker, whatever the model's family, and where blocks are short."""

import asyncio
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import msgspec
import pytest

from penstock.core.hashing import block_hashes
from penstock.core.types.instances import Role
from penstock.core.types.requests import SamplingParams
from penstock.core.wire import pack_tokens, unpack_tokens
from penstock.engine.scheduling.config import SchedulerConfig
from penstock.router.config import DisaggConfig, RouterConfig
from tests.support.cluster import MemoryCluster, small_card
from tests.support.kv_transfer import PRICES, check_nothing_is_held, tiny_request
from tests.support.kv_transfer_scene import ALWAYS

torch = pytest.importorskip("torch")

from penstock.engine.paged.memory import PagedConfig  # noqa: E402
from penstock.engine.paged.runner import paged_engine  # noqa: E402
from tests.support.checkpoints import make_checkpoint  # noqa: E402

pytestmark = pytest.mark.engine
BLOCK_SIZE = 8
PLENTY = 300
LENGTHS = (39, 40, 41, 68, 47, 64, 55, 73)
"""Of prompts: up to a block's end, one past it, and in between."""
TOKENS = 60
USUAL = {"max_tokens": TOKENS, "ignore_eos": True}
SAMPLED = (
    SamplingParams(temperature=0.0, logprobs=2, **USUAL),
    SamplingParams(temperature=0.9, top_p=0.95, seed=11, logprobs=0, **USUAL),
    SamplingParams(
        temperature=1.2, top_k=40, min_p=0.01, seed=5, presence_penalty=0.4, frequency_penalty=0.3,
        repetition_penalty=1.1, **USUAL,
    ),
)  # fmt: skip
OTHER_FAMILIES = ("mistral", "qwen2", "qwen3", "qwen3_moe", "gemma2")


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
        values = [value for _, value in other.logprobs]
        assert [value for _, value in self.logprobs] == pytest.approx(values, abs=1e-3)


def prompt_of(number):
    return [2 + (number * 37 + 11 * i + i * i) % 500 for i in range(LENGTHS[number])]


def request(number, name="", prompt=None, **fields):
    """Ask in one of three ways, and for one of two choices of it."""
    tokens = pack_tokens(prompt or prompt_of(number))
    usual = {"sampling": SAMPLED[number % 3], "choice": number % 2} | fields
    return msgspec.structs.replace(tiny_request(f"r{number}{name}"), token_ids=tokens, **usual)


async def read(stream):
    told = Told()
    async with stream:
        async for delta in stream:
            told.tokens += unpack_tokens(delta.token_ids).tolist()
            told.logprobs += [(one.token_id, one.logprob) for one in delta.logprobs]
            told.reason = delta.finish_reason or told.reason
            told.cached_tokens = delta.cached_tokens if told.cached_tokens is None else told.cached_tokens
    return told


@asynccontextmanager
async def workers(checkpoint, *, router=ALWAYS, paged=None, **blocks):
    """Run workers of these names, `p...`, `d...` or `a...`, each with so many blocks; nothing may be held at the end."""
    async with MemoryCluster() as cluster, cluster.dispatcher(router) as dispatcher:
        for name, kv_blocks in blocks.items():
            usual = {"dtype": "float32", "block_size": BLOCK_SIZE, "context_length": 400} | (paged or {})
            config = PagedConfig(model=str(checkpoint), kv_blocks=kv_blocks, **usual)
            engine = paged_engine(config, SchedulerConfig(max_batch_tokens=40))
            role = {"p": Role.PREFILL, "d": Role.DECODE, "a": Role.AGGREGATED}[name[0]]
            card = small_card(block_size=BLOCK_SIZE)
            await cluster.start(name, engine, card=card, role=role, prices=PRICES)
        await dispatcher.looked()
        yield cluster, dispatcher
        await asyncio.sleep(0.5)  # the last word that blocks were read
        for name in cluster.names:
            check_nothing_is_held(cluster.worker(name), cluster.engine(name))


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return make_checkpoint(tmp_path_factory.mktemp("checkpoint") / "llama", "llama")


async def one_by_one_and_together(checkpoint, blocks, **paged):
    """Ask for a prompt, the same with another end, and both again, one after the other and all at once."""
    first, second = ([*prompt_of(number), *prompt_of(3)] for number in (5, 7))
    prompts = [first, first[:80] + second, first, second]
    async with workers(checkpoint, paged=paged, **blocks) as (cluster, dispatcher):
        has_groups = paged.get("window_tables", True) and checkpoint.name.startswith("gemma")
        assert all(cluster.engine(name).has_kv_groups == has_groups for name in cluster.names)
        asked = [request(number, "", prompt, choice=0) for number, prompt in enumerate(prompts)]
        found = [await read(dispatcher.open(one)) for one in asked]
        again = [msgspec.structs.replace(one, request_id=f"{one.request_id}-again") for one in asked]
        found += await asyncio.gather(*(read(dispatcher.open(one)) for one in again))
        if "d" in blocks:
            incoming = cluster.worker("d").kv_transfer.incoming
            assert incoming.fetched_blocks >= len(first) // BLOCK_SIZE
            assert incoming.early_blocks > 0, "some came while their prompts were computed"
            assert incoming.failures == {}
            assert cluster.engine("d").load().prefilled_tokens <= BLOCK_SIZE * len(found)
        return found


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "window_tables"),
    [
        ("llama", True),
        ("gemma3", True),
        pytest.param("gemma3", False, marks=pytest.mark.nightly),
        *(pytest.param(family, True, marks=pytest.mark.nightly) for family in OTHER_FAMILIES),
    ],
)
async def test_an_answer_is_that_of_one_worker(tmp_path, family, window_tables):
    checkpoint = make_checkpoint(tmp_path / family, family)
    whole = await one_by_one_and_together(checkpoint, {"a": PLENTY}, window_tables=window_tables)
    apart = {"p": PLENTY, "d": PLENTY}
    found = await one_by_one_and_together(checkpoint, apart, window_tables=window_tables)
    for told, expected in zip(found, whole, strict=True):
        assert len(told.tokens) > 1
        told.check_same(expected)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("prefill", "decode"),
    [
        (30, 34),
        pytest.param(PLENTY, 40, marks=pytest.mark.nightly),
        pytest.param(30, PLENTY, marks=pytest.mark.nightly),
    ],
)
async def test_preempted_requests_answer_as_one_worker_with_plenty_of_room_does(checkpoint, prefill, decode):
    """All eight at once need 112 blocks where they are answered, and 58 where their prompts are computed."""

    asked = [request(number) for number in range(len(LENGTHS))]
    paged = {"context_length": 200}
    async with workers(checkpoint, paged=paged, a=PLENTY) as (_, dispatcher):
        alone = [await read(dispatcher.open(one)) for one in asked]
    assert [len(told.logprobs) for told in alone[:3]] == [TOKENS, TOKENS, 0]
    async with workers(checkpoint, paged=paged, p=prefill, d=decode) as (cluster, dispatcher):
        found = await asyncio.gather(*(read(dispatcher.open(one)) for one in asked))
        assert cluster.worker("d").kv_transfer.incoming.fetched_blocks > 0
        assert (cluster.engine("d").load().preemptions > 0) is (decode < PLENTY)
    for told, expected in zip(found, alone, strict=True):
        told.check_same(expected)


def kv_bytes(cluster, name, asked):
    """What a worker keeps of a prompt's full blocks: (blocks, bytes of each)."""
    engine = cluster.engine(name)
    block_ids = engine.pin(block_hashes(asked.token_ids, BLOCK_SIZE))
    engine.unpin(block_ids)
    ((storage,),) = engine.kv_memory()
    return storage[list(block_ids)].flatten(1).view(torch.uint8)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["bfloat16", pytest.param("float16", marks=pytest.mark.nightly)])
async def test_in_16_bits_kv_is_equal_to_the_byte(checkpoint, dtype):
    """Kernels round by what else is in their step, so that tokens that are about as likely may change places."""

    asked = [request(number) for number in range(len(LENGTHS))]
    async with workers(checkpoint, paged={"dtype": dtype}, p=PLENTY, d=PLENTY) as (cluster, dispatcher):
        await asyncio.gather(*(read(dispatcher.open(one)) for one in asked))
        assert cluster.worker("d").kv_transfer.incoming.failures == {}
        for one, length in zip(asked, LENGTHS, strict=True):
            here, there = (kv_bytes(cluster, name, one) for name in "dp")
            assert len(here) == length // BLOCK_SIZE
            assert torch.equal(here, there)


@pytest.mark.parametrize("names", [("a0", "a1", "a2"), ("p0", "d0", "d1")], ids=["aggregated", "apart"])
async def test_each_prompt_token_of_several_answers_is_computed_once(checkpoint, names):
    router = RouterConfig(policy="least-loaded", disagg=DisaggConfig(remote_tokens_min=16))
    sampling = SamplingParams(temperature=1.0, seed=3, max_tokens=12, ignore_eos=True)
    prompt = [*prompt_of(5), 7, 8, 9]  # 8 blocks and 3 tokens

    async def answers(names, *, beside):
        asked = [request(0, f"-{choice}", prompt, sampling=sampling, choice=choice) for choice in range(4)]
        async with workers(checkpoint, router=router, **dict.fromkeys(names, PLENTY)) as (_, dispatcher):
            first = dispatcher.open(asked[0])
            others = [dispatcher.open(one, beside=first if beside else None) for one in asked[1:]]
            told = await asyncio.gather(*map(read, (first, *others)))
            decisions = dispatcher.latest_decisions(99)
            used = {one.worker for one in decisions} | {
                one.prefill.worker for one in decisions if one.prefill
            }
            return told, used - {None}

    together, used = await answers(names, beside=True)
    assert [told.cached_tokens for told in together] == [0, 64, 64, 64]
    assert len(used) == (1 if names[0] == "a0" else 2)
    alone, _ = await answers(("a0",), beside=False)
    assert [told.tokens for told in together] == [told.tokens for told in alone]
    assert len({tuple(told.tokens) for told in together}) == 4
