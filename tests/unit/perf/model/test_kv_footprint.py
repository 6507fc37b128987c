import pytest

from penstock.graph.engine_prices import make_roofline
from penstock.graph.role import RoleSpec
from penstock.perf.model.catalogue import find_shape
from penstock.perf.model.hardware import Dtype, find_hardware
from penstock.perf.model.kv_footprint import KvFootprint
from penstock.perf.model.model_config import shape_of
from penstock.perf.model.parallel import Parallel
from penstock.perf.roofline.roofline import Roofline
from penstock.perf.roofline.speculation import price_per_token

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
    [(S, S, S, S, S, F) * 5 + (S, S, S, S), (S, F) * 3, (S,) * 4, (F,) * 4],
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
