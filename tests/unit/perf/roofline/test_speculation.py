"""Speculation by steps of one token each: as fast as the steps of several tokens that they stand for."""

import pytest

from penstock.core.types.events import Tier
from penstock.perf.model.catalogue import find_shape
from penstock.perf.model.hardware import find_hardware
from penstock.perf.published import publish
from penstock.perf.roofline.roofline import Roofline
from penstock.perf.roofline.speculation import price_per_token

SHAPE = find_shape("llama-3.1-8b")
H100 = find_hardware("h100")
PLAIN = Roofline(SHAPE, H100)
STEP = Roofline(SHAPE, H100, tokens_per_step=2.5)
TOKEN = price_per_token(STEP)


@pytest.mark.parametrize("batch", [1, 16, 256])
def test_a_token_takes_its_part_of_a_step(batch: int) -> None:
    assert 2.5 * TOKEN.decode_step_s(batch, batch * 1000) == pytest.approx(
        STEP.decode_step_s(batch, batch * 1000)
    )


def test_prompts_and_answers_together_take_as_long_as_in_steps_of_several_tokens() -> None:
    """20 steps compute parts of prompts beside 32 sequences, which take 100 steps in all for 250 tokens each."""
    chunk, batch, context = [(900, 100)], 32, 32 * 1000
    in_steps_s = 20 * STEP.mixed_step_s(chunk, batch, context) + 80 * STEP.decode_step_s(batch, context)
    by_token_s = 20 * TOKEN.mixed_step_s(chunk, batch, context) + 230 * TOKEN.decode_step_s(batch, context)
    assert by_token_s == pytest.approx(in_steps_s)


def test_prompts_memory_and_onboarding_are_as_without() -> None:
    assert TOKEN.prefill_s(3000, 1000) == PLAIN.prefill_s(3000, 1000)
    assert TOKEN.mixed_step_s([(3000, 1000)], 0, 0) == PLAIN.prefill_s(3000, 1000)
    assert TOKEN.prefill_batch_s([(300, 0), (500, 9)]) == PLAIN.prefill_batch_s([(300, 0), (500, 9)])
    assert TOKEN.kv_capacity_tokens == PLAIN.kv_capacity_tokens
    assert TOKEN.kv_bytes_per_token == PLAIN.kv_bytes_per_token
    assert TOKEN.onboard_s(1e9, Tier.HOST) == PLAIN.onboard_s(1e9, Tier.HOST)


def test_routers_get_the_price_of_a_token() -> None:
    told, plain = publish(TOKEN, context_length=8192), publish(PLAIN, context_length=8192)
    assert told.decode_step_s < plain.decode_step_s / 2
    assert told.prefill_token_s == plain.prefill_token_s
