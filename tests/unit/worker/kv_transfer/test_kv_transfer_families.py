"""Real KV of every model family, transferred by chunk: answers are those of one worker, token for token."""

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
from tests.support.kv_transfer import PRICES, check_nothing_is_held, tiny_request, whole_answer

pytest.importorskip("torch")

import torch

from penstock.engine.paged.config import PagedConfig
from penstock.engine.paged.engine import paged_engine
from tests.support.checkpoints import make_checkpoint

pytestmark = [pytest.mark.engine, pytest.mark.slow]
FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "gemma3", "qwen3_moe", "gemma2")
BLOCK_SIZE = 8
LENGTH = 149
"""Of each prompt: several chunks and windows, and a block that is not full."""
GREEDY = SamplingParams(temperature=0.0, max_tokens=20, logprobs=2)
SEEDED = SamplingParams(temperature=0.9, top_p=0.95, seed=11, max_tokens=20)
ALWAYS = RouterConfig(policy="least-loaded", disagg=DisaggConfig(remote_tokens_min=1))


def asked():
    """Make both kinds of request, once more with a prefix that is cached by then, and one that begins otherwise."""
    prompts = [
        [2 + (seed * 37 + 11 * index + index * index) % 500 for index in range(LENGTH)] for seed in (1, 2)
    ]
    ids = [prompts[0], prompts[0][:80] + prompts[1], prompts[0], prompts[1]]
    return [
        msgspec.structs.replace(
            tiny_request(f"r{number}"),
            token_ids=pack_tokens(tokens),
            sampling=GREEDY if number % 2 else SEEDED,
        )
        for number, tokens in enumerate(ids)
    ]


def of_transformers(checkpoint):
    """Answer the greedy requests by transformers."""
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()
    for request in asked():
        if request.sampling is GREEDY:
            prompt = torch.tensor(unpack_tokens(request.token_ids)[None].astype("int64"))
            options = {"max_new_tokens": GREEDY.max_tokens, "do_sample": False, "pad_token_id": 0}
            found = model.generate(prompt, attention_mask=torch.ones_like(prompt), **options)
            yield found[0, prompt.shape[1] :].tolist()


async def answers(checkpoint, roles, *, window_tables=True):
    """Ask workers of these roles one after the other, and all at once with other names."""
    async with MemoryCluster() as cluster, cluster.dispatcher(ALWAYS) as dispatcher:
        for number, role in enumerate(roles):
            engine = paged_engine(
                PagedConfig(
                    model=str(checkpoint),
                    block_size=BLOCK_SIZE,
                    kv_blocks=200,
                    context_length=400,
                    window_tables=window_tables,
                ),
                SchedulerConfig(max_batch_tokens=40),
            )
            card = small_card(block_size=BLOCK_SIZE)
            await cluster.start(f"w{number}", engine, card=card, role=role, prices=PRICES)
            assert engine.has_kv_groups == (window_tables and checkpoint.name.startswith("gemma"))
        await dispatcher.looked()
        found = [await whole_answer(dispatcher, request) for request in asked()]
        again = [msgspec.structs.replace(one, request_id=f"{one.request_id}-again") for one in asked()]
        found += await asyncio.gather(*(whole_answer(dispatcher, request) for request in again))
        kv_transfer = cluster.worker("w1").kv_transfer if len(roles) > 1 else None
        if kv_transfer is not None:
            assert kv_transfer.incoming.fetched_blocks >= LENGTH // BLOCK_SIZE
            assert kv_transfer.incoming.early_blocks > 0, "some came while their prompts were computed"
            assert kv_transfer.incoming.failures == {}
            assert cluster.engine("w1").load().prefilled_tokens <= BLOCK_SIZE * len(found)
            await asyncio.sleep(0.5)  # the last word that blocks were read
            for name in cluster.names:
                check_nothing_is_held(cluster.worker(name), cluster.engine(name))
        return [(tokens, reason, logprobs) for tokens, reason, _, logprobs in found]


@pytest.mark.parametrize(
    ("family", "window_tables"), [*((family, True) for family in FAMILIES), ("gemma3", False)]
)
def test_an_answer_is_that_of_one_worker(tmp_path, family, window_tables):
    checkpoint = make_checkpoint(tmp_path / family, family)

    async def main():
        whole = await answers(checkpoint, [Role.AGGREGATED], window_tables=window_tables)
        assert all(len(tokens) > 1 for tokens, *_ in whole)
        roles = [Role.PREFILL, Role.DECODE]
        assert await answers(checkpoint, roles, window_tables=window_tables) == whole
        if family == "gemma3":
            count = len(asked())
            assert [list(tokens) for tokens, *_ in whole[1:count:2]] == list(of_transformers(checkpoint))

    run_async(main())
