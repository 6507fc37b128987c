import pytest

from penstock.core.types.instances import Prices
from penstock.perf.step_size import saturating_tokens


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
