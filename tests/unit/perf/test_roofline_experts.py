"""Experts, latents and narrow formats have no reference table: bytes and FLOPs worked out by hand."""

import pytest

from penstock.core.errors import ConfigError
from penstock.perf.hardware import Dtype, Hardware, find_hardware
from penstock.perf.model_config import find_shape
from penstock.perf.model_shape import Parallel
from penstock.perf.roofline import Roofline
from tests.support.ideal import ENDLESS, IDEAL, only

R1 = find_shape("deepseek-r1")
LAYERS, MOE_LAYERS, HIDDEN = 61, 58, 7168
EXPERT = 3 * 7168 * 2048
# Query down and up, latent with its rotary part, keys and values up, output.
ATTENTION = 7168 * 1536 + 1536 * 128 * 192 + 7168 * (512 + 64) + 512 * 128 * (128 + 128) + 128 * 128 * 7168
DENSE_LAYERS, GATE, SHARED = 3 * 3 * 7168 * 18432, 7168 * 256, 3 * 7168 * 2048
HEAD = 129280 * 7168


def engine(hardware: Hardware | str, dtype: Dtype | None = None, **parallel: int) -> Roofline:
    entry = find_hardware(hardware) if isinstance(hardware, str) else hardware
    return Roofline(R1, entry, Parallel(**parallel), dtype, factors=IDEAL)


def hit(tokens: float) -> float:
    return 256 * (1 - (1 - 8 / 256) ** tokens)


def test_a_larger_batch_reads_more_experts() -> None:
    """At TP 8 each device reads an eighth of every expert that some token of the batch goes to."""
    for tokens in (1, 4, 32, 256):
        bytes_per_device = LAYERS * ATTENTION + DENSE_LAYERS + MOE_LAYERS * SHARED
        bytes_per_device += MOE_LAYERS * hit(tokens) * EXPERT + 2 * HEAD
        found = engine(only("h200", bandwidth_bytes_per_s=4.8e12), tp=8).decode_step_s(tokens, 0)
        assert found == pytest.approx(bytes_per_device / 8 / 4.8e12, rel=0.001)
    assert hit(1) == pytest.approx(8)
    assert hit(256) > 255


def test_latent_attention_decodes_on_latents_and_copies_them() -> None:
    """Scores over 512 + 64 and sums over 512 elements for each of 128 heads; TP cuts heads, not latents."""
    batch, context = 16, 100_000
    flops = LAYERS * context * 2 * 128 * (512 + 64 + 512)
    arithmetic = engine(only("h200", flops_per_s={Dtype.FP8: ENDLESS, Dtype.BF16: 1e15}), tp=8)
    head_s = 2 * batch * HEAD / 8 / 1e15
    assert arithmetic.decode_step_s(batch, context) == pytest.approx(flops / 8 / 1e15 + head_s, rel=0.001)
    slow = engine(only("h200", bandwidth_bytes_per_s=1e12), tp=8)
    kv_s = slow.decode_step_s(batch, context) - slow.decode_step_s(batch, 0)
    assert kv_s == pytest.approx(LAYERS * context * (512 + 64) / 1e12, rel=0.001)


def test_latent_attention_computes_prompts_on_keys_and_values() -> None:
    """Each of 128 heads scores a pair over 128 + 64 elements, and sums 128: what latents are expanded to."""
    tokens = 16_384
    free_products = {Dtype.FP8: ENDLESS, Dtype.BF16: 1e15}  # attention and head are computed in 16 bits
    found = engine(only("h200", flops_per_s=free_products), tp=8).prefill_s(tokens)
    pairs = tokens * (tokens + 1) / 2
    flops = LAYERS * pairs * 2 * 128 * (128 + 64 + 128) + 2 * HEAD
    assert found == pytest.approx(flops / 8 / 1e15, rel=0.001)


def test_copies_of_the_attention_hold_different_sequences() -> None:
    wide, tensor = engine("h200", dp=8, ep=8), engine("h200", tp=8)
    held = LAYERS * ATTENTION + DENSE_LAYERS + MOE_LAYERS * (SHARED + GATE) + MOE_LAYERS * 256 * EXPERT / 8
    held += 2 * HEAD * 2
    assert wide.weight_bytes_per_device() == held
    kv_bytes = 0.9 * 141e9 - held
    assert wide.kv_capacity_tokens == int(8 * kv_bytes / (576 * 61))
    whole = (R1.total_params() + 2 * HEAD) / 8  # embeddings and head in 16 bits
    assert tensor.kv_capacity_tokens == int((0.9 * 141e9 - whole) / (576 * 61))
    assert wide.kv_capacity_tokens > 4 * tensor.kv_capacity_tokens


def test_one_prompt_runs_on_one_copy_of_the_attention() -> None:
    """Eight prompts on eight copies take as long as one, but for the experts, which all share."""
    hardware = only("h200", flops_per_s={Dtype.FP8: 1e15, Dtype.BF16: ENDLESS})
    wide, tokens = engine(hardware, dp=8, ep=8), 8192
    dense = LAYERS * ATTENTION + DENSE_LAYERS + MOE_LAYERS * SHARED
    experts = MOE_LAYERS * 8 * EXPERT
    one, eight = wide.prefill_s(tokens), wide.prefill_batch_s([(tokens, 0)] * 8)
    assert one == pytest.approx(2 * tokens * (dense + experts / 8) / 1e15, rel=0.001)
    assert eight == pytest.approx(2 * tokens * (dense + experts) / 1e15, rel=0.001)
    ninth = wide.prefill_batch_s([(tokens, 0)] * 8 + [(8, 0)])
    assert eight < ninth < eight * 1.01


@pytest.mark.parametrize("ep", [32, 64])
def test_exchange_within_an_nvlink_domain(ep: int) -> None:
    """Eight copies of a token, 1 byte an element out and 2 back, all but the device's own share."""
    gb200 = only("gb200", scale_up_bytes_per_s=900e9)
    found = engine(gb200, dp=ep, ep=ep).decode_step_s(64 * ep, 0)
    assert found == pytest.approx(MOE_LAYERS * 64 * 8 * HIDDEN * 3 * (ep - 1) / ep / 900e9, rel=0.001)


@pytest.mark.parametrize(
    ("parallel", "message"),
    [
        ({"tp": 8, "ep": 12, "dp": 2}, r"multiple of tensor parallelism \(8\) that divides the 16 devices"),
        ({"dp": 8, "ep": 16}, "divides the 8 devices of tensor times data parallelism, or 1, got 16"),
        ({"dp": 512, "ep": 512}, "512 devices cannot share 256 experts"),
        ({"tp": 256}, "256 devices cannot share 128 attention heads"),
        ({"pp": 62}, "62 stages cannot share 61 layers"),
    ],
)
def test_what_cannot_be_spread(parallel: dict[str, int], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        engine("gb200", **parallel)


BF16_KV, NARROW = (Dtype.FP8, Dtype.FP8, Dtype.BF16), (Dtype.FP8, Dtype.NVFP4, Dtype.FP8)
"""Formats of weights, experts and KV."""


def spread(hardware: str, formats: tuple[Dtype, Dtype, Dtype], devices: int) -> Roofline:
    weights, experts, kv = formats
    parallel = Parallel(dp=devices, ep=devices)
    return Roofline(R1, find_hardware(hardware), parallel, weights, kv, expert_dtype=experts)


@pytest.mark.parametrize(
    ("hardware", "formats", "devices", "batch", "context", "published"),
    [
        # SGLang, 2025-05-05: 12 hosts of 8 H100, decode on 9 of them, 22,300 tokens/s a host, prompts of 2,000 tokens.
        ("h100", BF16_KV, 72, 256, 2050, 22_300 / 8),
        # DeepSeek, 2025-03: H800, EP 144, 14,800 tokens/s a host, 20 to 22 a user (so 88 users a GPU), context 4,989.
        ("h100", BF16_KV, 144, 88, 4989, 14_800 / 8),
        # SGLang, 2025-09-25: GB200 NVL72, decode on 48, attention in fp8 and experts in NVFP4, and as trained.
        ("gb200", NARROW, 48, 768, 2050, 13_386),
        ("gb200", BF16_KV, 48, 768, 2050, 9_087),
    ],
)
def test_published_decode_rates_are_of_the_order_found(hardware, formats, devices, batch, context, published):
    """No factor was fitted to these. Batches are not published and assumed; DeepSeek's had speculation besides."""
    step_s = spread(hardware, formats, devices).decode_step_s(batch * devices, batch * devices * context)
    assert 0.9 < batch / step_s / published < 1.7
