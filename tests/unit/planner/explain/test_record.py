"""A round in words."""

from penstock.core.types.instances import Role
from penstock.planner.explain.record import DecisionRecord, Seen


def test_a_worker_that_is_replaced_as_it_was_not_ready_is_named_with_the_reason():
    record = DecisionRecord(
        number=1,
        at_s=0.0,
        seen=Seen(seconds=10.0),
        adds={Role.DECODE: 1},
        retires=("decode-2",),
        overdue=("decode-2",),
        damped=("decode: 3 wanted, at most 2 allowed",),
    )
    assert record.explain() == (
        "1 decode more, decode-2 retires: decode-2 was not ready in time; decode: 3 wanted, at most 2 allowed"
    )
