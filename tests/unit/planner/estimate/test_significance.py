"""What few samples say, against sampled cases."""

import random

import pytest

from penstock.planner.estimate.significance import missed_quantile, surely_above
from penstock.runtime.observations.windows import Digest, bucket_of


def digest(values):
    buckets = {}
    for value in values:
        buckets[bucket_of(value)] = buckets.get(bucket_of(value), 0) + 1
    return Digest(count=len(values), total=sum(values), buckets=buckets)


@pytest.mark.parametrize(("count", "share"), [(20, 0.1), (200, 0.1), (500, 0.01)])
def test_an_slo_that_is_just_met_is_hardly_ever_missed(count, share):
    rng = random.Random(1)
    target = 1.0
    found = [
        missed_quantile(
            digest([3.0 if rng.random() < share else 0.3 for _ in range(count)]), target, 100 * (1 - share)
        )
        for _ in range(400)
    ]
    assert sum(value is not None for value in found) <= 3, "one of 400, and some chance"


@pytest.mark.parametrize(("count", "share"), [(20, 0.1), (500, 0.01)])
def test_an_slo_that_is_clearly_missed_is_noticed(count, share):
    values = [3.0] * max(round(4 * share * count), 1) + [0.3] * round((1 - 4 * share) * count)
    assert missed_quantile(digest(values), 1.0, 100 * (1 - share)) == pytest.approx(3.0, rel=0.1)


def test_the_worst_of_few_requests_is_not_their_percentile():
    """Of a hundred requests the 99th percentile is the worst one; what it surely is, is what several exceed."""
    values = [0.3] * 90 + [1.2] * 9 + [40.0]
    assert digest(values).quantile(0.995) > 30
    assert missed_quantile(digest(values), 1.0, 99.0) == pytest.approx(1.2, rel=0.1)


def test_one_slow_request_says_nothing_and_no_request_neither():
    assert missed_quantile(digest([9.0]), 1.0, 90.0) is None
    assert missed_quantile(Digest(), 1.0, 90.0) is None


def test_a_rate_is_above_another_beyond_chance():
    assert not surely_above(0.5, 10.0, 0.0), "five requests"
    assert surely_above(2.0, 10.0, 0.0)
    assert not surely_above(13.5, 10.0, 10.0)
    assert surely_above(15.0, 10.0, 10.0)
    assert not surely_above(22.0, 10.0, 10.0, spread=10.0), "ten requests of a size, as far as chance goes"
    assert surely_above(45.0, 10.0, 10.0, spread=10.0)
