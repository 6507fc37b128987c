"""The roofline against reference tables and against bytes and FLOPs worked out by hand."""

import json
import re
from pathlib import Path

import pytest

from penstock.core.errors import ConfigError
from penstock.core.types.events import Tier
from penstock.perf.hardware import HARDWARE, Dtype, find_hardware
from penstock.perf.model_config import find_shape, shape_of
from penstock.perf.model_shape import Parallel
from penstock.perf.roofline import Roofline, causal_pairs
from tests.support.ideal import IDEAL

TABLES = json.loads((Path(__file__).parents[2] / "data" / "latency_tables.json").read_text())
FITTED = {("h100_sxm", 1, "bf16"), ("h100_sxm", 4, "bf16"), ("h100_sxm", 2, "fp8")}
"""What `tools/fit_roofline.py` fits to."""
LLAMA_8B = {
    "hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32, "num_key_value_heads": 8,
    "num_hidden_layers": 32, "vocab_size": 128256, "max_position_embeddings": 131072,
}  # fmt: skip
SHAPE = shape_of(LLAMA_8B, name="8b")
H100 = find_hardware("h100")


def roofline_of(table: dict) -> Roofline:
    shape = find_shape("llama-3.1-8b" if "8B" in table["model"] else "llama-3.1-70b")
    return Roofline(shape, find_hardware(table["system"]), Parallel(tp=table["tp"]), Dtype(table["weights"]))


def errors(table: dict) -> dict[str, float]:
    """Relative error by cell."""
    roofline = roofline_of(table)
    found = {}
    for tokens, ms in table["prefill_ms"].items():
        found[f"prefill {tokens}"] = roofline.prefill_s(int(tokens)) * 1e3 / ms - 1
    for cell, ms in table["decode_ms"].items():
        context, batch = map(int, cell.split("x"))
        found[f"decode {cell}"] = roofline.decode_step_s(batch, batch * context) * 1e3 / ms - 1
    return found


@pytest.mark.parametrize(
    "table",
    [table for table in TABLES if (table["system"], table["tp"], table["weights"]) not in FITTED],
    ids=lambda t: f"{t['model'].split('/')[1]}-{t['system']}-tp{t['tp']}",
)
def test_tables_that_no_factor_was_fitted_to(table: dict) -> None:
    found = errors(table)
    prefill = {c: e for c, e in found.items() if c.startswith("prefill") and int(c.split()[1]) >= 1024}
    decode = {c: e for c, e in found.items() if c.startswith("decode")}
    assert max(map(abs, prefill.values())) < 0.20, prefill
    assert max(map(abs, decode.values())) < 0.15, decode


def test_decode_at_batch_one_reads_every_weight_once() -> None:
    expected = (SHAPE.total_params() - SHAPE.head_params()) * 2 / 3.35e12
    assert Roofline(SHAPE, H100, factors=IDEAL).decode_step_s(1, 0) == pytest.approx(expected, rel=0.01)


def test_prefill_of_many_tokens_is_arithmetic() -> None:
    tokens = 8192
    linear = 2 * tokens * SHAPE.dense_params() / 989e12
    attention = 32 * 4 * 32 * 128 * (tokens * (tokens + 1) / 2) / 989e12
    head = SHAPE.head_params() * 2 / 3.35e12
    found = Roofline(SHAPE, H100, factors=IDEAL).prefill_s(tokens)
    assert found == pytest.approx(linear + attention + head, rel=0.01)


def test_cached_tokens_cost_only_attention() -> None:
    roofline = Roofline(SHAPE, H100)
    cold, warm, whole = roofline.prefill_s(1024), roofline.prefill_s(1024, 7168), roofline.prefill_s(8192)
    assert cold < warm < whole / 4


@pytest.mark.parametrize(
    ("new", "cached", "window"),
    [(5, 0, None), (5, 3, None), (5, 0, 9), (9, 0, 4), (9, 3, 4), (9, 40, 4), (1, 3, 4), (3, 3, 4)],
)
def test_every_query_sees_itself_and_what_its_window_holds(new: int, cached: int, window: int | None) -> None:
    seen = [min(cached + number, window or 1000) for number in range(1, new + 1)]
    assert causal_pairs(new, cached, window) == sum(seen)


def test_decode_is_linear_in_context() -> None:
    roofline = Roofline(SHAPE, H100)
    low, middle, high = (roofline.decode_step_s(7, context) for context in (10_000, 30_000, 50_000))
    assert middle - low == pytest.approx(high - middle, rel=1e-9)


def test_speculation_verifies_every_token_of_a_step() -> None:
    """Three drafted tokens and the sure one are the arithmetic of four times the batch, on the same KV, whatever they yield."""
    batch = 4096
    speculative = Roofline(SHAPE, H100, tokens_per_step=2.0, draft_tokens=3, factors=IDEAL)
    layers, head = SHAPE.dense_params(), SHAPE.head_params()
    verified = 2 * 4 * batch * (layers + head) / 989e12
    drafted = 3 * 2 * batch * (layers / 32 + head) / 989e12
    assert speculative.decode_step_s(batch, 0) == pytest.approx(verified + drafted, rel=0.01)
    context = batch * 4096
    kv_s = speculative.decode_step_s(batch, context) - speculative.decode_step_s(batch, 0)
    assert kv_s == pytest.approx(context * 131072 / 3.35e12 * (1 + 3 / 32), rel=0.01)


def test_the_fewest_drafted_tokens_that_can_yield_so_many() -> None:
    for yielded, drafted in ((1.0, 0), (1.8, 1), (2.0, 1), (2.1, 2)):
        usual = Roofline(SHAPE, H100, tokens_per_step=yielded)
        stated = Roofline(SHAPE, H100, tokens_per_step=yielded, draft_tokens=drafted)
        assert usual.decode_step_s(64, 64_000) == stated.decode_step_s(64, 64_000)
    few, many = (Roofline(SHAPE, H100, tokens_per_step=1.8, draft_tokens=drafted) for drafted in (1, 5))
    assert few.decode_step_s(64, 64_000) < many.decode_step_s(64, 64_000)
    with pytest.raises(
        ConfigError, match="draft_tokens: 1 drafted and one that is sure yield 2 tokens at most"
    ):
        Roofline(SHAPE, H100, tokens_per_step=2.5, draft_tokens=1)


def test_blocks_take_the_time_of_their_tier() -> None:
    roofline = Roofline(SHAPE, H100)
    latency_s = roofline.factors.collective_s
    assert roofline.onboard_s(9e9, Tier.DISK) == pytest.approx(latency_s + 9e9 / 5e9)
    assert roofline.onboard_s(9e9, Tier.DEVICE) == 0


def test_capacity() -> None:
    roofline = Roofline(SHAPE, H100)
    assert roofline.kv_bytes_per_token == 131072
    budget = 0.9 * 80e9 - SHAPE.total_params() * 2
    assert roofline.kv_capacity_tokens == int(budget / 131072)
    with pytest.raises(
        ConfigError, match=r"do not fit in 90% of h100's 80 GB; raise tensor_parallel or pipeline_parallel$"
    ):
        _ = Roofline(find_shape("llama-3.1-70b"), H100).kv_capacity_tokens


def test_bad_input() -> None:
    with pytest.raises(ConfigError, match="did you mean 'h100'"):
        find_hardware("h1000")
    with pytest.raises(ConfigError, match="needs a model with experts"):
        Roofline(SHAPE, H100, Parallel(ep=8, dp=8))


@pytest.mark.parametrize("name", sorted(HARDWARE))
def test_every_entry_states_its_source(name: str) -> None:
    """Of its speeds, of its power as it stands there, and that its price is nobody's quotation."""
    entry = HARDWARE[name]
    where, *_, price = entry.source.split("; ")
    assert "AVX-512 core" in where if name == "cpu" else where.startswith("NVIDIA")
    assert price == "price: assumed"
    stated = re.findall(r"([\d.]+) (k?)W\b", entry.source)
    of_system = [float(number) * (1000 if kilo else 1) for number, kilo in stated]
    assert entry.watts in {watts / devices for watts in of_system for devices in (1, 8, 72)}
    assert entry.peak_flops_per_s(Dtype.NVFP4) >= entry.peak_flops_per_s(
        Dtype.FP32 if name == "cpu" else Dtype.BF16
    )
