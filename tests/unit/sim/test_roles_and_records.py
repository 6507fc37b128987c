"""Role groups of simulated deployments, and what is recorded of workers that are scaled."""

import pytest

from penstock.core.types.instances import Role
from penstock.graph import RoleSpec
from penstock.perf.model.catalogue import find_shape
from penstock.sim.role_group import plan_role_group


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
