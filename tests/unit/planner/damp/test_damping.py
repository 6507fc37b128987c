"""Roles that exchange workers during their cool-down."""

from penstock.core.types.instances import Role
from penstock.planner.damp.damper import DamperConfig
from penstock.planner.damp.damping import Damping

A, P, D = Role.AGGREGATED, Role.PREFILL, Role.DECODE


def damping(**settings):
    config = DamperConfig(**{"cool_down_s": 100, "replicas_max": 8, **settings})
    return Damping({P: config, D: config}, flip_again_s=30)


def test_a_surplus_takes_the_role_that_lacks_workers():
    found = damping().damp(0, {P: 1, D: 5}, {P: 3, D: 2})
    assert found.target == {P: 3, D: 3}
    assert (
        found.why
        == (
            "decode: 2 wanted, 3 kept for 100 s of cool-down",
            "decode: 2 may become prefill during the cool-down",
        )
        or "decode: 2 may become prefill during the cool-down" in found.why
    )


def test_no_more_change_roles_than_are_spare_or_lack():
    assert damping().damp(0, {P: 1, D: 3}, {P: 5, D: 2}).target == {P: 5, D: 2}
    assert damping(replicas_min=3).damp(0, {P: 3, D: 3}, {P: 5, D: 1}).target == {P: 5, D: 3}


def test_workers_go_back_after_a_while_only():
    both = damping()
    assert both.damp(0, {P: 1, D: 3}, {P: 2, D: 2}).target == {P: 2, D: 2}
    assert both.damp(10, {P: 2, D: 2}, {P: 1, D: 3}).target == {P: 2, D: 3}
    assert both.damp(31, {P: 2, D: 2}, {P: 1, D: 3}).target == {P: 1, D: 3}


def test_roles_that_cannot_be_changed_wait_for_the_cool_down():
    found = damping().damp(0, {P: 1, D: 3}, {P: 2, D: 2}, may_flip=lambda _one, _other: False)
    assert found.target == {P: 2, D: 3}


def test_a_worker_is_given_to_one_role_only():
    bounds = DamperConfig(cool_down_s=100, replicas_min=0)
    three = Damping({A: bounds, P: bounds, D: bounds})
    four = {A: 4, P: 0, D: 0}
    assert three.damp(0, four, {A: 2, P: 0, D: 0}).target == four
    assert three.damp(100, four, {A: 2, P: 0, D: 0}).target == {A: 2, P: 0, D: 0}
    found = three.damp(105, four, {A: 0, P: 2, D: 2})
    assert found.target == {A: 0, P: 2, D: 2}, "two leave anyway, and two more are needed"


def test_nothing_is_exchanged_where_a_decrease_is_free_anyway():
    both = damping(cool_down_s=0)
    found = both.damp(0, {P: 1, D: 3}, {P: 2, D: 2})
    assert (found.target, found.why) == ({P: 2, D: 2}, ())
