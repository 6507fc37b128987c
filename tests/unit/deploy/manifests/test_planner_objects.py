"""A graph with a planner in Kubernetes: one pod that scales PenstockRoles, and the ways of all others to it."""

import yaml

from penstock.deploy.operator.reconciler import Desired
from penstock.graph import Graph


def desired(**graph):
    body = {
        "metadata": {"name": "chat", "namespace": "default", "uid": "1"},
        "spec": {"graph": {"model": "demo", "roles": {"aggregated": {"engine": "mock"}}, **graph}},
    }
    return Desired.of(body)


def by_name(objects, kind):
    return {each["metadata"]["name"]: each for each in objects if each["kind"] == kind}


def test_the_operator_gives_a_graph_with_a_planner_one_pod_that_may_scale_its_roles_alone():
    objects = desired(planner={"max_workers": 4}).objects
    deployment = by_name(objects, "Deployment")["chat-planner"]
    pod = deployment["spec"]["template"]["spec"]
    assert deployment["spec"]["replicas"] == 1
    assert deployment["spec"]["strategy"] == {"type": "Recreate"}
    assert pod["containers"][0]["args"][2:] == [
        "--run",
        "planner",
        "--set",
        "planner.address=tcp://0.0.0.0:7404",
    ]
    assert pod["serviceAccountName"] == "chat-planner"
    (rule,) = [
        each
        for each in by_name(objects, "Role")["chat-planner"]["rules"]
        if "penstockroles" in each["resources"]
    ]
    assert (rule["resourceNames"], rule["verbs"]) == (["chat-aggregated"], ["get", "patch"])
    assert "penstockroles" not in str(by_name(objects, "Role")["chat"])
    assert by_name(objects, "Service")["chat-planner"]["spec"]["ports"][0]["port"] == 7404
    (config,) = by_name(objects, "ConfigMap").values()
    graph = Graph.parse(yaml.safe_load(config["data"]["graph.yaml"]), source="as pods read it")
    assert graph.planner is not None
    assert (graph.planner.address, graph.planner.scales) == ("tcp://chat-planner:7404", "pods")
    for name in ("chat-frontend", "chat-workers"):
        egress = by_name(objects, "NetworkPolicy")[name]["spec"]["egress"]
        assert any("planner" in str(rule.get("to")) and "7404" in str(rule["ports"]) for rule in egress), name
    assert "chat-planner" in by_name(objects, "NetworkPolicy")


def test_without_a_planner_there_is_nothing_of_it():
    assert not [each for each in desired().objects if "planner" in str(each["metadata"]["name"])]
