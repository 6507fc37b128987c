"""How long a load from another worker is waited for: long enough for what was predicted, and less than computing would take."""

import pytest

from penstock.kv.manager.worth import PEER_MARGIN, late_after_s, peer_late_after_s


@pytest.mark.parametrize(
    ("load_s", "compute_s", "late_s"),
    [
        (0.4, 1.0, 0.6),  # half as long again as was predicted
        (0.1, 1.0, 0.25),  # a quarter of computing
        (0.01, 0.1, 0.05),  # where that is a few milliseconds, what processes wait for each other
        (0.001, 0.02, 0.02),  # at most until computing would have been done
    ],
)
def test_a_load_is_given_up_by_what_computing_would_have_taken(load_s, compute_s, late_s):
    assert peer_late_after_s(load_s, compute_s) == pytest.approx(late_s)


@pytest.mark.parametrize("compute_s", [0.01, 0.1, 1.0, 60.0])
def test_a_load_that_is_worth_it_has_the_time_that_was_predicted_and_costs_less_than_computing(compute_s):
    for share in (0.0, 0.1, 0.5, 0.99):
        load_s = share * compute_s / PEER_MARGIN
        assert load_s <= peer_late_after_s(load_s, compute_s) <= compute_s


def test_before_any_prompt_was_computed_a_load_is_late_as_any_other():
    assert peer_late_after_s(0.1, None) == late_after_s(0.1)
