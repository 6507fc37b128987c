"""Whose late requests they are: a TTFT is charged to the workers that its requests waited for."""

import pytest

from penstock.planner.estimate.missed import missed
from penstock.planner.estimate.slo import Slo
from penstock.planner.observe.observation import Demand
from penstock.runtime.observations.digest_recorder import DigestRecorder

SLO = Slo(ttft_s=1.0, itl_s=0.1, percentile=90.0)


def digest(*values):
    recorder = DigestRecorder()
    for value, count in values:
        recorder.add(value, count)
    return recorder.take()


def found(prefill, decode, itl=()):
    """Give what is missed; `prefill` and `decode` are (TTFT, how many) of requests that waited for them."""
    return missed(
        Demand(ttft_s=digest(*prefill, *decode), decode_ttft_s=digest(*decode), itl_s=digest(*itl)), SLO
    )


def test_late_requests_count_for_the_workers_that_they_waited_for():
    ttft_s, decode_ttft_s, itl_s = found([(0.3, 50)], [(3.0, 50)])
    assert (ttft_s, itl_s) == (None, None)
    assert decode_ttft_s == pytest.approx(3.0, rel=0.05)
    ttft_s, decode_ttft_s, itl_s = found([(3.0, 50)], [(0.3, 50)], itl=[(0.2, 100)])
    assert (ttft_s, itl_s) == (pytest.approx(3.0, rel=0.05), pytest.approx(0.2, rel=0.05))
    assert decode_ttft_s is None


def test_a_few_late_ones_of_many_miss_nothing():
    assert found([(0.3, 180)], [(3.0, 20)]) == (None, None, None), "a tenth may be late"


@pytest.mark.parametrize(("prefill", "decode", "late"), [(13, 16, 1), (16, 13, 0)])
def test_a_target_that_only_both_together_miss_counts_for_the_later_ones(prefill, decode, late):
    values = found([(0.3, 42), (3.0, prefill)], [(0.3, 42), (3.0, decode)])[:2]
    assert values[late] == pytest.approx(3.0, rel=0.05)
    assert values[1 - late] is None


def test_without_a_decode_role_the_workers_have_them_all():
    assert found([(3.0, 50)], []) == (pytest.approx(3.0, rel=0.05), None, None)
    assert found([], []) == (None, None, None)
