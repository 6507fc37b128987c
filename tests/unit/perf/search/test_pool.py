"""Pools against sums worked out by hand, and the queue against a simulated one."""

import heapq
import math
import random

import numpy as np
import pytest

from penstock.perf.search.demand import Demand
from penstock.perf.search.pool import Pool, Share, aggregated_share, decode_share, prefill_share
from penstock.perf.search.queueing import wait_s
from tests.support.linear_engine import LinearEngine

DEMAND = Demand(input_tokens=1000, output_tokens=101, ttft_s=1.0, itl_s=0.04)


def simulated_wait_s(service_s, servers, rate_per_s, share):
    """Give the quantile of the waits of many arrivals at random, first come, first served."""
    rng = random.Random(1)
    now, free_s, waits = 0.0, [0.0] * servers, []
    for _ in range(30_000):
        now += rng.expovariate(rate_per_s)
        begin = max(now, free_s[0])
        heapq.heapreplace(free_s, begin + service_s)
        waits.append(begin - now)
    return float(np.quantile(waits, share))


@pytest.mark.parametrize("servers", [1, 4, 16])
@pytest.mark.parametrize("busy", [0.3, 0.7, 0.9])
def test_a_wait_is_about_what_a_simulated_queue_has(servers, busy):
    found = wait_s(1.0, servers, busy, 0.9)
    simulated = simulated_wait_s(1.0, servers, busy * servers, 0.9)
    assert found == pytest.approx(simulated, rel=0.2, abs=0.1)


def test_prompts_alone_by_hand():
    # A prompt takes 10 ms + 1,000 x 0.1 ms. At 5 a second the worker is busy 55 % of the time; 55 % wait, and of them 10 / 55
    # longer than 0.11 / (2 x 0.45) x ln 5.5. Half of a step is under way, as 55 % of arrivals find one of 0.11 s: 0.0605 s.
    seen = Pool(LinearEngine(), 1, 1000).predict(prefill_share(DEMAND), 5.0, 90.0)
    assert seen.ttft_s == pytest.approx(0.11 / 0.9 * math.log(5.5) + 0.55 * 0.11 + 0.11, rel=1e-3)
    assert seen.itl_s == 0


def test_answers_alone_by_hand():
    # A decode worker computes 40 tokens of each prompt again: 1,000 are 15 blocks of 64 and 40 more. n streams and a step of
    # 10 ms + n x 0.1 ms, or 14 ms + n x 0.1 ms where a prompt joins; n = rate x 100 x step.
    share = decode_share(DEMAND, 64)
    assert (share.new_tokens, share.cached_tokens, share.answer_tokens) == (40, 960, 100)
    seen = Pool(LinearEngine(), 1, 512).predict(share, 10.0, 90.0)
    assert seen.batch == pytest.approx(10 * 100 * 0.0117, rel=0.02)
    busy, step_s = 10 * 0.0152, 0.0112
    unlucky = busy + 1.2816 * 0.0152 * math.sqrt(10 / (100 * 0.0117))
    assert seen.itl_s == pytest.approx(1 / (unlucky / 0.0152 + (1 - unlucky) / step_s), rel=0.02)


def test_prompts_beside_answers_make_steps_longer_by_their_part_of_the_time():
    pool = Pool(LinearEngine(), 2, 250)
    seen, idle = (pool.predict(aggregated_share(DEMAND), rate, 90.0) for rate in (6.0, 0.01))
    assert idle.itl_s == pytest.approx(0.0101, rel=0.05)
    assert 0.02 < seen.itl_s < 0.0351  # a step with 240 prompt tokens takes 34 to 36 ms
    assert idle.ttft_s < seen.ttft_s
    assert 0 < seen.kv_share < 0.1


@pytest.mark.parametrize("share", [aggregated_share(DEMAND), prefill_share(DEMAND), decode_share(DEMAND, 64)])
@pytest.mark.parametrize("tokens", [64, 512, 4096])
def test_the_largest_rate_keeps_the_targets_and_a_little_more_does_not(share, tokens):
    pool = Pool(LinearEngine(), 3, tokens)
    found = pool.largest(share, DEMAND)
    assert found is not None
    rate_per_s, seen = found
    assert seen.ttft_s <= DEMAND.ttft_s
    assert seen.itl_s <= DEMAND.itl_s
    more = pool.predict(share, 1.01 * rate_per_s, 90.0)
    assert more is None or more.ttft_s > DEMAND.ttft_s or more.itl_s > DEMAND.itl_s


def test_memory_bounds_the_streams():
    room = 20 * 1100
    found = Pool(LinearEngine(kv_capacity_tokens=room), 1, 512).largest(decode_share(DEMAND, 64), DEMAND)
    assert found is not None
    assert found[1].batch < 20
    assert (
        Pool(LinearEngine(kv_capacity_tokens=1100), 1, 512).predict(aggregated_share(DEMAND), 50.0, 90.0)
        is None
    )


def test_no_step_has_more_tokens_than_it_may():
    share = Share(new_tokens=1000, cached_tokens=0, answer_tokens=100)
    assert Pool(LinearEngine(), 1, 4).predict(share, 9.0, 90.0) is None, "four streams would fill it"
