"""Models whose layers with a sliding window have block tables of their own: tokens of transformers, and the memory of a window."""

import asyncio

import numpy as np
import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from penstock.core.types.instances import Role  # noqa: E402
from penstock.core.wire import unpack_tokens  # noqa: E402
from penstock.engine.kv_tiers import KvConfig, tier_maker  # noqa: E402
from penstock.engine.paged.memory import PagedConfig  # noqa: E402
from penstock.engine.paged.models import LayerGroups  # noqa: E402
from penstock.engine.paged.runner import paged_engine  # noqa: E402
from penstock.kv.groups import Windows  # noqa: E402

pytestmark = pytest.mark.engine
WINDOW, SIZE = 48, 8


class Answers:
    """What transformers adds to a prompt."""

    def __init__(self, path):
        torch.set_num_threads(1)
        self.model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()

    def __call__(self, prompt, count):
        token_ids = torch.tensor([prompt])
        mask = torch.ones_like(token_ids)
        options = {"max_new_tokens": count, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
        return self.model.generate(token_ids, attention_mask=mask, **options)[0, len(prompt) :].tolist()


@pytest.fixture(scope="module")
def answers(checkpoint):
    return Answers(checkpoint("gemma3"))


def prompt_of(seed, length):
    return np.random.default_rng(seed).integers(2, 512, length).tolist()


def poison(paged):
    """Write NaN over every block that no table and no cache has: who reads one gets no token right."""
    slots, pool = paged.scheduler._slots, paged.pool
    kept = set(pool.idle_blocks())
    for slot in slots.running:
        kept.update(
            paged.scheduler.table.block_tables[slot, : paged.scheduler.table.num_blocks[slot]].tolist()
        )
        kept.update(slots.tables.block_ids[:, slot].ravel().tolist())
    unused = [block_id for block_id in range(pool.num_blocks) if block_id not in kept]
    paged.runner._loaded.memory.storage[unused] = torch.nan
    return len(unused)


def run_poisoned(paged, *requests):
    """Run requests with all unused memory poisoned before each step; returns the most blocks that were in use."""
    paged.submit(*requests)
    most = poisoned = 0
    while True:
        poisoned += poison(paged)
        if not paged.step():
            break
        most = max(most, paged.pool.num_active)
    assert poisoned, "nothing was poisoned"
    return most


def test_prefixes_are_reused_where_their_last_window_is(engine, answers, new_request):
    paged = engine("gemma3", max_batch_tokens=64)
    shared = prompt_of(1, 200)
    turns = {
        "first": shared + prompt_of(2, 30),
        "parts": shared + prompt_of(3, 50),  # computes all: no window ends where they part
        "third": shared + prompt_of(4, 40),  # goes on there
        "again": shared + prompt_of(2, 30),
    }
    hits = []
    for name, prompt in turns.items():
        run_poisoned(paged, new_request(name, prompt, 24))
        assert paged.tokens[name] == answers(prompt, 24), name
        hits.append(paged.scheduler.load().prefix_hit_tokens)
    assert np.diff([0, *hits]).tolist() == [0, 0, 200, 224]
    turns["next"] = [*turns["third"], *paged.tokens["third"], *prompt_of(5, 20)]
    run_poisoned(paged, new_request("next", turns["next"], 24))
    assert paged.tokens["next"] == answers(turns["next"], 24)
    assert paged.scheduler.load().prefix_hit_tokens - hits[-1] == 256, "all full blocks of the turn before"


def test_memory_drops_as_the_arithmetic_says(engine, new_request):
    divided, whole = engine("gemma3", max_batch_tokens=64), engine("gemma3", window_tables=False)
    prompt = prompt_of(9, 800)
    most = run_poisoned(divided, new_request("a", prompt, 40))
    whole.run(new_request("a", prompt, 40))
    assert divided.tokens == whole.tokens
    windows = Windows(((WINDOW, 2),), 1)
    tokens = 105 + windows.blocks(840, 64, SIZE)
    assert most <= tokens, "the tokens' blocks of one layer, and two windows with a chunk"
    assert most * divided.runner._loaded.memory.shape.num_layers < 0.45 * 105 * 3, "of one table"


def test_blocks_come_back_from_the_host(checkpoint, answers, new_request):
    """With a device too small for two prompts, the second turn of the first loads its windows and all before them."""
    first, second = prompt_of(11, 160), prompt_of(12, 160)

    async def scene():
        make_tiers = tier_maker(KvConfig.parse({"host": "2MiB"}, source="test"))
        config = PagedConfig(model=str(checkpoint("gemma3")), block_size=SIZE, kv_blocks=72)
        engine = paged_engine(config, make_tiers=make_tiers)
        info = await engine.start()
        assert info.kv_layout.num_layers == 1, "of three: a block has one group's layers"
        got, cached = {}, {}

        async def consume():
            async for step in engine.steps():
                for delta in step.deltas:
                    assert delta.error is None, delta.error
                    got.setdefault(delta.request_id, []).extend(unpack_tokens(delta.token_ids).tolist())
                    cached.setdefault(delta.request_id, delta.cached_tokens)
                    if delta.finish_reason is not None:
                        ended[delta.request_id].set()

        ended = {}
        steps = asyncio.get_running_loop().create_task(consume(), name="steps")
        for name, prompt in (("one", first), ("two", second), ("back", [*first, *prompt_of(13, 9)])):
            ended[name] = asyncio.Event()
            engine.submit(new_request(name, prompt, 20))
            async with asyncio.timeout(60):
                await ended[name].wait()
                while engine.kv.holders():  # noqa: ASYNC110 - until the offloads have ended
                    await asyncio.sleep(0.005)
            assert got[name] == answers(prompt, 20), name
        load = engine.load()
        assert engine.assume(Role.DECODE).kv_layout == info.kv_layout
        await engine.close()
        await steps
        assert cached == {"one": 0, "two": 0, "back": 160}
        return load

    load = asyncio.run(scene())
    windows = 2 * -(-(WINDOW - 1) // SIZE)
    assert load.onboarded_tokens[0] > 0
    assert load.kv_tiers[0].loaded_blocks == -(-load.onboarded_tokens[0] // SIZE) + windows


def test_layers_are_divided_where_it_saves_memory():
    whole = LayerGroups.of([None, None, 64], 1000)
    assert (whole.windows, whole.layers_per_block) == ((None, 64), 2)
    assert whole.places == ((0, 0), (0, 1), (1, 0))
    both = LayerGroups.of([512, None, 64, 512, 512], 4096)
    assert both.windows == (None, 512, 512, 512, 64)
    assert both.held_windows() == Windows(((64, 1), (512, 3)), 1)
    for windows, context in (
        ([None, None], 1000),
        ([64, 64], 1000),
        ([None, 64], 64),  # no request outgrows the window
        ([None, None, None, 400], 1000),  # a window's block would be empty for two thirds
    ):
        one = LayerGroups.of(windows, context)
        assert (one.windows, one.layers_per_block) == ((None,), len(windows)), windows
        assert one.kv_groups(SIZE) is None
    assert LayerGroups.of([None, 64], 1000, divide=False).windows == (None,)
