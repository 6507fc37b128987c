"""A correction finds a constant ratio, from one side only."""

import math
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.perf.latency import Correction


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
