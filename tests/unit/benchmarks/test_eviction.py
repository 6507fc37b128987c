"""The eviction bench: its offline bound, its replay, and the picture."""

import itertools
import random

from benchmarks.eviction.command import POLICIES
from benchmarks.eviction.offline import replay_offline
from benchmarks.eviction.replay import Prompts, replay
from benchmarks.eviction.workloads import WORKLOADS
from penstock.kv.pool.use import PrefillPrice
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


def test_seconds_keeps_conversations_beside_scans():
    prompts = Prompts(
        WORKLOADS["scans"](0)[:3000], lambda new, cached: new * (1 + (cached + new / 2) / 16384)
    )
    saved = {policy: prompts.saved(replay(prompts, 2000, policy, PrefillPrice())) for policy in POLICIES}
    assert saved["seconds"] > 1.15 * saved["lru"]
    assert saved["seconds"] > saved["lfu"]
