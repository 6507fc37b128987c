"""What is said of a tier's bandwidth: one line each, and a warning where it cannot help."""

import math

import pytest

from penstock.kv.load_or_compute import BreakEven, MeasuredPrefill
from tests.support.held_tier import HeldTier

BLOCK_SIZE = 4


def said(capsys):
    return "".join(capsys.readouterr())


def scene(seconds_per_block, on_price=lambda *_: None):
    tier = HeldTier(seconds_per_block=seconds_per_block)
    prefill = MeasuredPrefill()
    return tier, prefill, BreakEven([tier], prefill, BLOCK_SIZE, on_price)


async def test_probes_say_a_line_a_tier_at_the_start_and_serving_corrects_it(capsys):
    tier, prefill, break_even = scene(0.0)
    break_even.probed(0.001, [16000.0])
    text = said(capsys)
    assert text.count("kv_tier_break_even") == 1
    assert "needed_bytes_per_s=8000" in text
    assert "measured_bytes_per_s=16000" in text
    assert "measured_by=probe" in text
    assert "kv_tier_too_slow" not in text
    prefill.measure(3000, 2.0)
    break_even.look()
    assert said(capsys) == "", "less than twice as quick as was said"
    for _ in range(100):
        prefill.measure(3000, 1.0)
    tier.seconds_per_block = 32 / 16000
    break_even.look()
    text = said(capsys)
    assert "needed_bytes_per_s=24000" in text
    assert "measured_by=serving" in text
    assert text.count("kv_tier_too_slow") == 1


async def test_a_tier_that_cannot_help_is_warned_of_once_until_it_recovers(capsys):
    tier, prefill, break_even = scene(0.0)
    prefill.measure(1000, 1.0)
    break_even.look()
    assert "measured_bytes_per_s='not yet'" in said(capsys)
    warned = []
    for speed in (4000, 4000, 9000, 4000, 11000, 4000):
        tier.seconds_per_block = 32 / speed
        break_even.look()
        warned.append("kv_tier_too_slow" in said(capsys))
    assert warned == [True, False, False, False, False, True]


async def test_each_look_tells_what_computing_and_loading_a_token_take():
    told = []
    tier, prefill, break_even = scene(0.0, lambda *prices: told.append(prices))
    break_even.look()
    assert told == []
    prefill.measure(1000, 1.0)
    break_even.look()
    tier.seconds_per_block = 0.002
    break_even.look()
    tier.is_off = True
    break_even.look()
    assert told == [(0.001, math.inf), (0.001, pytest.approx(0.0005)), (0.001, math.inf)]


@pytest.mark.parametrize(
    "steps",
    [
        [(8000, 0, 0), *[(32, 64, 64_000)] * 99],
        [(0, 64, 64_000), (32, 64, 64_000)] * 9,
        [(20, 0, 0), (700, 0, 0)] * 3,
        [*[(tokens, 0, 0) for tokens in (100, 900, 3000)], *[(200, rows, 0) for rows in range(1, 250)]],
    ],
    ids=["after a prompt alone", "between decode steps", "prompts alone", "as rows become more"],
)
def test_a_prompt_token_costs_what_it_adds_to_a_step(steps):
    prefill = MeasuredPrefill()
    assert not prefill.is_known
    for tokens, rows, context in steps:
        step_s = 4e-3 + 17e-6 * tokens + 1.2e-5 * rows + 1e-8 * context
        prefill.measure(tokens, step_s, decode_rows=rows, context_tokens=context)
    assert prefill.seconds(8000) == pytest.approx(0.136, rel=0.25)
