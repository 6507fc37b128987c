"""Each method on series whose next values are known."""

import math
import random
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.planner.forecast.autoregressive import Autoregressive
from penstock.planner.forecast.constant import Constant
from penstock.planner.forecast.ewma import Ewma
from penstock.planner.forecast.forecaster import Forecaster
from penstock.planner.forecast.holt_winters import HoltWinters
from penstock.planner.forecast.kalman import Kalman
from penstock.planner.forecast.selected import standard_methods


def error_of(method: Forecaster, series: Sequence[float], steps: int, skip: int) -> float:
    """Give the mean absolute error of predictions `steps` ahead, after the first `skip` values."""
    errors = []
    for at, value in enumerate(series[:-steps]):
        method.observe(value)
        predicted = method.predict(steps)
        if at >= skip:
            errors.append(abs(predicted - series[at + steps]))
    return sum(errors) / len(errors)


def day(periods: int, period: int = 96, noise: float = 0.05, seed: int = 1) -> list[float]:
    generator = random.Random(seed)
    return [
        (10 + 8 * math.sin(2 * math.pi * at / period)) * (1 + generator.gauss(0, noise))
        for at in range(periods * period)
    ]


@pytest.mark.parametrize("method", [*standard_methods(), HoltWinters(12)], ids=lambda method: method.name)
def test_steady_demand_is_expected_to_stay(method: Forecaster):
    assert error_of(method, [7.0] * 80, steps=4, skip=40) < 0.01


@pytest.mark.parametrize(
    "method", [HoltWinters(), Kalman(), Autoregressive()], ids=lambda method: method.name
)
def test_methods_with_a_trend_expect_growth_to_go_on(method: Forecaster):
    series = [5 + 0.5 * at for at in range(100)]
    assert error_of(method, series, steps=4, skip=40) < 0.7 * error_of(Constant(), series, steps=4, skip=40)


def test_a_season_is_known_from_its_second_period_on():
    series = day(4)
    seasonal = error_of(HoltWinters(96), series, steps=20, skip=96)
    assert seasonal < 0.15 * error_of(Constant(), series, steps=20, skip=96)


def test_a_season_grows_with_demand():
    series = [value * (1 + at / 400) for at, value in enumerate(day(4, noise=0.0))]
    seasonal = error_of(HoltWinters(96), series, steps=20, skip=192)
    assert seasonal < 0.3 * error_of(Constant(), series, steps=20, skip=192)


def test_a_mean_is_steadier_than_the_last_value():
    generator = random.Random(3)
    series = [max(0.0, 10 + generator.gauss(0, 3)) for _ in range(400)]
    last = error_of(Constant(), series, steps=1, skip=40)
    assert error_of(Ewma(0.2), series, steps=1, skip=40) < 0.8 * last
    assert error_of(Kalman(), series, steps=1, skip=40) < 0.9 * last


def test_swings_of_a_few_values_are_learned():
    series = [10 + 5 * math.sin(2 * math.pi * at / 9) for at in range(200)]
    assert error_of(Autoregressive(4), series, steps=3, skip=60) < 0.3


def test_a_jump_is_followed_at_once():
    generator = random.Random(5)
    method = Kalman()
    for _ in range(60):
        method.observe(10 + generator.gauss(0, 0.5))
    method.observe(40)
    method.observe(40)
    predicted = method.predict(1)
    assert 36 < predicted < 48


def test_a_full_outage_and_its_end_leave_no_negative_demand():
    for method in [*standard_methods(12)]:
        for value in [9.0] * 30 + [0.0] * 30 + [9.0] * 30:
            method.observe(value)
            predicted = method.predict(4)
            assert predicted is None or 0 <= predicted < 60, method.name


@given(st.lists(st.floats(0, 1e9), min_size=1, max_size=60), st.integers(1, 40))
def test_predictions_are_finite_and_not_negative(series: list[float], steps: int):
    for method in standard_methods(8):
        for value in series:
            method.observe(value)
        predicted = method.predict(steps)
        assert predicted is None or (math.isfinite(predicted) and predicted >= 0), method.name


def test_no_values_predict_nothing():
    assert [method.predict(3) for method in standard_methods(8)] == [None] * 6


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Ewma(0), "weight is 0"),
        (lambda: HoltWinters(1), "period is 1"),
        (lambda: Autoregressive(9, window=20), "order is 9 and window 20"),
        (lambda: Kalman(0), "wander is 0"),
    ],
)
def test_parameters_without_sense_are_refused(make: object, message: str):
    with pytest.raises(ValueError, match=message):
        make()  # type: ignore[operator]
