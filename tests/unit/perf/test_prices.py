"""How close the few numbers on the wire are to the models behind them, and how corrections follow a drifting worker."""

from pathlib import Path

import pytest

from penstock.core.types.events import Tier
from penstock.core.types.instances import Prices
from penstock.perf.hardware import Dtype, find_hardware
from penstock.perf.latency import FACTOR_MAX, Correction, publish, saturating_tokens
from penstock.perf.model_config import find_shape
from penstock.perf.model_shape import Parallel
from penstock.perf.profile import Profile, ProfiledModel
from penstock.perf.roofline import Roofline

PROFILES = Path(__file__).parents[3] / "examples" / "profiles"
EIGHT = Roofline(find_shape("llama-3.1-8b"), find_hardware("h100"), Parallel())
SEVENTY = Roofline(
    find_shape("llama-3.1-70b"),
    find_hardware("h100"),
    Parallel(tp=2),
    weight_dtype=Dtype.FP8,
    kv_dtype=Dtype.FP8,
)
CASES = {
    "8b": (EIGHT, 0.02),
    "70b-fp8-tp2": (SEVENTY, 0.02),
    "70b-profile": (ProfiledModel(Profile.load(PROFILES / "70b-h100-fp8-tp2.json"), SEVENTY), 0.04),
}


def prefill_s(prices: Prices, new: int, cached: int) -> float:
    pairs = new * cached + new * (new + 1) / 2
    return prices.prefill_step_s + new * prices.prefill_token_s + pairs * prices.prefill_pair_s


@pytest.mark.parametrize("name", CASES)
def test_it_is_close_to_what_is_behind_it(name):
    model, error_max = CASES[name]
    prices = publish(model, context_length=131_072)
    assert prices.error < error_max
    for new, cached in ((700, 0), (3000, 0), (3000, 9000), (20_000, 0)):  # none of them points of the fit
        assert prefill_s(prices, new, cached) == pytest.approx(model.prefill_s(new, cached), rel=0.12)
    for batch, context in ((10, 700), (20, 3000), (50, 3000)):
        found = prices.decode_step_s + batch * (prices.decode_sequence_s + context * prices.decode_token_s)
        assert found == pytest.approx(model.decode_step_s(batch, batch * context), rel=0.06)


def test_tiers_are_priced_by_token():
    prices = publish(EIGHT, context_length=8192)
    assert prices.onboard_token_s[0] == 0.0
    host_s = EIGHT.onboard_s(1000 * EIGHT.kv_bytes_per_token, Tier.HOST)
    assert 1000 * prices.onboard_token_s[1] == pytest.approx(host_s, rel=0.05)
    assert list(prices.onboard_token_s) == sorted(prices.onboard_token_s)


@pytest.mark.parametrize("context_length", [1, 2, 5, 64, 300])
def test_a_short_context_is_enough(context_length):
    prices = publish(EIGHT, context_length=context_length)
    assert prefill_s(prices, context_length, 0) == pytest.approx(EIGHT.prefill_s(context_length), rel=0.1)


def priced(step_s: float, token_s: float, pair_s: float) -> Prices:
    return Prices(step_s, token_s, pair_s, step_s, 0.0, 0.0)


@pytest.mark.parametrize(
    ("step_ms", "tokens"),
    [
        (0.01, 64),  # 64 tokens take 0.65 ms, and 0.64 without the step's own cost
        (1, 2048),  # 1,024 tokens: 91 % of the rate that there is; 2,048: 95.4
        (1000, 16_384),  # never busy: the largest there is
    ],
)
def test_the_fewest_tokens_that_make_a_steps_own_cost_a_twentieth(step_ms, tokens):
    assert saturating_tokens(priced(step_ms / 1e3, 1e-5, 0.0)) == tokens


def test_attention_over_long_chunks_is_no_reason_for_larger_steps():
    # Rates peak where pairs cost what the step does, at sqrt(2 x 1 ms / 1 ns) = 1,414 tokens: 512 reach 94 % of it.
    assert saturating_tokens(priced(1e-3, 1e-5, 1e-9)) == 1024


def test_an_engine_that_takes_no_time_is_busy_with_the_smallest_step():
    assert saturating_tokens(priced(0.0, 0.0, 0.0)) == 64


def test_clamped_and_distrusted() -> None:
    correction = Correction()
    for _ in range(50):
        correction.observe(1.0, 1000.0)
    assert correction.factor == pytest.approx(FACTOR_MAX)
    assert not correction.trusted
    for predicted_s, measured_s in ((0.0, 1.0), (1.0, -1.0), (float("nan"), 1.0), (float("inf"), 1.0)):
        correction.observe(predicted_s, measured_s)
    assert correction.observations == 50


def test_one_outlier_changes_nothing() -> None:
    correction = Correction()
    for _ in range(10):
        correction.observe(1.0, 1.0)
    correction.observe(1.0, 100.0)
    assert correction.factor == pytest.approx(1.0)
