"""The search for the largest rate."""

import math

import pytest

from penstock.plan.trial import largest_rate


def search(limit, start, **options):
    tried = []

    def is_kept(rate):
        tried.append(rate)
        return rate <= limit

    return largest_rate(is_kept, start, **{"step": 1.3, "precision": 0.03} | options), tried


@pytest.mark.parametrize("start", [0.5, 9.0, 10.0, 11.0, 300.0])
def test_it_is_found_from_any_start(start):
    (low, high), tried = search(10.0, start)
    assert 10.0 / 1.03 <= low <= 10.0 < high <= low * 1.03
    assert len(set(tried)) == len(tried) < 25


def test_trials_are_steps_and_then_geometric_means():
    assert search(10.0, 8.0, step=2.0, precision=0.5) == ((8.0, math.sqrt(128)), [8.0, 16.0, math.sqrt(128)])


def test_a_known_rate_is_not_tried_and_is_the_least_result():
    (low, _), tried = search(10.0, 8.4, known_per_s=8.0, step=1.05)
    assert 10.0 / 1.03 <= low <= 10.0
    assert min(tried) == 8.4
    assert search(1.0, 8.4, known_per_s=8.0, step=1.05)[0].low == 8.0


def test_no_rate_outside_the_limits_is_tried():
    (low, high), tried = search(0.0, 8.0, least_per_s=1.0)
    assert (low, high) == (0.0, min(tried))
    assert 1.0 < min(tried) < 1.3
    (low, high), tried = search(math.inf, 8.0, most_per_s=100.0)
    assert (low, high) == (max(tried), math.inf)
    assert 100 / 1.3 <= max(tried) < 100
