"""Whatever workers report, a drift stays bounded; what is constant it finds, from one side only."""

import math
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.core.types.instances import Prices
from penstock.core.types.load import WorkerLoad
from penstock.perf.latency import FACTOR_MAX, FACTOR_MIN, Correction
from penstock.router.workers.price_correction import PriceCorrection

numbers = st.integers(0, 2**62)
any_float = st.floats(allow_nan=True, allow_infinity=True)
loads = st.builds(
    WorkerLoad,
    running_requests=st.integers(0, 3),
    prefilled_tokens=st.integers(0, 1),
    context_tokens=numbers,
    steps=numbers,
    generated_tokens=numbers,
)
prices = st.builds(
    Prices,
    prefill_step_s=any_float,
    prefill_token_s=any_float,
    prefill_pair_s=any_float,
    decode_step_s=any_float,
    decode_sequence_s=any_float,
    decode_token_s=any_float,
)


@given(prices, st.lists(st.tuples(loads, st.floats(0, 1e12))))
def test_no_report_takes_a_factor_out_of_bounds(
    said: Prices, reports: list[tuple[WorkerLoad, float]]
) -> None:
    price_correction, now_s = PriceCorrection(said), 0.0
    for load, passed_s in reports:
        now_s += passed_s
        before = price_correction.factor
        assert price_correction.report(load, now_s) is (price_correction.factor != before)
        assert FACTOR_MIN * (1 - 1e-9) <= price_correction.factor <= FACTOR_MAX * (1 + 1e-9)


@given(
    before=st.floats(0.3, 3.5),
    after=st.floats(0.3, 3.5),
    times=st.integers(3, 200),
)
def test_a_change_is_reached_within_twenty_steps_without_passing_it(
    before: float, after: float, times: int
) -> None:
    correction = Correction()
    for _ in range(times):
        correction.observe(1.0, before)
    assert correction.factor == pytest.approx(before)
    seen = [correction.factor]
    for _ in range(20):
        correction.observe(1.0, after)
        seen.append(correction.factor)
    distances = [abs(math.log(factor / after)) for factor in seen]
    assert all(later <= earlier + 1e-9 for earlier, later in pairwise(distances))
    assert distances[-1] <= 0.01 * distances[0] + 1e-9
