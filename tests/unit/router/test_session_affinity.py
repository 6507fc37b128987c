"""Sessions: they stay with their worker, move with it gone, and are forgotten in time and number."""

import numpy as np

from penstock.router.policies import SessionAffinity, choose
from penstock.router.predicted_seconds import PredictedSeconds
from penstock.router.selector import WorkerSelector
from penstock.seams import ExplainedPolicy
from penstock.testing.routing_policy import make_context

IDS = [11, 12, 13]


def send(policy: SessionAffinity, session: str | None, now_s: float = 0.0, **columns: object) -> int:
    """Route one request; returns the slot it went to."""
    context = make_context(**{"worker_ids": IDS, "session": session, "now_s": now_s} | columns)
    slot = choose(policy.costs(context), context.eligible, 0)
    assert slot is not None
    policy.chosen(context, slot)
    policy.check()
    return slot


def test_a_session_stays_whatever_the_load():
    policy = SessionAffinity()
    assert send(policy, "a", running_requests=[5, 0, 5]) == 1
    assert send(policy, "a", running_requests=[0, 99, 0]) == 1
    assert send(policy, "b", running_requests=[0, 99, 9]) == 0
    assert send(policy, None, running_requests=[9, 99, 0]) == 2


def test_it_moves_for_good_when_its_worker_is_not_eligible():
    policy = SessionAffinity()
    assert send(policy, "a", running_requests=[0, 1, 1]) == 0
    assert send(policy, "a", eligible=[False, True, True], running_requests=[0, 2, 1]) == 2
    assert send(policy, "a", running_requests=[0, 1, 9]) == 2


def test_a_slot_with_another_worker_in_it_is_another_worker():
    policy = SessionAffinity()
    assert send(policy, "a", running_requests=[0, 1, 1]) == 0
    assert send(policy, "a", worker_ids=[14, 12, 13], running_requests=[9, 1, 2]) == 1


def test_it_is_kv_with_one_more_term_that_makes_others_dearer():
    policy, kv = SessionAffinity(), PredictedSeconds()
    assert isinstance(policy, ExplainedPolicy)
    send(policy, "a", running_requests=[1, 0, 1])
    context = make_context(worker_ids=IDS, session="a", running_requests=[0, 99, 0])
    terms, plain = policy.terms(context), kv.terms(context)
    np.testing.assert_array_equal(terms[:-1], plain)
    session = dict(zip(policy.term_names, terms, strict=True))["session"]
    assert session[1] == 0, "its worker costs what kv says: disaggregation is held against that"
    assert min(session[0], session[2]) > 0
    assert policy.costs(context).argmin() == 1
    stranger = make_context(worker_ids=IDS, session="b", running_requests=[0, 99, 0])
    np.testing.assert_array_equal(policy.costs(stranger), kv.costs(stranger))


def test_it_predicts_waits_and_prompts_as_kv_does():
    ours, kv = WorkerSelector(SessionAffinity()), WorkerSelector(PredictedSeconds())
    assert ours.wait_terms == kv.wait_terms
    assert ours.wait_terms
    assert ours.prefill_term == kv.prefill_term
    assert ours.unit == "ms"
