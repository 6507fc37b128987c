"""Waits of roles whose starts fail."""

from penstock.core.types.instances import Role
from penstock.planner.act.start_backoff import StartBackoff

A, D = Role.AGGREGATED, Role.DECODE


def fail(backoff, at_s, *, begun_s=None, role=A):
    backoff.note_failure(role, begun_s=at_s if begun_s is None else begun_s, now_s=at_s, deadline_s=60)
    return backoff.wait_s(role, at_s)


def test_starts_that_began_together_are_one_failure():
    backoff = StartBackoff(wait_s_max=400)
    fail(backoff, 60, begun_s=0)
    fail(backoff, 65, begun_s=5)
    fail(backoff, 70, begun_s=0)
    assert backoff.failures(A) == 1
    assert fail(backoff, 140, begun_s=61) == 60


def test_a_success_after_the_last_failure_of_a_role_ends_its_wait():
    backoff = StartBackoff(wait_s_max=400)
    fail(backoff, 60)
    assert fail(backoff, 200) == 60
    assert backoff.wait_s(D, 200) == 0, "roles wait for themselves"
    backoff.note_success(A, ready_at_s=150)
    backoff.note_success(D, ready_at_s=300)
    assert backoff.failures(A) == 2, "it was ready before"
    backoff.note_success(A, ready_at_s=201)
    assert (backoff.failures(A), backoff.wait_s(A, 202)) == (0, 0)
