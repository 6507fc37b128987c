import pytest

from penstock.core.errors import ConfigError
from penstock.core.types.instances import Role
from penstock.deploy.supervisor.local_part import LocalPart, roles_here
from penstock.graph import Graph, RoleSpec

ROLES = {Role.PREFILL: RoleSpec(engine="mock", replicas=2), Role.DECODE: RoleSpec(engine="mock", replicas=3)}


@pytest.mark.parametrize(
    ("text", "frontends", "replicas"),
    [
        ("frontend", True, {}),
        ("decode", False, {Role.DECODE: 3}),
        ("frontend, prefill=4", True, {Role.PREFILL: 4}),
        ("prefill,decode=0", False, {Role.PREFILL: 2, Role.DECODE: 0}),
    ],
)
def test_a_host_runs_what_is_named(text, frontends, replicas):
    part = LocalPart.parse(text, ROLES)
    assert part.has_frontends is frontends
    assert {role: spec.replicas for role, spec in part.of(ROLES).items()} == replicas


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


def test_a_planner_that_the_graph_does_not_have_is_refused():
    graph = Graph.parse({"model": "demo"}, source="graph")
    assert not LocalPart().plans(graph)
    with pytest.raises(ConfigError, match="--run planner: the graph has no planner"):
        LocalPart.parse("planner", graph.roles.present()).plans(graph)


def test_by_default_a_host_runs_all():
    assert LocalPart().of(ROLES) == ROLES
    assert LocalPart().has_frontends


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("decod", "did you mean 'decode'"),
        ("aggregated", "none of this graph"),
        ("decode=x", "must be ROLE=N"),
        ("decode=-1", "must be ROLE=N"),
        ("frontend=2", "none of this graph"),
        (" , ", "names nothing to run"),
    ],
)
def test_what_is_none_of_the_graph_is_refused(text, error):
    with pytest.raises(ConfigError, match=error):
        LocalPart.parse(text, ROLES)


def many(text, **aggregated):
    described = {"engine": "mock", **aggregated}
    fields = {"model": "demo", "router": {"workers_max": 10**9}, "roles": {"aggregated": described}}
    graph = Graph.parse(fields, source="graph")
    return roles_here(LocalPart.parse(text, graph.roles.present()), graph)[Role.AGGREGATED].replicas


def test_more_workers_than_the_hosts_memory_holds_are_refused_unless_they_are_asked_for():
    with pytest.raises(
        ConfigError,
        match=r"aggregated=9999999: 9,999,999 worker .* set roles.aggregated.replicas_max to start",
    ):
        many("aggregated=9999999")
    assert many("aggregated=9999999", replicas_max=9_999_999) == 9_999_999
    with pytest.raises(ConfigError, match=r"--run aggregated=5: roles.aggregated.replicas_max is 4"):
        many("aggregated=5", replicas_max=4)
    assert many("aggregated=4", replicas_max=4) == 4


def test_more_workers_than_a_router_knows_are_refused():
    graph = Graph.parse({"model": "demo", "roles": {"aggregated": {"engine": "mock"}}}, source="graph")
    part = LocalPart.parse("aggregated=1025", graph.roles.present())
    with pytest.raises(ConfigError, match=r"1,025 workers here, .* at most 1,024 \(router.workers_max\)"):
        roles_here(part, graph)
