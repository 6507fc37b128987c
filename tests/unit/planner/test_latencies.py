"""What measured latencies tell: a correction of predictions, whose requests were late, and what few samples say."""

import random

import pytest

from penstock.planner.demand import SloTargets, missed, missed_quantile, surely_above
from penstock.planner.estimator import LatencyFactor
from penstock.planner.observation import ObservedDemand
from penstock.runtime.observations import Digest, DigestRecorder, bucket_of


@pytest.mark.parametrize("ratio", [0.9, 1.0, 1.4])
def test_the_ratio_is_learned_within_a_few_percent(ratio):
    found = LatencyFactor(1.15)
    for step in range(200):
        noise = 1.15 if step % 2 else 1 / 1.15
        found.learn(0.02 * ratio * noise, 500, 0.02, 0.025)
    assert found.value == pytest.approx(ratio, rel=0.06)


@pytest.mark.parametrize(
    ("measured_s", "count", "predicted_s"),
    [(None, 0, 0.02), (0.1, 10, 0.02), (0.1, 500, None), (0.1, 500, 0.005)],
    ids=["no request", "few requests", "overloaded", "idle"],
)
def test_what_tells_nothing_of_the_model_is_not_learned(measured_s, count, predicted_s):
    found = LatencyFactor(1.15)
    for _ in range(100):
        found.learn(measured_s, count, predicted_s, 0.025)
    assert found.value == 1.15


SLO = SloTargets(ttft_s=1.0, itl_s=0.1, percentile=90.0)


def recorded(*values):
    recorder = DigestRecorder()
    for value, count in values:
        recorder.add(value, count)
    return recorder.take()


def found(prefill, decode, itl=()):
    """Give what is missed; `prefill` and `decode` are (TTFT, how many) of requests that waited for them."""
    return missed(
        ObservedDemand(
            ttft_s=recorded(*prefill, *decode), decode_ttft_s=recorded(*decode), itl_s=recorded(*itl)
        ),
        SLO,
    )


def test_late_requests_count_for_the_workers_that_they_waited_for():
    ttft_s, decode_ttft_s, itl_s = found([(0.3, 50)], [(3.0, 50)])
    assert (ttft_s, itl_s) == (None, None)
    assert decode_ttft_s == pytest.approx(3.0, rel=0.05)
    ttft_s, decode_ttft_s, itl_s = found([(3.0, 50)], [(0.3, 50)], itl=[(0.2, 100)])
    assert (ttft_s, itl_s) == (pytest.approx(3.0, rel=0.05), pytest.approx(0.2, rel=0.05))
    assert decode_ttft_s is None


@pytest.mark.parametrize(("prefill", "decode", "late"), [(13, 16, 1), (16, 13, 0)])
def test_a_target_that_only_both_together_miss_counts_for_the_later_ones(prefill, decode, late):
    values = found([(0.3, 42), (3.0, prefill)], [(0.3, 42), (3.0, decode)])[:2]
    assert values[late] == pytest.approx(3.0, rel=0.05)
    assert values[1 - late] is None


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


def test_a_rate_is_above_another_beyond_chance():
    assert not surely_above(0.5, 10.0, 0.0), "five requests"
    assert surely_above(2.0, 10.0, 0.0)
    assert not surely_above(13.5, 10.0, 10.0)
    assert surely_above(15.0, 10.0, 10.0)
    assert not surely_above(22.0, 10.0, 10.0, spread=10.0), "ten requests of a size, as far as chance goes"
    assert surely_above(45.0, 10.0, 10.0, spread=10.0)
