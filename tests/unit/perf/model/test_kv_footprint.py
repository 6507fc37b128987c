import pytest

from penstock.core.errors import ConfigError
from penstock.graph.engine_prices import make_roofline
from penstock.graph.role import RoleSpec
from penstock.perf.model.catalogue import find_shape
from penstock.perf.model.hardware import Dtype, find_hardware
from penstock.perf.model.kv_footprint import KvFootprint
from penstock.perf.model.model_config import shape_of
from penstock.perf.model.parallel import Parallel
from penstock.perf.profile.profile import DecodePoint, PrefillPoint, Profile, ProfiledModel
from penstock.perf.roofline.roofline import Roofline
from penstock.perf.roofline.speculation import price_per_token
from penstock.perf.search.demand import Demand
from penstock.perf.search.pool import Pool, aggregated_share

CONFIG = {
    "hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
    "vocab_size": 99, "sliding_window": 1024,
}  # fmt: skip
LAYER_BYTES = 2 * 2 * 16 * 2
S, F = "sliding_attention", "full_attention"


def held_bytes(windows, tokens):
    """Layer by layer."""
    return sum(LAYER_BYTES * (tokens if window is None else min(tokens, window)) for window in windows)


@pytest.mark.parametrize(
    "layer_types",
    [
        (S, S, S, S, S, F) * 5 + (S, S, S, S),
        (S, F) * 3,
        (S,) * 4,
        (F,) * 4,
    ],
    ids=["five to one", "one to one", "windows alone", "whole context alone"],
)
@pytest.mark.parametrize("tokens", [1, 1000, 1024, 1025, 100_000])
def test_a_request_holds_what_its_layers_hold(layer_types, tokens):
    shape = shape_of(
        CONFIG | {"num_hidden_layers": len(layer_types), "layer_types": list(layer_types)}, name="m"
    )
    footprint = shape.kv_footprint(Dtype.BF16)
    assert footprint.held_tokens(tokens) * footprint.token_bytes == pytest.approx(
        held_bytes(shape.windows, tokens)
    )


def test_half_of_gpt_oss_holds_a_window():
    shape = find_shape("gpt-oss-120b")
    assert shape.kv_footprint(Dtype.BF16) == KvFootprint(18 * 2 * 8 * 64 * 2, ((128, 1.0),))
    h100 = find_hardware("h100")
    freed = Roofline(shape, h100, Parallel(tp=4))
    kept = Roofline(shape, h100, Parallel(tp=4), frees_windows=False)
    assert freed.kv_capacity_tokens == pytest.approx(2 * kept.kv_capacity_tokens, abs=2)
    assert (freed.kv_held_tokens(100), freed.kv_held_tokens(8000)) == (200, 8128)
    assert (kept.kv_held_tokens(100), kept.kv_held_tokens(8000)) == (100, 8000)
    per_token = price_per_token(Roofline(shape, h100, Parallel(tp=4), tokens_per_step=2.0))
    assert per_token.kv_held_tokens(8000) == 8128


def test_mla_holds_one_vector_a_layer():
    shape = find_shape("deepseek-r1")
    assert shape.kv_footprint(Dtype.FP8) == KvFootprint(61 * 576)


@pytest.mark.parametrize(
    ("role", "frees"),
    [
        ({"engine": "vllm", "hardware": "h100"}, True),
        ({"engine": "mock", "hardware": "h100"}, True),
        ({"engine": "paged", "hardware": "cpu"}, False),
        (
            {"engine": "vllm", "hardware": "h100", "engine_args": {"disable_hybrid_kv_cache_manager": True}},
            False,
        ),
    ],
)
def test_engines_that_keep_one_table_hold_the_whole_context(role, frees):
    spec = RoleSpec.parse(role, source=str)
    assert make_roofline(find_shape("gpt-oss-120b"), spec).frees_windows is frees


def test_a_profile_holds_windows_as_its_roofline_does():
    shape = find_shape("gpt-oss-120b")
    profile = Profile(
        engine="vllm",
        prefill=(PrefillPoint(new_tokens=512, seconds=0.1),),
        decode=(DecodePoint(batch=1, context=512, seconds=0.01),),
        kv_capacity_tokens=50_000,
    )
    roofline = Roofline(shape, find_hardware("h100"), Parallel(tp=4))
    assert ProfiledModel(profile, roofline).kv_held_tokens(8000) == 8128
    assert ProfiledModel(profile).kv_held_tokens(8000) == 8000


def test_more_requests_fit_beside_each_other():
    """Requests of 4,000 + 1,000 tokens: those that the memory of 18 layers and 18 windows holds, not of 36 layers."""
    shape, h100 = find_shape("gpt-oss-120b"), find_hardware("h100")
    demand = Demand(input_tokens=4000, output_tokens=1001, ttft_s=10.0, itl_s=1.0)
    share = aggregated_share(demand)
    memory_bytes = 0.9 * 80e9 * 2 - 2 * Roofline(shape, h100, Parallel(tp=2)).weight_bytes_per_device()
    whole, windows = 5000 * 18 * 2 * 8 * 64 * 2, 128 * 18 * 2 * 8 * 64 * 2
    for frees, request_bytes in ((True, whole + windows), (False, 2 * whole)):
        model = price_per_token(Roofline(shape, h100, Parallel(tp=2), frees_windows=frees))
        seen = Pool(model, 1, 8192).predict(share, 1.0, 50.0)
        assert seen is not None
        fits = (seen.batch + 1.0 * seen.ttft_s) / seen.kv_share  # those that decode, and prompts on their way
        assert fits == pytest.approx(memory_bytes / request_bytes, rel=0.01)


def test_weights_that_do_not_fit_are_still_refused():
    with pytest.raises(ConfigError, match="do not fit"):
        _ = Roofline(
            find_shape("gpt-oss-120b"), find_hardware("h100"), frees_windows=False, weight_dtype=Dtype.BF16
        ).kv_capacity_tokens
