"""Which roles this machine runs: a mock worker stands for any number of devices, a real one has one."""

import pytest

from penstock.core.errors import ConfigError
from penstock.core.types.instances import Role
from penstock.deploy.supervisor.local_part import runnable_roles
from penstock.graph import build

SPREAD = {"tensor_parallel": 2, "weight_dtype": "bfloat16"}


def graph(**role):
    return build({"model": "demo", "roles": {"aggregated": {"replicas": 1, **role}}})


def test_a_mock_worker_of_any_parallelism_runs():
    roles = runnable_roles(graph(engine="mock", hardware="h100", kv_dtype="fp8", **SPREAD))
    assert roles[Role.AGGREGATED].devices == 2


def test_a_paged_worker_has_one_device():
    with pytest.raises(ConfigError, match="tensor_parallel: must be 1 in this version, got 2"):
        runnable_roles(graph(engine="paged", **SPREAD))


def test_something_has_to_run():
    with pytest.raises(ConfigError, match=r"roles.aggregated.replicas: must be >= 1"):
        runnable_roles(graph(engine="mock", replicas=0))


def test_no_more_workers_start_than_a_router_knows():
    with pytest.raises(
        ConfigError, match=r"roles.aggregated.replicas: 1,025 workers, but a router knows at most 1,024"
    ):
        runnable_roles(graph(engine="mock", replicas=1025))
