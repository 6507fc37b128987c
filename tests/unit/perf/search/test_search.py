"""Layouts fit, keep the targets, and are the best there are, on an engine whose sums are done by hand."""

from dataclasses import replace
from functools import partial

import pytest

from penstock.core.types.instances import Role
from penstock.perf.model.catalogue import find_shape
from penstock.perf.model.hardware import Dtype, find_hardware
from penstock.perf.model.parallel import Parallel, parallelisms
from penstock.perf.roofline.roofline import Roofline
from penstock.perf.search.demand import Demand
from penstock.perf.search.search import LayoutSearch
from tests.support.linear_engine import LinearEngine

DEMAND = Demand(input_tokens=1000, output_tokens=101, ttft_s=1.0, itl_s=0.03)


def price(parallel, **room):
    return LinearEngine(parallel, step_s=0.020, sequence_s=0.0, **{"kv_capacity_tokens": 10_000_000} | room)


SINGLE = (Parallel(),)


def search(devices, demand=DEMAND, choices=SINGLE, link_bytes_per_s=1e12, price=price):
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


def test_prompts_get_the_devices_that_they_need():
    # A prompt takes 120 ms of a device, or hardly more than 100 beside many others. A decode worker takes any number of streams in steps of 20 ms, as long as the 40
    # tokens of each prompt that it computes again do not fill its time: 24 ms for one, 0.4 s for a hundred at once.
    best = search(8).disaggregated()[0]
    assert counts(best) == {Role.PREFILL: 7, Role.DECODE: 1}
    assert 7 / 0.12 * 0.8 < best.rate_per_s < 7 / 0.1
    assert best.devices == 8


def test_answers_get_more_where_they_are_longer():
    longer = replace(DEMAND, input_tokens=100, output_tokens=1001)
    small = partial(price, kv_capacity_tokens=50 * 1100)
    best = search(8, longer, price=small).disaggregated()[0]
    # 50 streams of 1,000 tokens at 20 to 30 ms: at most 2.5 requests a second and worker, where a prompt takes 30 ms of one.
    assert counts(best) == {Role.PREFILL: 1, Role.DECODE: 7}


def test_strict_targets_part_prompts_from_answers_and_lax_ones_do_not():
    # Beside 20 ms for the step there is room for 60 prompt tokens within 26 ms, of 1,000, and 64 is the smallest step tried.
    strict, lax = (search(8, replace(DEMAND, itl_s=itl_s)) for itl_s in (0.026, 0.2))
    assert strict.disaggregated()[0].rate_per_s > 2 * strict.aggregated()[0].rate_per_s
    assert lax.disaggregated()[0].rate_per_s < lax.aggregated()[0].rate_per_s


def test_a_slow_link_costs_time_between_tokens():
    # 960 tokens of 1 kB over 100 kB/s are on their way for 9.6 s, 96 ms of each of the 100 tokens that follow the first.
    assert search(8, link_bytes_per_s=1e5).disaggregated() == []
    assert search(8, link_bytes_per_s=1e7).disaggregated()[0].prediction.itl_s > 0.02 + 0.096e-2
    assert search(2).kv_transfer_s(Parallel(), Parallel()) == pytest.approx(960e3 / 1e12)


def test_one_token_leaves_nothing_to_transfer():
    only_first = replace(DEMAND, output_tokens=1)
    assert search(8, only_first).disaggregated() == []
    assert search(8, only_first).aggregated()


def test_sharing_a_device_pair_is_chosen_where_it_keeps_what_one_cannot():
    choices = (Parallel(), Parallel(tp=2))
    assert search(4, replace(DEMAND, itl_s=0.018), choices).aggregated()[0].role_layouts[0].parallel.tp == 2
    tried = [layout.role_layouts[0].parallel.tp for layout in search(4, DEMAND, choices).aggregated()]
    assert set(tried) == {1, 2}


def test_weights_that_do_not_fit_are_not_tried():
    shape, hardware = find_shape("llama-3.1-70b"), find_hardware("h100")
    found = LayoutSearch(
        price=lambda parallel: Roofline(shape, hardware, parallel, Dtype.FP8),
        choices=tuple(parallelisms(shape, hardware, devices_max=8)),
        devices=4,
        demand=replace(DEMAND, itl_s=0.05),
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
