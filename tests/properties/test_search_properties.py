"""Whatever is asked: layouts fit and keep the targets, and more devices or laxer targets never give less."""

from dataclasses import replace

from hypothesis import example, given, settings
from hypothesis import strategies as st

from penstock.perf.hardware import find_hardware
from penstock.perf.model_config import find_shape
from penstock.perf.model_shape import parallelisms
from penstock.perf.pool import Demand
from penstock.perf.roofline import Roofline
from penstock.perf.search import LayoutSearch

SHAPE = find_shape("llama-3.1-8b")
DEMANDS = st.builds(
    Demand,
    input_tokens=st.integers(1, 6000),
    output_tokens=st.integers(1, 800),
    ttft_s=st.floats(0.05, 5.0),
    itl_s=st.floats(0.008, 0.2),
    percentile=st.sampled_from([50.0, 90.0, 99.0]),
)


def search(demand, devices, hardware="h100"):
    entry = find_hardware(hardware)
    return LayoutSearch(
        price=lambda parallel: Roofline(SHAPE, entry, parallel),
        choices=tuple(parallelisms(SHAPE, entry, devices_max=devices)),
        devices=devices,
        demand=demand,
        block_size=64,
        link_bytes_per_s=lambda _one, _other: 50e9,
    )


def best(found):
    return [max((layout.rate_per_s for layout in kind), default=0.0) for kind in found]


# Of the rates that a decode worker which computes prompts too is asked for, one falls between two batches: longer steps, ten times the queue.
BETWEEN_BATCHES = Demand(input_tokens=111, output_tokens=2, ttft_s=4.0, itl_s=0.125, percentile=99.0)


@settings(max_examples=5, deadline=None)
@example(demand=BETWEEN_BATCHES, devices=3)
@given(demand=DEMANDS, devices=st.integers(1, 3))
def test_layouts_fit_and_keep_the_targets(demand, devices):
    found = search(demand, devices, "l40s")
    rooms = {model.parallel: model.kv_capacity_tokens for model in found.models}
    for layout in [*found.aggregated(), *found.disaggregated()]:
        assert layout.devices <= devices
        assert layout.rate_per_s > 0
        assert layout.prediction.ttft_s <= demand.ttft_s
        assert layout.prediction.itl_s <= demand.itl_s
        assert 0 <= layout.prediction.kv_share <= 1
        for role_layout in layout.role_layouts:
            assert role_layout.workers >= 1
            assert rooms[role_layout.parallel] >= demand.input_tokens + demand.output_tokens


@settings(max_examples=5, deadline=None)
@given(demand=DEMANDS, devices=st.integers(1, 4), more=st.integers(1, 3))
def test_more_devices_never_give_less(demand, devices, more):
    fewer, larger = (
        best((found.aggregated(), found.disaggregated()))
        for found in (search(demand, devices), search(demand, devices + more))
    )
    for few, many in zip(fewer, larger, strict=True):
        assert 1.01 * many >= few


@settings(max_examples=5, deadline=None)
@given(demand=DEMANDS, factor=st.floats(1.05, 3.0), name=st.sampled_from(["ttft_s", "itl_s"]))
def test_laxer_targets_never_give_less(demand, factor, name):
    laxer = replace(demand, **{name: factor * getattr(demand, name)})
    strict, lax = (
        best((found.aggregated(), found.disaggregated())) for found in (search(demand, 3), search(laxer, 3))
    )
    for little, much in zip(strict, lax, strict=True):
        assert 1.01 * much >= little
