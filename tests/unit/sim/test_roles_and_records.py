"""Role groups of simulated deployments, and what is recorded of workers that are scaled."""

import pytest

from penstock.core.types.instances import Role
from penstock.graph import RoleSpec
from penstock.perf.model.catalogue import find_shape
from penstock.sim.counters import Counters
from penstock.sim.role_group import plan_role_group
from penstock.sim.scaling.record import RoleCount, ScalingRecord


@pytest.mark.parametrize(
    ("size", "locations", "share"),
    [
        ("40GiB", [], 1),
        ("40GiB", [{"rack": "r1"}], 1),
        ("40GiB", [{"host": "node-1"}], 4),
        ("40GiB", [{"host": "node-1"}, {"host": "node-2"}], 2),
        ("5x", [{"host": "node-1"}], 1),
    ],
)
def test_workers_of_a_named_host_divide_its_bytes(size, locations, share):
    def blocks(locations):
        spec = RoleSpec.model_validate(
            {
                "engine": "mock",
                "hardware": "h100",
                "replicas": 4,
                "kv": {"host": size},
                "locations": locations,
            }
        )
        group = plan_role_group(
            Role.AGGREGATED, spec, find_shape("llama-3.1-8b"), block_size=64, engine_profile=None
        )
        (tier,) = group.lower_tiers
        return tier.num_blocks

    assert blocks(locations) == blocks([]) // share


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
