"""Damped numbers of replicas at given times, and roles that exchange workers during their cool-down."""

from hypothesis import given
from hypothesis import strategies as st

from penstock.core.types.instances import Role
from penstock.planner.damping import Damper, DamperConfig, Damping

A, P, D = Role.AGGREGATED, Role.PREFILL, Role.DECODE


@given(steps=st.lists(st.tuples(st.floats(0, 500), st.integers(0, 40)), max_size=30))
def test_bounds_are_kept_and_the_most_of_the_cool_down_stays(steps):
    damper = Damper(DamperConfig(replicas_min=2, replicas_max=9, cool_down_s=300))
    now_s, have = 0.0, 2
    held: list[tuple[float, int]] = []  # until when so many were wanted
    begun_s = None
    for wait_s, wanted in steps:
        now_s += wait_s
        begun_s = now_s if begun_s is None else begun_s
        held = [(now_s if until_s is None else until_s, count) for until_s, count in held]
        clamped = min(max(wanted, 2), 9)
        held.append((None, clamped))
        target = damper.damp(now_s, have, wanted)
        lately = [count for until_s, count in held if until_s is None or now_s - until_s < 300]
        assert clamped <= target <= 9
        if target < have:
            assert now_s - begun_s >= 300
            assert target == max(lately)
        elif clamped < have:
            assert target == have
            assert now_s - begun_s < 300 or max(lately) >= have
        have = target


def test_a_decrease_goes_to_the_most_that_was_wanted_meanwhile():
    damper = Damper(DamperConfig(cool_down_s=100))
    assert damper.damp(0, 5, 3) == 5
    assert damper.cools_for_s(40) == 60
    assert damper.damp(100, 5, 3) == 3
    assert damper.damp(105, 5, 2) == 3, "the retired worker waits for others"
    assert damper.damp(110, 3, 2) == 3, "3 were wanted until 105 s"
    assert damper.cools_for_s(110) == 95
    assert damper.damp(120, 5, 4) == 4, "more is wanted meanwhile"
    assert damper.damp(205, 4, 2) == 4, "4 were wanted until now"
    assert damper.damp(305, 4, 2) == 2


def test_a_cool_down_is_as_long_as_a_start_at_least():
    damper = Damper(DamperConfig(cool_down_s=100))
    assert damper.damp(0, 6, 6, 300) == 6
    assert damper.damp(150, 6, 2, 300) == 6
    assert damper.cools_for_s(150, 300) == 300
    assert damper.damp(449, 6, 2, 300) == 6
    assert damper.damp(451, 6, 2, 300) == 2


def damping(**settings):
    config = DamperConfig(**{"cool_down_s": 100, "replicas_max": 8, **settings})
    return Damping({P: config, D: config}, flip_again_s=30)


def test_a_surplus_takes_the_role_that_lacks_workers():
    found = damping().damp(0, {P: 1, D: 5}, {P: 3, D: 2})
    assert found.target == {P: 3, D: 3}
    assert found.why == (
        "decode: 2 wanted, 3 kept for 100 s of cool-down",
        "decode: 2 may become prefill during the cool-down",
    )
