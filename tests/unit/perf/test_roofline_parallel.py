"""What tensor and pipeline parallelism make of a dense model's bytes, FLOPs and messages, worked out by hand."""

import pytest

from penstock.perf.hardware import Dtype, find_hardware
from penstock.perf.model_config import find_shape
from penstock.perf.model_shape import Parallel
from penstock.perf.roofline import Roofline
from tests.support.ideal import IDEAL, only

SHAPE = find_shape("llama-3.1-70b")
LAYERS, HIDDEN, HEADS, HEAD_DIM, KV_HEADS = 80, 8192, 64, 128, 8
LAYER = HIDDEN * HEAD_DIM * (2 * HEADS + 2 * KV_HEADS) + 3 * HIDDEN * 28672
HEAD = 128256 * HIDDEN
TOKEN_BYTES = LAYERS * 2 * KV_HEADS * HEAD_DIM * 2


def engine(parallel: Parallel, **kept: object) -> Roofline:
    return Roofline(SHAPE, only("h100", **kept), parallel, factors=IDEAL)


@pytest.mark.parametrize(("tp", "pp"), [(8, 1), (4, 2), (2, 4), (1, 8)])
def test_every_device_reads_its_part_of_the_weights_in_a_step(tp: int, pp: int) -> None:
    """A batch goes through the stages one after the other, each of a stage's devices reading its part."""
    found = engine(Parallel(tp=tp, pp=pp), bandwidth_bytes_per_s=3e12).decode_step_s(1, 0)
    assert found == pytest.approx((LAYERS * LAYER + HEAD) * 2 / tp / 3e12, rel=0.001)


@pytest.mark.parametrize(("tp", "pp"), [(8, 1), (4, 2), (2, 4), (1, 8)])
def test_a_pipeline_fills_and_drains_about_a_prompt(tp: int, pp: int) -> None:
    """A prompt is cut into as many micro-batches as there are stages: the last one leaves after 2 pp - 1 stages' times."""
    tokens, cached = 8192, 1024
    pairs = tokens * cached + tokens * (tokens + 1) / 2
    flops = 2 * tokens * LAYERS * LAYER + LAYERS * 4 * HEADS * HEAD_DIM * pairs
    found = engine(Parallel(tp=tp, pp=pp), flops_per_s={Dtype.BF16: 1e15}).prefill_s(tokens, cached)
    stage_s = flops / tp / pp / pp / 1e15
    assert found == pytest.approx((2 * pp - 1) * stage_s, rel=0.002)


@pytest.mark.parametrize("pp", [2, 4])
def test_a_prompt_beside_decoding_is_charged_the_filling_by_what_it_adds(pp: int) -> None:
    model = engine(Parallel(pp=pp), flops_per_s={Dtype.BF16: 1e15})
    decode_s = model.decode_step_s(4096, 0)
    assert model.mixed_step_s([(1, 0)], 4096, 0) == pytest.approx(decode_s, rel=0.002)
    linear_s = 2 * 2048 * LAYERS * LAYER / 1e15
    pairs_s = LAYERS * 4 * HEADS * HEAD_DIM * 2048 * 2049 / 2 / 1e15
    added_s = model.mixed_step_s([(2048, 0)], 4096, 0) - decode_s
    assert added_s == pytest.approx((2 * pp - 1) / pp**2 * (linear_s + pairs_s), rel=0.01)


@pytest.mark.parametrize(("tp", "pp"), [(8, 1), (4, 2), (2, 4)])
def test_weights_are_split_and_stages_have_layers_and_kv_of_their_own(tp: int, pp: int) -> None:
    parallel = Parallel(tp=tp, pp=pp)
    spread = Roofline(SHAPE, find_hardware("h100"), parallel)
    weights = 2 * LAYERS * LAYER / 8 + 2 * 2 * HEAD / tp
    assert spread.weight_bytes_per_device() == pytest.approx(weights)
    assert spread.kv_capacity_tokens == int(8 * (0.9 * 80e9 - weights) / TOKEN_BYTES)


@pytest.mark.parametrize(("tp", "link"), [(2, "scale_up"), (8, "scale_up"), (16, "scale_out")])
def test_two_all_reduces_a_layer_over_the_slowest_link(tp: int, link: str) -> None:
    """A ring moves each element twice but for a device's own part; 16 devices are more than one host has."""
    tokens = 1000
    found = engine(Parallel(tp=tp), **{f"{link}_bytes_per_s": 400e9}).prefill_s(tokens)
    moved = 2 * LAYERS * tokens * HIDDEN * 2 * 2 * (tp - 1) / tp
    assert found == pytest.approx(moved / 400e9, rel=0.001)


def test_each_collective_hop_and_layer_has_its_latency() -> None:
    ideal = IDEAL.model_copy(
        update={
            "collective_s": 1e-5,
            "all_reduce_s": 1e-5,
            "layer_s": 2e-5,
            "attention_s": 3e-6,
            "step_s": 1e-3,
        }
    )
    hardware = engine(Parallel()).hardware
    alone = LAYERS * (2e-5 + 3e-6) + 1e-3
    for parallel, collectives in ((Parallel(), 0), (Parallel(tp=4), 2 * LAYERS), (Parallel(pp=4), 3)):
        found = Roofline(SHAPE, hardware, parallel, factors=ideal).decode_step_s(1, 0)
        assert found == pytest.approx(alone + collectives * 1e-5, rel=1e-6)
