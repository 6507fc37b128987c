"""Corrections follow a drifting worker without oscillating, and distrust a model that does not fit."""

import random

import pytest

from penstock.perf.hardware import find_hardware
from penstock.perf.online import FACTOR_MAX, CorrectedModel, Correction
from penstock.perf.roofline import Roofline
from penstock.perf.shape import shape_of

LLAMA_8B = {
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "num_hidden_layers": 32,
    "vocab_size": 128256,
}


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


def test_one_outlier_changes_nothing() -> None:
    correction = Correction()
    for _ in range(10):
        correction.observe(1.0, 1.0)
    correction.observe(1.0, 100.0)
    assert correction.factor == pytest.approx(1.0)


def test_clamped_and_distrusted() -> None:
    correction = Correction()
    for _ in range(50):
        correction.observe(1.0, 1000.0)
    assert correction.factor == pytest.approx(FACTOR_MAX)
    assert not correction.trusted
    correction.observe(0.0, 1.0)
    correction.observe(1.0, -1.0)
    assert correction.observations == 50


def test_prefill_and_decode_are_corrected_apart() -> None:
    base = Roofline(shape_of(LLAMA_8B, name="8b"), find_hardware("h100"))
    model = CorrectedModel(base)
    for _ in range(30):
        model.observe_step([(4096, 0)], 0, 0, 2 * base.prefill_s(4096))
        model.observe_step((), 16, 16_000, base.decode_step_s(16, 16_000))
    assert model.prefill_s(1000) == pytest.approx(2 * base.prefill_s(1000), rel=0.01)
    assert model.decode_step_s(8, 9000) == pytest.approx(base.decode_step_s(8, 9000), rel=0.01)
    mixed, plain = model.mixed_step_s([(512, 0)], 8, 8000), base.mixed_step_s([(512, 0)], 8, 8000)
    assert plain < mixed < 2 * plain
    assert model.trusted
