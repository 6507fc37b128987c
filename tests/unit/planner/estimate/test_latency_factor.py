"""Measured latencies over predicted ones."""

import pytest

from penstock.planner.estimate.latency_factor import LatencyFactor


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
