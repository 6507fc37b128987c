"""Damped numbers of replicas, at given times."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.core.errors import ConfigError
from penstock.core.types.instances import Role
from penstock.planner.damp.damper import Damper, DamperConfig
from penstock.planner.damp.warm import warm
from penstock.planner.observe.observation import WorkerView
from penstock.runtime.observations.windows import Digest


@given(steps=st.lists(st.tuples(st.floats(0, 500), st.integers(0, 40)), max_size=30))
def test_bounds_and_cool_down_are_kept(steps):
    damper = Damper(DamperConfig(replicas_min=2, replicas_max=9, cool_down_s=300))
    now_s, changed_s, have = 0.0, None, 2
    for wait_s, wanted in steps:
        now_s += wait_s
        changed_s = now_s if changed_s is None else changed_s
        target = damper.damp(now_s, have, wanted)
        assert 2 <= target <= 9
        assert target >= min(wanted, 9)
        if target < have:
            assert now_s - changed_s >= 300
        if target != have:
            changed_s, have = now_s, target


def test_a_small_decrease_is_ignored():
    damper = Damper(DamperConfig(cool_down_s=0, hysteresis=1))
    assert damper.damp(0, 5, 4) == 5
    assert damper.damp(1, 5, 3) == 3
    assert damper.damp(2, 3, 4) == 4


def test_more_than_the_bound_is_reduced_at_once():
    assert Damper(DamperConfig(replicas_max=4)).damp(0, 9, 9) == 4


def test_a_decrease_that_has_begun_goes_on_until_it_is_done():
    damper = Damper(DamperConfig(cool_down_s=100))
    assert damper.damp(0, 5, 3) == 5
    assert damper.damp(100, 5, 3) == 3
    assert damper.damp(105, 5, 2) == 3, "the retired worker waits for others"
    assert damper.damp(110, 3, 2) == 3, "a further decrease waits for the cool-down"
    assert damper.damp(120, 5, 4) == 5, "more is wanted meanwhile"


def test_samples_of_cold_workers_are_masked():
    old = WorkerView("a", Role.DECODE, 60.0, Digest(), 0, 0, 0, 0, 0, 0, 0, 0)
    assert warm([old, replace(old, name="b", ready_s=5.0)], 30.0) == (old,)


@pytest.mark.parametrize(
    "settings", [{"replicas_min": 5, "replicas_max": 4}, {"cool_down_s": -1}, {"hysteresis": -1}]
)
def test_bad_settings_are_refused(settings):
    with pytest.raises(ConfigError, match="expected"):
        DamperConfig(**settings)
