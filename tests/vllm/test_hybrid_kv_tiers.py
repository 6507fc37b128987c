"""KV tiers below a vLLM whose layers have tables of blocks of their own: two groups with a window, one over the whole context."""

import signal
from time import sleep

import pytest
import torch
from transformers import AutoModelForCausalLM

from penstock.core.types.events import Holder, Tier
from tests.support.checkpoints import make_checkpoint
from tests.vllm.conftest import BLOCK, vllm_processes
from tests.vllm.indexed import Indexed
from tests.vllm.test_engine import greedy
from tests.vllm.test_engine import prompt as random_prompt
from tests.vllm.test_kv_tiers import check_aborts_leave_nothing, counts_of, damage_host, tiers

pytestmark = pytest.mark.nightly

SIZES = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 6, "head_dim": 64}
KINDS = ["sliding_attention", "sliding_attention", "full_attention"] * 2
WINDOW = 2
"""Blocks that a window of 48 tokens needs."""
NUM_WINDOWS = 2
LENGTH = 400
BLOCKS = LENGTH // BLOCK
CACHED = BLOCKS * BLOCK
KV_BLOCKS = 64
TOKENS = 8


@pytest.fixture(scope="module")
def hybrid_dir(tmp_path_factory):
    return make_checkpoint(tmp_path_factory.mktemp("model") / "gemma", "gemma3", **SIZES, layer_types=KINDS)


@pytest.fixture(scope="module")
def model(hybrid_dir):
    torch.set_num_threads(1)
    return AutoModelForCausalLM.from_pretrained(hybrid_dir, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def hybrid_of(spec_of, hybrid_dir):
    def make(model=hybrid_dir, args=None, **kv):
        return spec_of(**tiers(**kv) | {"model": str(model), "kv_blocks": KV_BLOCKS}, args=args or {})

    return make


@pytest.fixture(scope="module")
def hybrid(started, hybrid_of):
    return Indexed(started(hybrid_of(host="25x")))


def evict(indexed, seed):
    """Run prompts that take all of the device's blocks; `seed` and the next ones are theirs."""
    for number in range(6):
        indexed.run(random_prompt(LENGTH, seed + number), tokens=1)


def test_only_the_last_window_of_a_group_is_loaded_and_the_tokens_are_the_same(hybrid, model):
    prompts = [random_prompt(LENGTH, seed) for seed in range(3)]
    expected = [greedy(model, ids, TOKENS) for ids in prompts]
    for ids, tokens in zip(prompts, expected, strict=True):
        assert hybrid.run(ids, tokens=TOKENS) == [0]
        assert hybrid.emitted == [tokens]
        assert hybrid.known(ids) == CACHED
    evict(hybrid, 100)
    hybrid.check()
    before = counts_of(hybrid)
    assert hybrid.run(*prompts, tokens=TOKENS) == [CACHED] * 3
    assert hybrid.emitted == expected
    after = counts_of(hybrid)
    assert after.hit_tokens - before.hit_tokens == 3 * CACHED
    assert after.loaded_blocks - before.loaded_blocks == 3 * (BLOCKS + NUM_WINDOWS * WINDOW)
    assert (after.missing_blocks, after.corrupt_blocks, after.is_off) == (0, 0, False)


def test_a_prefix_that_prompts_share_is_held_once_two_had_it(hybrid, model):
    shared = random_prompt(8 * BLOCK, 300)
    prompts = [shared + random_prompt(LENGTH - 8 * BLOCK, 301 + number) for number in range(3)]
    found = []
    for number, ids in enumerate(prompts):
        found += hybrid.run(ids, tokens=TOKENS)
        assert hybrid.emitted == [greedy(model, ids, TOKENS)]
        evict(hybrid, 310 + 10 * number)
    assert found == [0, 0, 8 * BLOCK], "the first one kept its windows elsewhere"


@pytest.mark.nightly
def test_corrupt_blocks_are_computed(hybrid, model):
    ids = random_prompt(LENGTH, 600)
    hybrid.run(ids)
    evict(hybrid, 610)
    before = counts_of(hybrid)
    damage_host()
    for number in range(3):  # each finds another block that is damaged
        assert hybrid.run(ids, tokens=TOKENS) == [0]
        assert hybrid.emitted == [greedy(model, ids, TOKENS)]
        evict(hybrid, 620 + 10 * number)
    assert counts_of(hybrid).corrupt_blocks > before.corrupt_blocks
    assert counts_of(hybrid).missing_blocks > before.missing_blocks


@pytest.mark.nightly
def test_requests_that_are_aborted_with_a_load_under_way_leave_nothing(hybrid, model):
    check_aborts_leave_nothing(hybrid, model, evict)


def test_workers_load_each_others_windows_from_an_object_store(started, hybrid_of, tmp_path, model):
    prompts = [random_prompt(LENGTH, seed) for seed in range(900, 903)]
    expected = [greedy(model, ids, TOKENS) for ids in prompts]
    store = {"url": f"file://{tmp_path}/store", "refresh_s": 0.5, "pack_size": "1MiB"}
    (tmp_path / "store").mkdir()
    spec = hybrid_of(object=store)
    first = Indexed(started(spec))
    second = Indexed(started(spec, beside=True))
    assert first.running.info.kv_holders == second.running.info.kv_holders
    (holder,) = first.running.info.kv_holders
    assert holder.kind is Holder.FLEET
    for ids, tokens in zip(prompts, expected, strict=True):
        first.run(ids, tokens=TOKENS)
        assert first.emitted == [tokens]
    needed = 3 * (BLOCKS + NUM_WINDOWS * WINDOW)
    second.wait_until(lambda load: load.kv_tiers[0].cached_blocks >= needed)
    second.wait_until(lambda _: all(second.known(ids) == CACHED for ids in prompts))  # idle, and it tells
    assert second.holders == {Holder.FLEET}
    assert second.run(*prompts, tokens=TOKENS) == [CACHED] * 3
    assert second.emitted == expected
    counts = counts_of(second, Tier.OBJECT)
    late = random_prompt(LENGTH, 950)
    first.run(late, tokens=TOKENS)
    sleep(3.0)  # not woken yet, its device process knows
    assert second.run(late, tokens=TOKENS) == [CACHED], "the first request after a pause hears of it"
    assert second.emitted == first.emitted == [greedy(model, late, TOKENS)]
    assert (counts.hit_tokens, counts.loaded_blocks, counts.corrupt_blocks) == (3 * CACHED, needed, 0)
    for process in vllm_processes():
        process.send_signal(signal.SIGKILL)
    again = Indexed(started(spec))
    again.wait_until(lambda load: load.kv_tiers[0].cached_blocks >= needed)
    assert again.run(*prompts, tokens=TOKENS) == [CACHED] * 3
    assert again.emitted == expected
