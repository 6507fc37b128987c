"""The eviction bench: its offline bound, its replay, and the picture."""

import itertools
import random

import pytest

from benchmarks.eviction.command import POLICIES
from benchmarks.eviction.host import Sizes, host_saved, read_sizes
from benchmarks.eviction.offline import replay_offline
from benchmarks.eviction.replay import Prompts, replay
from benchmarks.eviction.workloads import WORKLOADS
from penstock.kv.pool.use import PrefillPrice
from penstock.perf.model.catalogue import find_shape
from penstock.perf.model.hardware import find_hardware
from penstock.perf.roofline.roofline import Roofline
from penstock.sim.workload.trace import PREFIX_BLOCK_TOKENS, TraceRow


def row(at_s, *ids):
    return TraceRow(at_s, len(ids) * PREFIX_BLOCK_TOKENS, 1, ids)


def test_a_pool_with_room_for_all_hits_all_that_came_before():
    rows = [row(0, 1, 2), row(1, 1, 2, 3), row(2, 1, 4), row(3, 1, 2, 3)]
    prompts = Prompts(rows, lambda new, cached: new + cached / 2)
    for policy in POLICIES:
        assert replay(prompts, 100, policy, PrefillPrice()) == [0, 2, 1, 3]
    assert replay_offline(rows, 100) == [0, 2, 1, 3]


def test_the_offline_rule_finds_the_most_hits():
    """Against every choice of victims, on small cases."""
    rng = random.Random(0)
    for _ in range(30):
        rows = [row(at, 0, rng.randrange(1, 5)) for at in range(7)]
        assert sum(replay_offline(rows, 3)) == most_hits([r.prefix_ids for r in rows], 3)


def most_hits(prompts, num_blocks, resident=frozenset()):
    if not prompts:
        return 0
    first, rest = prompts[0], prompts[1:]
    hits = len(list(itertools.takewhile(resident.__contains__, first)))
    kept = resident - set(first)
    room = num_blocks - len(first)
    after = {frozenset(first) | set(some) for some in itertools.combinations(kept, min(room, len(kept)))}
    return hits + max(most_hits(rest, num_blocks, choice) for choice in after)


@pytest.mark.slow
@pytest.mark.parametrize("name", WORKLOADS)
def test_workloads_are_sorted_and_the_same_for_a_seed(name):
    rows = WORKLOADS[name](0)
    assert rows == WORKLOADS[name](0)
    assert rows != WORKLOADS[name](1)
    assert [r.at_s for r in rows] == sorted(r.at_s for r in rows)
    assert all(r.input_tokens == PREFIX_BLOCK_TOKENS * len(r.prefix_ids) for r in rows)


def test_seconds_keeps_conversations_beside_scans():
    prompts = Prompts(
        WORKLOADS["scans"](0)[:3000], lambda new, cached: new * (1 + (cached + new / 2) / 16384)
    )
    saved = {policy: prompts.saved(replay(prompts, 2000, policy, PrefillPrice())) for policy in POLICIES}
    assert saved["seconds"] > 1.15 * saved["lru"]
    assert saved["seconds"] > saved["lfu"]


def test_a_host_tier_saves_what_loads_are_sooner_than_computing():
    model = Roofline(find_shape("llama-3.1-8b"), find_hardware("h100"))
    rows = WORKLOADS["agents"](0)[:800]
    prompts = Prompts(rows, model.prefill_s)
    sizes = Sizes(500, 2000)
    none = host_saved(prompts, Sizes(500, 0), "lru", model)
    saved = {policy: host_saved(prompts, sizes, policy, model) for policy in POLICIES}
    unbounded = host_saved(prompts, Sizes(500, 1 << 15), "lru", model)
    whole = prompts.saved(replay(prompts, 1 << 15, "lru", PrefillPrice()))
    for policy in POLICIES:
        assert none < saved[policy] <= unbounded < whole, policy


@pytest.mark.parametrize("text", ["1000", "1000:", "a:b", "1:3000", "1000:1", "-5:10"])
def test_wrong_sizes_of_a_host_tier_are_refused(text):
    with pytest.raises(ValueError, match="expected DEVICE:HOST, blocks >= 2 of each, got"):
        read_sizes([text])
