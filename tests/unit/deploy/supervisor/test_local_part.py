"""What of a graph a host runs, where its workers listen, and what it refuses."""

import asyncio
from contextlib import AsyncExitStack

import pytest

from penstock.core.errors import ConfigError
from penstock.core.types.instances import Role
from penstock.deploy.supervisor.local import start_hub, worker_address
from penstock.deploy.supervisor.local_part import LocalPart, roles_here, runnable_roles
from penstock.graph import Graph, RoleSpec, build
from penstock.graph.runtime import RuntimeSpec
from penstock.runtime.handshake import Identity

ROLES = {Role.PREFILL: RoleSpec(engine="mock", replicas=2), Role.DECODE: RoleSpec(engine="mock", replicas=3)}
SPREAD = {"tensor_parallel": 2, "weight_dtype": "bfloat16"}


@pytest.mark.parametrize(
    ("text", "frontends", "replicas"),
    [
        ("frontend", True, {}),
        ("decode", False, {Role.DECODE: 3}),
        ("frontend, prefill=4", True, {Role.PREFILL: 4}),
        ("prefill,decode=0", False, {Role.PREFILL: 2, Role.DECODE: 0}),
    ],
)
def test_a_host_runs_what_is_named_and_by_default_all(text, frontends, replicas):
    part = LocalPart.parse(text, ROLES)
    assert part.has_frontends is frontends
    assert {role: spec.replicas for role, spec in part.of(ROLES).items()} == replicas
    assert LocalPart().of(ROLES) == ROLES
    assert LocalPart().has_frontends


@pytest.mark.parametrize(
    ("text", "runtime", "plans"),
    [
        (None, {}, True),
        (None, {"hub": "tcp://10.0.0.1:7400"}, True),
        (None, {"join": "tcp://10.0.0.1:7400"}, False),
        ("aggregated", {"hub": "tcp://10.0.0.1:7400"}, False),
        ("aggregated", {}, True),
        ("planner", {"join": "tcp://10.0.0.1:7400"}, True),
    ],
)
def test_the_planner_runs_on_the_host_that_names_it_or_has_the_registry(text, runtime, plans):
    planner = {"address": "tcp://10.0.0.1:7410"} if runtime else {}
    graph = Graph.parse({"model": "demo", "planner": planner, "runtime": runtime}, source="graph")
    part = LocalPart() if text is None else LocalPart.parse(text, graph.roles.present())
    assert part.plans(graph) is plans
    assert not LocalPart().plans(build({"model": "demo"}))


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("decod", "did you mean 'decode'"),
        ("aggregated", "is not in the graph"),
        ("decode=x", "must be ROLE=N"),
        ("decode=-1", "must be ROLE=N"),
        ("frontend=2", "is not in the graph"),
        (" , ", "names nothing to run"),
        ("planner", "--run planner: the graph has no planner"),
    ],
)
def test_what_is_none_of_the_graph_is_refused(text, error):
    with pytest.raises(ConfigError, match=error):
        LocalPart.parse(text, ROLES).plans(build({"model": "demo"}))


def many(text, *, workers_max=10**9, **aggregated):
    role = {"engine": "mock", **aggregated}
    graph = build({"model": "demo", "router": {"workers_max": workers_max}, "roles": {"aggregated": role}})
    return roles_here(LocalPart.parse(text, graph.roles.present()), graph)[Role.AGGREGATED].replicas


def test_more_workers_than_a_host_or_a_router_knows_are_refused_unless_they_are_asked_for():
    said = r"aggregated=9999999: 9,999,999 worker .* set roles.aggregated.replicas_max to start"
    with pytest.raises(ConfigError, match=said):
        many("aggregated=9999999")
    assert many("aggregated=9999999", replicas_max=9_999_999) == 9_999_999
    with pytest.raises(ConfigError, match=r"--run aggregated=5: roles.aggregated.replicas_max is 4"):
        many("aggregated=5", replicas_max=4)
    with pytest.raises(ConfigError, match=r"1,025 workers here, .* at most 1,024 \(router.workers_max\)"):
        many("aggregated=1025", workers_max=1024)


def runnable(**role):
    return runnable_roles(build({"model": "demo", "roles": {"aggregated": {"replicas": 1, **role}}}))


def test_a_mock_worker_stands_for_any_number_of_devices():
    roles = runnable(engine="mock", hardware="h100", kv_dtype="fp8", **SPREAD)
    assert roles[Role.AGGREGATED].devices == 2


@pytest.mark.parametrize(
    ("role", "said"),
    [
        ({"engine": "paged", **SPREAD}, "tensor_parallel: must be 1 in this version, got 2"),
        ({"engine": "mock", "replicas": 0}, r"roles.aggregated.replicas: must be >= 1"),
        ({"engine": "mock", "replicas": 1025}, "1,025 workers, but a router knows at most 1,024"),
    ],
)
def test_roles_that_this_machine_does_not_run(role, said):
    with pytest.raises(ConfigError, match=said):
        runnable(**role)


@pytest.mark.parametrize(
    ("fields", "address"),
    [
        ({}, ("", "")),
        ({"listen": "tcp://0.0.0.0:0", "advertise": "gpu-5"}, ("tcp://0.0.0.0:0", "gpu-5")),
        ({"hub": "tcp://10.0.0.1:7400"}, ("tcp://10.0.0.1:0", "")),
        ({"join": "tcp://127.0.0.1:7400"}, ("tcp://127.0.0.1:0", "")),
        ({"join": "tcp://127.0.0.1:7400", "listen": "tcp://10.0.0.5:0"}, ("tcp://10.0.0.5:0", "")),
    ],
)
def test_workers_listen_where_others_reach_them(fields, address):
    assert worker_address(RuntimeSpec(**fields)) == address


@pytest.mark.parametrize("fields", [{"listen": "tcp://0.0.0.0:0"}, {"hub": "tcp://[::]:7400"}])
def test_every_address_is_none_to_register(fields):
    with pytest.raises(ConfigError, match=r"set runtime.advertise"):
        worker_address(RuntimeSpec(**fields))


def test_a_hub_at_the_address_of_another_host_names_join():
    async def start():
        async with AsyncExitStack() as stack:
            spec = RuntimeSpec(hub="tcp://192.0.2.1:7400")
            await start_hub(spec, Identity(secret=b"s" * 16, hash_key=b"k" * 16), "", stack)

    said = r"runtime.hub: tcp://192.0.2.1:7400: cannot listen: .*--join tcp://192.0.2.1:7400"
    with pytest.raises(ConfigError, match=said):
        asyncio.run(start())
