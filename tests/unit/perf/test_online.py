"""Corrections follow a drifting worker without oscillating, and distrust a model that does not fit."""

import random

import pytest

from penstock.perf.online import FACTOR_MAX, Correction


def test_a_worker_twice_as_slow_is_tracked_within_20_steps() -> None:
    correction = Correction()
    for _ in range(50):
        correction.observe(0.010, 0.010)
    seen = []
    for _ in range(20):
        correction.observe(0.010, 0.020)
        seen.append(correction.factor)
    assert seen[-1] == pytest.approx(2.0, rel=0.05)
    assert seen == sorted(seen), "it moves one way only"
    assert max(seen) <= 2.0


def test_noise_stays_small() -> None:
    rng = random.Random(1)
    correction = Correction()
    factors = []
    for step in range(400):
        correction.observe(0.010, 0.010 * (2.0 if step >= 200 else 1.0) * rng.lognormvariate(0, 0.1))
        factors.append(correction.factor)
    assert all(abs(f - 1) < 0.15 for f in factors[20:200])
    assert all(abs(f / 2 - 1) < 0.15 for f in factors[220:])
    assert correction.trusted


def test_clamped_and_distrusted() -> None:
    correction = Correction()
    for _ in range(50):
        correction.observe(1.0, 1000.0)
    assert correction.factor == pytest.approx(FACTOR_MAX)
    assert not correction.trusted
    for predicted_s, measured_s in ((0.0, 1.0), (1.0, -1.0), (float("nan"), 1.0), (float("inf"), 1.0)):
        correction.observe(predicted_s, measured_s)
    assert correction.observations == 50
