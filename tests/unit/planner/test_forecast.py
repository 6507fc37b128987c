"""Each method on series whose next values are known, the choice between them, and the band."""

import itertools
import math
import random
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.planner.forecast import Ewma, Forecaster, HoltWinters, SelectedForecast, standard_methods


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


def error_of_last_value(series: Sequence[float], steps: int, skip: int) -> float:
    """Give the same error of a method that expects each value to stay."""
    pairs = list(zip(series, series[steps:], strict=False))[skip:]
    return sum(abs(later - now) for now, later in pairs) / len(pairs)


def test_a_method_with_a_trend_expects_growth_to_go_on():
    series = [5 + 0.5 * at for at in range(100)]
    trend = error_of(HoltWinters(), series, steps=4, skip=40)
    assert trend < 0.7 * error_of_last_value(series, steps=4, skip=40)


def test_a_season_is_known_from_its_second_period_on():
    series = day(4)
    seasonal = error_of(HoltWinters(96), series, steps=20, skip=96)
    assert seasonal < 0.15 * error_of_last_value(series, steps=20, skip=96)


@given(st.lists(st.floats(0, 1e9), min_size=1, max_size=60), st.integers(1, 40))
def test_predictions_are_finite_and_not_negative(series: list[float], steps: int):
    for method in standard_methods(8):
        for value in series:
            method.observe(value)
        predicted = method.predict(steps)
        assert predicted is None or (math.isfinite(predicted) and predicted >= 0), method.name


def test_the_season_is_chosen_once_it_has_proved_better():
    generator = random.Random(2)
    selected = SelectedForecast(standard_methods(96), horizon=12)
    names = []
    for at in range(5 * 96):
        selected.observe((10 + 8 * math.sin(2 * math.pi * at / 96)) * (1 + generator.gauss(0, 0.05)))
        forecast = selected.forecast()
        names.append(forecast.method)
    assert names[0] == "ewma 0.3"
    assert names[-1] == "holt-winters 96"


@pytest.mark.parametrize("level", [4.0, 60.0])
def test_nine_in_ten_values_stay_below_the_upper_edge(level: float):
    generator = random.Random(11)
    selected = SelectedForecast(standard_methods(), horizon=1, band=0.8)
    below = above_low = seen = 0
    for at in range(1000):
        value = max(0.0, generator.gauss(level, math.sqrt(level)))
        forecast = selected.forecast()
        if at > 200:
            seen += 1
            below += value <= forecast.high
            above_low += value >= forecast.low
        selected.observe(value)
    assert 0.85 < below / seen < 0.95
    assert 0.85 < above_low / seen < 0.95


def test_the_peak_on_the_way_counts():
    """Within a horizon of twelve, the season's peak comes before its end."""
    selected = SelectedForecast(standard_methods(24), horizon=12)
    for at in range(24 * 20):
        selected.observe(10 + 9 * math.sin(2 * math.pi * at / 24))
    # The series stands at its mean and rises; twelve intervals on it is back there.
    forecast = selected.forecast()
    assert forecast.mean > 15


def test_noise_is_averaged_and_methods_do_not_alternate():
    generator = random.Random(7)
    selected = SelectedForecast(standard_methods(), horizon=4)
    names = []
    for _ in range(400):
        selected.observe(max(0.0, generator.gauss(20, 5)))
        forecast = selected.forecast()
        names.append(forecast.method)
    assert names[-1] == Ewma(0.3).name
    changes = sum(before != after for before, after in itertools.pairwise(names))
    assert changes <= 6
