"""What differs between two graphs, what is done about it, and what is refused."""

import pytest

from penstock.cli.apply import table
from penstock.deploy.supervisor.applier import differences
from penstock.graph import Graph

MOCK = {"engine": "mock"}
BASE = {"model": "demo", "roles": {"aggregated": MOCK}}


def rows(changes, base=BASE):
    old, new = (Graph.model_validate(data) for data in (base, base | changes))
    found = differences(old, new, old_here=old.roles.present(), new_here=new.roles.present())
    return [(each.role, each.field, each.old, each.new, each.action or f"! {each.refusal}") for each in found]


def test_equal_graphs_do_not_differ():
    assert rows({}) == []


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"roles": {"aggregated": MOCK | {"replicas": 4}}}, ("aggregated", "replicas", "1", "4", "start 3")),
        ({"roles": {"aggregated": MOCK | {"replicas": 0}, "decode": MOCK, "prefill": MOCK}}, ("aggregated", "replicas", "1", "0", "drain 1")),
        ({"roles": {"aggregated": MOCK | {"mock": {"speedup": 2.0}}}}, ("aggregated", "mock.speedup", "1.0", "2.0", "replace workers")),
        ({"roles": {"aggregated": MOCK | {"engine_args": {"x": True}}}}, ("aggregated", "engine_args.x", "-", "true", "replace workers")),
        ({"roles": {"aggregated": MOCK | {"replicas_max": 3}}}, ("aggregated", "replicas_max", "null", "3", "another bound of scaling")),
        ({"context_length": 64}, ("all", "context_length", "null", "64", "replace workers")),
        ({"worker": {"drain_timeout_s": 5}}, ("all", "worker.drain_timeout_s", "30.0", "5.0", "replace workers")),
        ({"worker": {"own_cores": True}}, ("all", "worker.own_cores", "false", "true", "! it is read at the start")),
        ({"frontend": {"port": 9}}, ("all", "frontend.port", "8000", "9", "! frontends read it at their start")),
        ({"router": {"policy": "random"}}, ("all", "router.policy", "kv", "random", "! frontends read it at their start")),
        ({"runtime": {"listen": "tcp://0.0.0.0:0"}}, ("all", "runtime.listen", "null", "tcp://0.0.0.0:0", "! processes find each other by it from their start on")),
        ({"roles": {"aggregated": MOCK | {"kubernetes": {"labels": {"a": "b"}}}}}, ("aggregated", "kubernetes.labels.a", "-", "b", "nothing here: pods of Kubernetes have it")),
        ({"frontend": {"kubernetes": {"pod": {"priority": 1}}}}, ("all", "frontend.kubernetes.pod.priority", "-", "1", "nothing here: pods of Kubernetes have it")),
        ({"served_name": "other"}, ("all", "served_name", "penstock-demo", "other", "! clients ask for penstock-demo; set served_name to that")),
    ],
)  # fmt: skip
def test_each_field_has_a_row_with_what_is_done(changes, expected):
    assert expected in rows(changes)


def test_a_planner_keeps_its_roles():
    base = BASE | {"slo": {}, "planner": {}}
    (gone, *_) = rows({"roles": {"prefill": MOCK, "decode": MOCK}}, base)
    assert gone == ("aggregated", "", "mock", "-", "! the planner knows the roles of its start")


def test_memory_of_the_host_stays_as_it_was_laid_out():
    host = {"engine": "paged", "kv": {"host": "1GiB"}, "replicas": 2}
    base = BASE | {"roles": {"aggregated": host}}
    more = rows({"roles": {"aggregated": host | {"replicas": 3}}}, base)
    assert more[-1] == ("aggregated", "replicas", "2", "3", "! memory of the host is laid out for 2 workers")
    bigger = rows({"roles": {"aggregated": host | {"kv": {"host": "2GiB"}}}}, base)
    assert bigger[0][4] == "! memory of the host is laid out at the start"
    assert rows({"roles": {"aggregated": host | {"replicas": 1}}}, base)[0][4] == "drain 1"
    fresh = rows({"roles": {"prefill": host, "decode": {"engine": "paged"}}})
    assert ("prefill", "kv.host", "-", "1GiB", "! memory of the host is laid out at the start") in fresh


def test_a_role_of_another_host_is_named_and_left_alone():
    old, new = (
        Graph.model_validate(BASE | {"roles": {"prefill": MOCK, "decode": MOCK | {"replicas": count}}})
        for count in (1, 2)
    )
    here = {role: spec for role, spec in old.roles.present().items() if role == "prefill"}
    (row,) = differences(old, new, old_here=here, new_here=here)
    assert (row.role, row.action) == ("decode", "nothing here: other hosts run this role")


def test_the_table_has_a_line_for_each():
    old, new = (Graph.model_validate(BASE | changes) for changes in ({}, {"context_length": 64}))
    found = [*differences(old, new, old_here=old.roles.present(), new_here=new.roles.present())]
    assert list(table(found)) == [
        "role  field           old   new  action",
        "all   context_length  null  64   replace workers",
    ]
