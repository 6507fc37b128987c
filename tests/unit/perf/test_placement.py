"""Placements keep their targets, use what there is, and get worse as targets get stricter."""

from functools import partial
from itertools import pairwise

import pytest

from penstock.perf.catalogue import find_shape
from penstock.perf.hardware import Dtype, find_hardware
from penstock.perf.parallel import Parallel
from penstock.perf.placement import (
    PREFILL_BUSY,
    Demand,
    parallelisms,
    place_aggregated,
    place_decode,
    place_prefill,
)
from penstock.perf.roofline import Roofline

SMALL, R1 = find_shape("llama-3.1-8b"), find_shape("deepseek-r1")
H100, GB200 = find_hardware("h100"), find_hardware("gb200")
CHAT = Demand(input_tokens=2048, output_tokens=512, ttft_s=2.0, itl_s=0.05)


def strict(itl_s: float) -> Demand:
    return Demand(input_tokens=2048, output_tokens=512, ttft_s=2.0, itl_s=itl_s)


def test_a_batch_is_as_large_as_the_target_allows() -> None:
    demand = strict(0.012)
    found = place_decode(partial(Roofline, SMALL, H100), [Parallel()], demand)
    assert found is not None
    model = Roofline(SMALL, H100)
    within, beyond = (
        model.decode_step_s(n, round(n * demand.context_tokens)) for n in (found.batch, found.batch + 1)
    )
    assert within <= 0.012 < beyond
    assert found.latency_s == within
    assert found.requests_per_s == pytest.approx(found.batch / (512 * within))


def test_a_batch_is_no_larger_than_memory_allows() -> None:
    found = place_decode(partial(Roofline, SMALL, H100), [Parallel()], strict(10.0))
    assert found is not None
    assert found.batch == Roofline(SMALL, H100).kv_capacity_tokens // 2560


def test_prompts_beside_decoding_cost_throughput() -> None:
    price = partial(Roofline, SMALL, H100)
    decode, both = (place(price, [Parallel()], CHAT) for place in (place_decode, place_aggregated))
    assert decode is not None
    assert both is not None
    assert both.requests_per_s < decode.requests_per_s
    impatient = Demand(input_tokens=2048, output_tokens=512, ttft_s=0.05, itl_s=0.05)
    assert place_aggregated(price, [Parallel()], impatient) is None


def test_a_model_takes_as_many_devices_as_it_needs() -> None:
    price = partial(Roofline, R1, H100, weight_dtype=Dtype.FP8)
    assert place_decode(price, parallelisms(R1, H100, devices_max=8), CHAT) is None
    found = place_decode(price, parallelisms(R1, H100, devices_max=16), CHAT)
    assert found is not None
    assert found.parallel.devices == 16


def test_wide_expert_parallelism_is_found_where_nvlink_reaches() -> None:
    gb200 = partial(Roofline, R1, GB200, weight_dtype=Dtype.FP8, expert_dtype=Dtype.NVFP4)
    wide = place_decode(gb200, parallelisms(R1, GB200, devices_max=72), strict(0.02))
    assert wide is not None
    assert wide.parallel.ep == wide.parallel.dp >= 32
    h100 = partial(Roofline, R1, H100, weight_dtype=Dtype.FP8)
    narrow = place_decode(h100, parallelisms(R1, H100, devices_max=64), strict(1 / 150))
    assert narrow is not None
    assert narrow.parallel.ep == 1
    assert wide.device_s_per_request < narrow.device_s_per_request / 20


def test_stricter_targets_never_give_more() -> None:
    price = partial(Roofline, R1, GB200, weight_dtype=Dtype.FP8, expert_dtype=Dtype.NVFP4)
    choices = tuple(parallelisms(R1, GB200, devices_max=72))
    for place in (place_decode, place_aggregated):
        costs = [
            found.device_s_per_request
            for itl_s in (0.1, 0.05, 0.02, 0.01, 0.007)
            if (found := place(price, choices, strict(itl_s))) is not None
        ]
        assert len(costs) == 5
        assert all(cost <= 1.03 * stricter for cost, stricter in pairwise(costs))
    assert place_decode(price, choices, strict(1e-4)) is None


def test_prefill_workers_answer_within_two_batches() -> None:
    found = place_prefill(partial(Roofline, SMALL, H100), [Parallel()], CHAT)
    assert found is not None
    batch_s = Roofline(SMALL, H100).prefill_batch_s([(2048, 0)] * found.batch)
    assert found.latency_s == 2 * batch_s <= 2.0
    assert found.requests_per_s == pytest.approx(PREFILL_BUSY * found.batch / batch_s)


@pytest.mark.parametrize("shape", [SMALL, R1], ids=lambda shape: shape.name)
@pytest.mark.parametrize("hardware", [H100, GB200], ids=lambda entry: entry.name)
def test_every_parallelism_tried_can_be_priced(shape, hardware) -> None:
    choices = list(parallelisms(shape, hardware, devices_max=64))
    assert len(choices) == len(set(map(repr, choices)))
    for parallel in choices:
        assert parallel.devices <= 64
        assert parallel.tp <= hardware.scale_up_devices
        assert Roofline(shape, hardware, parallel).decode_step_s(1, 1) > 0
