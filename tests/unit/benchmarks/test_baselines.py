"""Decisions of each policy, worked out by hand, and the suite of every policy.

Three workers; a request of 160 tokens, that is 10 blocks of 16, unless a row says otherwise. Each row gives the
columns that are not zero, who is chosen, and in a comment the cost (or score) of each worker.
"""

from pathlib import Path

import pytest

from benchmarks.baselines import ABLATIONS, BASELINES
from benchmarks.baselines.explore_exploit import ExploreExploit
from penstock.router.policies import choose, make_policy
from penstock.testing.routing_policy import RoutingPolicySuite, make_context

T, F = True, False


def make(**columns):
    base = {"request_tokens": 160, "request_blocks": 10, "total_blocks": [1000, 1000, 1000]}
    return make_context(**base | columns)


def decide(policy, **columns):
    """Choose; equal costs go to the first of them."""
    context = make(**columns)
    return choose(policy.costs(context), context.eligible, request_hash=0)


ROUND_ROBIN = [
    ({"turn": 7}, 1),  # 7 mod 3
    ({"turn": 5, "eligible": [F, T, T]}, 2),  # 5 mod 2 = 1: the second of 1, 2
    ({"turn": 1, "running_requests": [0, 9, 0], "overlap_blocks": [9, 0, 0]}, 1),  # 1 mod 3, come what may
]

# What each turn draws for the three workers, to three digits; the lowest is taken.
#   0: .637 .270 .041   2: .262 .298 .814   5: .805 .808 .515   6: .538 .343 .369   9: .870 .287 .603
RANDOM = [
    ({"turn": 0}, 2),
    ({"turn": 5, "running_requests": [0, 0, 99]}, 2),  # load does not matter
    ({"turn": 6, "eligible": [T, F, T]}, 2),  # .369 < .538
    ({"turn": 9, "overlap_blocks": [10, 0, 0]}, 1),  # nor do prefixes
]

# The two lowest draws of a turn, as above; of these the one with less load.
POWER_OF_TWO = [
    ({"turn": 0, "running_requests": [0, 2, 1]}, 2),  # of 1, 2: 2 against 1; 0 is not looked at
    ({"turn": 2, "running_requests": [1, 1, 0], "active_blocks": [90, 80, 0]}, 1),  # of 0, 1: 1.09, 1.08
    ({"turn": 5, "running_requests": [3, 0, 2], "waiting_requests": [0, 0, 2]}, 0),  # of 0, 2: 3, 2 + 2
    ({"turn": 6, "eligible": [T, F, T], "running_requests": [1, 0, 2]}, 0),  # of 0, 2, the eligible ones
]

# running + waiting + active / max(total, active + 1)
LEAST_LOADED = [
    ({"running_requests": [3, 1, 2], "waiting_requests": [0, 4, 0]}, 2),  # 3, 5, 2
    ({"running_requests": [2, 2, 2], "active_blocks": [300, 100, 200]}, 1),  # 2.3, 2.1, 2.2
    ({}, 0),  # 0, 0, 0: the first of equals
    ({"running_requests": [0, 1, 1], "active_blocks": [1500, 0, 0]}, 0),  # 1500 / 1501, 1, 1
    ({"running_requests": [1, 0, 1], "overlap_blocks": [10, 0, 0]}, 1),  # prefixes do not matter
]

PREFIX_THEN_LOAD = [
    ({"overlap_blocks": [5, 0, 0]}, 0),  # 80 / 160 = 0.5 > 0.3: the longest
    ({"own_requests": [1, 0, 2], "overlap_blocks": [3, 0, 0]}, 1),  # 48 / 160 = 0.3, not more: least load
    ({"own_requests": [65, 0, 30], "overlap_blocks": [10, 0, 0]}, 1),  # 65 > 64, 65 > 0: least load
    ({"own_requests": [64, 0, 30], "overlap_blocks": [10, 0, 0]}, 0),  # 64 is not more than 64
    ({"own_requests": [200, 134, 140], "overlap_blocks": [0, 0, 9]}, 2),  # 66 > 64, but 200 < 1.5 * 134 = 201
    ({"own_requests": [202, 134, 140], "overlap_blocks": [9, 0, 0]}, 1),  # 202 > 201
    ({"eligible": [T, F, T], "overlap_blocks": [4, 10, 5]}, 2),  # 80 / 160, of those that may get it
]

# max(prefill tokens under way / 16 + 10 - device - 0.75 host - 0.25 disk, 0) + blocks under way + 10
LINEAR_BLOCKS = [
    ({"overlap_blocks": [0, 4, 8]}, 2),  # 10 + 10, 6 + 10, 2 + 10
    ({"overlap_blocks": [0, 4, 8], "own_blocks": [0, 0, 5]}, 1),  # 20, 16, 2 + 5 + 10 = 17
    ({"own_prefill_tokens": [0, 64, 160], "overlap_blocks": [0, 6, 10]}, 1),  # 20, 4 + 4 + 10 = 18, 10 + 10
    ({"overlap_blocks": [4, 8, 0], "tier_blocks": [[4, 0, 0], [0, 8, 0], [0] * 3, [0] * 3]}, 1),  # 16, 14, 20
    ({"overlap_blocks": [2, 10, 0], "tier_blocks": [[2, 0, 0], [0] * 3, [0, 10, 0], [0] * 3]}, 1),  # 18, 17.5, 20
    ({"overlap_blocks": [10, 1, 0], "tier_blocks": [[0, 1, 0], [0] * 3, [0] * 3, [10, 0, 0]]}, 1),  # 20, 19, 20
]  # fmt: skip

# (prefill tokens under way + max(160 - 16 overlap, 1)) * (requests + 1)
PRODUCT = [
    ({"overlap_blocks": [0, 4, 0]}, 1),  # 160, 96, 160
    ({"overlap_blocks": [0, 5, 8], "own_requests": [0, 1, 3]}, 2),  # 160, 80 * 2, 32 * 4 = 128
    ({"own_prefill_tokens": [300, 200, 100], "own_requests": [1, 2, 5]}, 0),  # 460 * 2, 360 * 3, 260 * 6
    ({"overlap_blocks": [10, 0, 0], "own_requests": [50, 0, 0]}, 0),  # 1 * 51, 160, 160
    ({"overlap_blocks": [10, 0, 0], "own_requests": [200, 0, 1]}, 1),  # 201, 160, 320
]

FULL = {"total_blocks": [100, 100, 100], "cached_blocks": [100, 100, 100]}
HALF_FOUND = [
    (0.0, 0, {"request_tokens": 160, "overlap_blocks": [5, 0, 0]}),  # 80 new + 100; half of its tokens found
    (0.0, 1, {"request_tokens": 160}),  # 160 + 100; none found
]
BIG = {"request_tokens": 320, "request_blocks": 20, "eligible": [T, T, F]}
# A decision adds its uncached tokens and 100 for decoding to its worker. History of (when, who, what), then the row.
EXPLORE_EXPLOIT = [
    ([(0.0, 0, {}), (1.0, 1, {})], {"now_s": 10.0}, 2),  # 420, 420, 160
    ([(0.0, 0, {})], {"overlap_blocks": [5, 0, 0]}, 0),  # 80 cached >= 80 new: the holder, whatever its load
    ([(0.0, 0, {})], {"overlap_blocks": [4, 0, 0]}, 1),  # 64 < 96: 260 + 96, 160, 160
    ([(0.0, 0, {})], {"overlap_blocks": [6, 6, 2]}, 1),  # of the two that hold 6: loads 260, 0
    # The first was forgotten at 181 s: 0 + 160, 260 + 160.
    ([(0.0, 0, {}), (181.0, 1, {})], {"now_s": 182.0, "eligible": [T, T, F]}, 0),
    (HALF_FOUND, BIG | FULL, 1),  # 180 + 320 * 80/160 evicted + 320 = 660, 260 + 320 * 0/160 + 320 = 580
    (HALF_FOUND, BIG, 0),  # room for all 320: 180 + 320, 260 + 320
]

# 2 * overlap / 10 + 2 * (longest - queue) / (longest - shortest) + 1 - active / 1000; the highest
WEIGHTED_SCORES = [
    ({"overlap_blocks": [0, 5, 0]}, 1),  # 0 + 2 + 1, 1 + 2 + 1, 3
    ({"waiting_requests": [0, 4, 8], "overlap_blocks": [0, 6, 10]}, 1),  # 3, 1.2 + 1 + 1 = 3.2, 2 + 0 + 1 = 3
    ({"overlap_blocks": [2, 0, 0], "active_blocks": [500, 0, 100]}, 1),  # .4 + 2 + .5 = 2.9, 3, 2.9
    # 0 + 2 + 1, 1.6 + 0 + 1
    ({"eligible": [F, T, T], "waiting_requests": [0, 3, 5], "overlap_blocks": [0, 0, 8]}, 1),
    ({"total_blocks": [100, 100, 100], "active_blocks": [150, 100, 99]}, 2),  # 2 + 0, 2 + 0, 2 + .01
]

GOLDEN = {
    "round-robin": ROUND_ROBIN,
    "random": RANDOM,
    "power-of-two": POWER_OF_TWO,
    "least-loaded": LEAST_LOADED,
    "prefix-then-load": PREFIX_THEN_LOAD,
    "linear-blocks": LINEAR_BLOCKS,
    "product": PRODUCT,
    "weighted-scores": WEIGHTED_SCORES,
}


@pytest.mark.parametrize(
    ("name", "columns", "slot"), [(name, *row) for name, rows in GOLDEN.items() for row in rows]
)
def test_the_choice_is_the_one_worked_out_by_hand(name, columns, slot):
    assert decide(make_policy(BASELINES.get(name, name)), **columns) == slot


@pytest.mark.parametrize(("history", "columns", "slot"), EXPLORE_EXPLOIT)
def test_explore_exploit_chooses_as_worked_out_by_hand(history, columns, slot):
    policy = ExploreExploit(decode_cost_tokens=100.0)
    for now_s, chosen, before in history:
        policy.chosen(make(now_s=now_s, **before), chosen)
    assert decide(policy, **columns) == slot


def test_every_baseline_has_decisions_and_a_row_in_the_table():
    rows = GOLDEN | {"explore-exploit": EXPLORE_EXPLOIT}
    assert set(BASELINES) <= set(rows)
    readme = (Path(__file__).parents[3] / "benchmarks" / "baselines" / "README.md").read_text()
    assert all(f"`{name}`" in readme for name in rows)


@pytest.mark.parametrize("name", BASELINES)
class TestSuite(RoutingPolicySuite):
    @pytest.fixture(autouse=True)
    def named(self, name):
        self.name = name

    def make(self):
        return make_policy(BASELINES[self.name])


BUSY = {
    "running_requests": [9, 3, 30], "waiting_requests": [2, 0, 5], "active_blocks": [900, 300, 1100],
    "queued_prefill_tokens": [4000, 100, 9000], "own_prefill_tokens": [4000, 100, 9000], "own_requests": [11, 3, 35],
    "overlap_blocks": [9, 0, 4], "request_rate_per_s": 5.0, "mean_output_tokens": 200.0,
}  # fmt: skip


@pytest.mark.parametrize("name", [name for name in ABLATIONS if name.startswith("kv-")])
def test_an_ablation_is_kv_less_one_term(name):
    context, kv, less = make(**BUSY), make_policy("kv"), make_policy(ABLATIONS[name])
    named = dict(zip(kv.term_names, kv.terms(context), strict=True))
    left_out = named.get(name.removeprefix("kv-without-"), 0)
    assert less.costs(context) == pytest.approx(kv.costs(context) - left_out)
    if name != "kv-without-request-queue":
        assert left_out.any(), "it says something here"
