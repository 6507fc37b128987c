"""Pools, queues and layouts against sums worked out by hand, and the queue against a simulated one."""

import heapq
import math
import random
from dataclasses import replace
from functools import partial

import numpy as np
import pytest

from penstock.core.types.instances import Role
from penstock.perf.hardware import Dtype, find_hardware
from penstock.perf.model_config import find_shape
from penstock.perf.model_shape import Parallel, parallelisms
from penstock.perf.pool import Demand, PredictedPool, aggregated_share, decode_share, prefill_share, wait_s
from penstock.perf.roofline import Roofline
from penstock.perf.search import LayoutSearch
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


def test_more_work_than_time_has_no_end():
    assert wait_s(1.0, 4, 1.0, 0.9) == math.inf


def test_prompts_alone_by_hand():
    # A prompt takes 10 ms + 1,000 x 0.1 ms. At 5 a second the worker is busy 55 % of the time; 55 % wait, and of them 10 / 55
    # longer than 0.11 / (2 x 0.45) x ln 5.5. Half of a step is under way, as 55 % of arrivals find one of 0.11 s: 0.0605 s.
    seen = PredictedPool(LinearEngine(), 1, 1000).predict(prefill_share(DEMAND), 5.0, 90.0)
    assert seen.ttft_s == pytest.approx(0.11 / 0.9 * math.log(5.5) + 0.55 * 0.11 + 0.11, rel=1e-3)
    assert seen.itl_s == 0


def test_answers_alone_by_hand():
    # A decode worker computes 40 tokens of each prompt again: 1,000 are 15 blocks of 64 and 40 more. n streams and a step of
    # 10 ms + n x 0.1 ms, or 14 ms + n x 0.1 ms where a prompt joins; n = rate x 100 x step.
    share = decode_share(DEMAND, 64)
    assert (share.new_tokens, share.cached_tokens, share.answer_tokens) == (40, 960, 100)
    seen = PredictedPool(LinearEngine(), 1, 512).predict(share, 10.0, 90.0)
    assert seen.batch == pytest.approx(10 * 100 * 0.0117, rel=0.02)
    busy, step_s = 10 * 0.0152, 0.0112
    unlucky = busy + 1.2816 * 0.0152 * math.sqrt(10 / (100 * 0.0117))
    assert seen.itl_s == pytest.approx(1 / (unlucky / 0.0152 + (1 - unlucky) / step_s), rel=0.02)


def test_prompts_beside_answers_make_steps_longer_by_their_part_of_the_time():
    pool = PredictedPool(LinearEngine(), 2, 250)
    seen, idle = (pool.predict(aggregated_share(DEMAND), rate, 90.0) for rate in (6.0, 0.01))
    assert idle.itl_s == pytest.approx(0.0101, rel=0.05)
    assert 0.02 < seen.itl_s < 0.0351  # a step with 240 prompt tokens takes 34 to 36 ms
    assert idle.ttft_s < seen.ttft_s
    assert 0 < seen.kv_share < 0.1


@pytest.mark.parametrize("share", [aggregated_share(DEMAND), prefill_share(DEMAND), decode_share(DEMAND, 64)])
@pytest.mark.parametrize("tokens", [64, 512, 4096])
def test_the_largest_rate_keeps_the_targets_and_a_little_more_does_not(share, tokens):
    pool = PredictedPool(LinearEngine(), 3, tokens)
    found = pool.largest(share, DEMAND)
    assert found is not None
    rate_per_s, seen = found
    assert seen.ttft_s <= DEMAND.ttft_s
    assert seen.itl_s <= DEMAND.itl_s
    more = pool.predict(share, 1.01 * rate_per_s, 90.0)
    assert more is None or more.ttft_s > DEMAND.ttft_s or more.itl_s > DEMAND.itl_s


STRICT = Demand(input_tokens=1000, output_tokens=101, ttft_s=1.0, itl_s=0.03)


def price(parallel, **room):
    return LinearEngine(parallel, step_s=0.020, sequence_s=0.0, **{"kv_capacity_tokens": 10_000_000} | room)


SINGLE = (Parallel(),)


def search(devices, demand=STRICT, choices=SINGLE, link_bytes_per_s=1e12, price=price):
    return LayoutSearch(
        price=price,
        choices=choices,
        devices=devices,
        demand=demand,
        block_size=64,
        link_bytes_per_s=lambda _one, _other: link_bytes_per_s,
    )


def counts(layout):
    return {role_layout.role: role_layout.workers for role_layout in layout.role_layouts}


def test_answers_get_more_where_they_are_longer():
    longer = replace(STRICT, input_tokens=100, output_tokens=1001)
    small = partial(price, kv_capacity_tokens=50 * 1100)
    best = search(8, longer, price=small).disaggregated()[0]
    # 50 streams of 1,000 tokens at 20 to 30 ms: at most 2.5 requests a second and worker, where a prompt takes 30 ms of one.
    assert counts(best) == {Role.PREFILL: 1, Role.DECODE: 7}


def test_strict_targets_part_prompts_from_answers_and_lax_ones_do_not():
    # Beside 20 ms for the step there is room for 60 prompt tokens within 26 ms, of 1,000, and 64 is the smallest step tried.
    strict, lax = (search(8, replace(STRICT, itl_s=itl_s)) for itl_s in (0.026, 0.2))
    assert strict.disaggregated()[0].rate_per_s > 2 * strict.aggregated()[0].rate_per_s
    assert lax.disaggregated()[0].rate_per_s < lax.aggregated()[0].rate_per_s


def test_a_slow_link_costs_time_between_tokens():
    # 960 tokens of 1 kB over 100 kB/s are on their way for 9.6 s, 96 ms of each of the 100 tokens that follow the first.
    assert search(8, link_bytes_per_s=1e5).disaggregated() == []
    assert search(8, link_bytes_per_s=1e7).disaggregated()[0].prediction.itl_s > 0.02 + 0.096e-2
    assert search(2).kv_transfer_s(Parallel(), Parallel()) == pytest.approx(960e3 / 1e12)


def test_one_token_leaves_nothing_to_transfer():
    only_first = replace(STRICT, output_tokens=1)
    assert search(8, only_first).disaggregated() == []
    assert search(8, only_first).aggregated()


def test_sharing_a_device_pair_is_chosen_where_it_keeps_what_one_cannot():
    choices = (Parallel(), Parallel(tp=2))
    assert search(4, replace(STRICT, itl_s=0.018), choices).aggregated()[0].role_layouts[0].parallel.tp == 2
    tried = [layout.role_layouts[0].parallel.tp for layout in search(4, STRICT, choices).aggregated()]
    assert set(tried) == {1, 2}


def test_weights_that_do_not_fit_are_not_tried():
    shape, hardware = find_shape("llama-3.1-70b"), find_hardware("h100")
    found = LayoutSearch(
        price=lambda parallel: Roofline(shape, hardware, parallel, Dtype.FP8),
        choices=tuple(parallelisms(shape, hardware, devices_max=8)),
        devices=4,
        demand=replace(STRICT, itl_s=0.05),
        block_size=64,
        link_bytes_per_s=lambda _one, _other: 50e9,
    )
    assert {model.parallel.tp for model in found.models} == {2, 4}
    for layout in found.aggregated() + found.disaggregated():
        assert layout.devices <= 4


def test_a_prompt_on_a_pipeline_is_not_promised_a_stage_s_time():
    """On PP 2 a prompt of 3,000 takes 87 ms where TP 8 alone takes 109: neither keeps 60."""
    shape, hardware = find_shape("llama-3.1-70b"), find_hardware("h100")
    found = LayoutSearch(
        price=lambda parallel: Roofline(shape, hardware, parallel, Dtype.FP8),
        choices=(Parallel(tp=8), Parallel(tp=8, pp=2)),
        devices=16,
        demand=Demand(input_tokens=3000, output_tokens=150, ttft_s=0.06, itl_s=0.05),
        block_size=64,
        link_bytes_per_s=lambda _one, _other: 50e9,
    )
    assert found.aggregated() == []
