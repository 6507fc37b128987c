"""What is recorded of workers that are scaled."""

import pytest

from penstock.core.types.instances import Role
from penstock.sim.counters import Counters
from penstock.sim.scaling.record import RoleCount, ScalingRecord

A = Role.AGGREGATED


def test_means_and_turns_of_a_record():
    counts = [(0.0, 1, 1), (10.0, 1, 3), (20.0, 3, 3), (30.0, 2, 3), (35.0, 2, 2), (40.0, 2, 3)]
    record = ScalingRecord(counts=[(at_s, {A: RoleCount(ready, present)}) for at_s, ready, present in counts])
    assert record.mean(A, 50.0) == pytest.approx((1 * 20 + 3 * 10 + 2 * 20) / 50)
    assert record.mean(Role.DECODE, 50.0) == 0.0
    assert record.turns == 2, "1, 3, 2, 3"
    assert ScalingRecord().turns == 0
    assert ScalingRecord().mean(A, 0.0) == 0.0


def test_counters_add_up():
    one = Counters(generated_tokens=3, preemptions=1, onboarded_tokens=[1])
    one.failures.update(["lost"])
    other = Counters(generated_tokens=4, received_bytes=7, onboarded_tokens=[2, 5])
    other.failures.update(["lost", "late"])
    one.add(other)
    assert (one.generated_tokens, one.preemptions, one.received_bytes) == (7, 1, 7)
    assert one.failures == {"lost": 2, "late": 1}
    assert one.onboarded_tokens == [3, 5]
