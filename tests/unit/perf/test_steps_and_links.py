"""All-reduces by their size, beside those measured on hardware that nothing was fitted to; speculation by steps of one token each."""

import json
import statistics
from pathlib import Path
from typing import Any

import pytest

from penstock.core.types.events import Tier
from penstock.perf.hardware import find_hardware
from penstock.perf.latency import publish
from penstock.perf.model_config import find_shape
from penstock.perf.model_shape import Parallel
from penstock.perf.roofline import Collectives, Factors, Roofline, price_per_token

TABLES = json.loads((Path(__file__).parents[2] / "data" / "all_reduce_tables.json").read_text())


def collectives(system: str, tp: int, factors: Factors) -> Collectives:
    return Collectives(find_hardware(system), factors, Parallel(tp=tp), hidden=8192, row_bytes=16_384.0)


@pytest.mark.parametrize(
    "table",
    [table for table in TABLES if table["system"] != "h100_sxm"],
    ids=lambda t: f"{t['system']}-{t['backend']}-tp{t['tp']}",
)
def test_measured_all_reduces_of_other_hardware(table: dict[str, Any]) -> None:
    """vLLM's on two GB200 take twice as long as TensorRT-LLM's, which the form has no room for: the median alone tells."""
    model = collectives(table["system"], table["tp"], Factors())
    found = {int(size): 1e-6 * us for size, us in table["all_reduce_us"].items()}
    errors = [abs(model.all_reduce_s(size / 16_384) / seconds - 1) for size, seconds in found.items()]
    assert statistics.median(errors) < 0.5, errors
    if (table["system"], table["backend"]) != ("gb200", "vllm"):
        assert statistics.median(errors) < 0.35, errors
        assert max(errors) < 0.6, errors


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
