import pytest

from penstock.graph.engine_prices import make_roofline
from penstock.graph.role import RoleSpec
from penstock.perf.hardware import Dtype
from penstock.perf.model_config import find_shape, shape_of

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
