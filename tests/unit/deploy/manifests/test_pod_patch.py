"""Fields of pods that a graph adds: where they go, how they are merged, and what is refused."""

import pytest

from penstock.core.errors import ConfigError
from penstock.deploy.operator.reconciler import Desired
from penstock.graph import Graph
from tests.support.rendered import by_kind, objects_of, pods, validate

RDMA = {
    "resources": {"limits": {"rdma/ib": 1, "memory": "64Gi"}, "requests": {"memory": "64Gi"}},
    "securityContext": {"capabilities": {"add": ["IPC_LOCK"]}},
    "env": [{"name": "NCCL_IB_HCA", "value": "mlx5"}],
    "volumeMounts": [{"name": "extra", "mountPath": "/extra"}],
}
POOL = {
    "imagePullSecrets": [{"name": "registry"}],
    "tolerations": [{"key": "pool", "value": "penstock", "effect": "NoSchedule"}],
    "nodeSelector": {"pool": "cpu", "disk": "ssd"},
    "priorityClassName": "high",
}


def graph_of(everywhere: dict | None = None, role: dict | None = None, **graph: object) -> Graph:
    roles = {
        "prefill": {"engine": "vllm", "hardware": "h100"},
        "decode": {"engine": "vllm", "hardware": "h100", "kubernetes": role},
    }
    data = {"name": "chat", "model": "meta-llama/Llama-3.1-8B", "kubernetes": everywhere, "roles": roles}
    return Graph.model_validate(data | graph)


def template(graph: Graph, part: str, **options: object) -> dict:
    return pods(objects_of(graph, **options))[f"chat-{part}"]


def test_all_pods_get_what_is_the_deployments_and_a_role_adds_its_own() -> None:
    graph = graph_of(
        {"pod": POOL, "labels": {"team": "chat"}, "annotations": {"a": "1", "b": "2"}},
        {
            "pod": {
                "nodeSelector": {"pool": "gpu", "disk": None},
                "tolerations": [{"key": "pool", "operator": "Exists"}],
                "volumes": [{"name": "extra", "hostPath": {"path": "/extra"}}],
                "runtimeClassName": "nvidia",
            },
            "container": RDMA,
            "annotations": {"b": None, "c": "3"},
        },
    )
    objects = objects_of(graph, gateway="public")
    for each in objects:
        if each["kind"] in {"Deployment", "StatefulSet"}:
            validate(each, "1.31")
            validate(each, "1.37")
    found = pods(objects)
    assert len(found) == 4, "frontend, both roles, picker"
    for made in found.values():
        assert made["spec"]["imagePullSecrets"] == [{"name": "registry"}]
        assert made["spec"]["priorityClassName"] == "high"
        assert made["metadata"]["labels"]["team"] == "chat"
    assert found["chat-frontend"]["spec"]["nodeSelector"] == {"pool": "cpu", "disk": "ssd"}
    assert found["chat-prefill"]["spec"]["tolerations"] == [
        {"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"},
        *POOL["tolerations"],
    ]
    decode = found["chat-decode"]
    assert decode["spec"]["nodeSelector"] == {"pool": "gpu"}
    assert [each["key"] for each in decode["spec"]["tolerations"]] == ["nvidia.com/gpu", "pool", "pool"]
    assert decode["metadata"]["annotations"] == {"a": "1", "c": "3"}
    (container,) = decode["spec"]["containers"]
    assert container["resources"]["limits"] == {"nvidia.com/gpu": "1", "rdma/ib": 1, "memory": "64Gi"}
    assert container["resources"]["requests"] == {"cpu": "1", "nvidia.com/gpu": "1", "memory": "64Gi"}
    assert container["securityContext"]["capabilities"] == {"drop": ["ALL"], "add": ["IPC_LOCK"]}
    assert container["securityContext"]["readOnlyRootFilesystem"]
    assert container["env"][-1] == {"name": "NCCL_IB_HCA", "value": "mlx5"}
    assert container["volumeMounts"][-1] == {"name": "extra", "mountPath": "/extra"}
    assert "PENSTOCK_SECRET" in {each["name"] for each in container["env"]}


def test_lists_with_names_are_merged_and_other_containers_stand_beside() -> None:
    zone = {"topologyKey": "topology.kubernetes.io/zone", "whenUnsatisfiable": "DoNotSchedule"}
    graph = graph_of(
        {
            "pod": {"containers": [{"name": "log", "image": "log:1"}], "topologySpreadConstraints": [zone]},
            "container": {"env": [{"name": "TOKEN", "value": "x"}]},
        },
        {
            "pod": {"volumes": [{"name": "shared-memory", "emptyDir": {"sizeLimit": "16Gi"}}]},
            "container": {
                "env": [{"name": "TOKEN", "valueFrom": {"fieldRef": {"fieldPath": "spec.nodeName"}}}]
            },
        },
    )
    made = template(graph, "decode")
    main, log = made["spec"]["containers"]
    assert (main["name"], log) == ("penstock", {"name": "log", "image": "log:1"})
    (token,) = [each for each in main["env"] if each["name"] == "TOKEN"]
    assert token.keys() == {"name", "valueFrom"}
    (shared,) = [each for each in made["spec"]["volumes"] if each["name"] == "shared-memory"]
    assert shared["emptyDir"] == {"medium": "Memory", "sizeLimit": "16Gi"}
    by_key = {each["topologyKey"]: each for each in made["spec"]["topologySpreadConstraints"]}
    assert by_key["topology.kubernetes.io/zone"]["whenUnsatisfiable"] == "DoNotSchedule"
    assert by_key["topology.kubernetes.io/zone"]["labelSelector"]
    assert by_key["kubernetes.io/hostname"]["whenUnsatisfiable"] == "ScheduleAnyway"


def test_groups_stateful_sets_and_the_planner_get_them_too() -> None:
    groups = {"aggregated": {"engine": "vllm", "hardware": "h100", "tensor_parallel": 16, "nodes": 2}}
    (group,) = by_kind(objects_of(graph_of({"pod": POOL}, roles=groups)), "LeaderWorkerSet").values()
    parts = group["spec"]["leaderWorkerTemplate"]
    for made in (parts["leaderTemplate"], parts["workerTemplate"]):
        assert made["spec"]["priorityClassName"] == "high"
        assert made["spec"]["affinity"]
    disk = {
        "aggregated": {
            "engine": "vllm",
            "hardware": "h100",
            "kv": {"disk": "/var/lib/penstock-kv/blocks:10GiB"},
        }
    }
    objects = objects_of(graph_of({"pod": POOL}, roles=disk))
    assert by_kind(objects, "StatefulSet")["chat-aggregated"]["spec"]["template"]["spec"]["priorityClassName"]
    body = {
        "metadata": {"name": "chat", "namespace": "n", "uid": "u"},
        "spec": {"graph": {"model": "demo", "kubernetes": {"pod": POOL}, "slo": {}, "planner": {}}},
    }
    planner = pods(Desired.of(body).objects)["chat-planner"]
    assert planner["spec"]["imagePullSecrets"] == [{"name": "registry"}]


def test_a_change_rolls_the_pods_that_it_changes_and_no_others() -> None:
    before, after = (
        objects_of(graph_of(None, {"container": {"env": [{"name": "A", "value": value}]}})) for value in "12"
    )
    assert [one["metadata"]["name"] for one, other in zip(before, after, strict=True) if one != other] == [
        "chat-decode"
    ]
    (config,) = by_kind(after, "ConfigMap").values()
    assert "kubernetes:" not in config["data"]["graph.yaml"].replace("discovery: kubernetes", "")


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"container": {"command": ["sh"]}}, "command: pods run penstock up with the graph; leave it out"),
        ({"container": {"readinessProbe": {}}}, "probes ask the supervisor"),
        ({"container": {"image": "x"}}, "images are set by --image"),
        ({"container": {"env": [{"value": "x"}]}}, r"env.0.name: missing; entries are merged by it"),
        ({"container": {"env": [{"name": 5}]}}, "env.0.name: must be text, got 5"),
        ({"container": {"volumeMounts": [{"mountPath": 5}]}}, "volumeMounts.0.mountPath: must be text, got 5"),
        ({"container": {"ports": [{"containerPort": "9000"}]}}, "ports.0.containerPort: must be an integer, got '9000'"),
        ({"container": {"resources": {"limits": "x"}}}, "resources.limits: must be a mapping, got 'x'"),
        ({"container": {"env": None}}, "null would remove what Penstock needs"),
        ({"container": {"resource": {}}}, "resource: unknown field of Kubernetes; did you mean 'resources'"),
        ({"container": {"tolerations": []}}, "tolerations: is a field of the pod; set it in pod"),
        ({"pod": {"env": []}}, "env: is a field of the container; set it in container"),
        ({"pod": {"toleration": []}}, "did you mean 'tolerations'"),
        ({"pod": {"tolerations": {"key": "a"}}}, "tolerations: must be a list, got"),
        ({"pod": {"nodeSelector": ["a"]}}, "nodeSelector: must be a mapping"),
        ({"pod": {"priorityClassName": {}}}, "priorityClassName: must be one value"),
        ({"pod": {"imagePullSecrets": ["a"]}}, "imagePullSecrets.0: must be a mapping"),
        ({"pod": {"terminationGracePeriodSeconds": 1}}, "set frontend.drain_timeout_s or worker.drain_timeout_s"),
        ({"pod": {"serviceAccountName": "x"}}, "bind further rights to that account"),
        ({"annotations": {"a": True}}, "must be a valid string, got True"),
        ({"pods": {}}, "unknown key; did you mean 'pod'"),
    ],
)  # fmt: skip
def test_what_is_no_field_of_a_pod_is_refused_as_it_is_read(fields: dict, text: str) -> None:
    for place in ({"kubernetes": fields}, {"roles": {"aggregated": {"kubernetes": fields}}}):
        with pytest.raises(ConfigError, match=text):
            Graph.parse({"model": "demo", **place}, source="graph.yaml")


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"labels": {"app.kubernetes.io/instance": "x"}}, "labels.app.kubernetes.io/instance: Penstock knows"),
        ({"annotations": {"penstock.dev/graph-checksum": "x"}}, "choose another name"),
        ({"pod": {"containers": [{"name": "penstock"}]}}, "is Penstock's container; set its fields in"),
        ({"pod": {"volumes": [{"name": "graph", "emptyDir": {}}]}}, "is a volume that Penstock needs"),
        ({"container": {"env": [{"name": "PENSTOCK_SECRET", "value": "x"}]}}, "into the Secret chat-secret as secret"),
        ({"container": {"env": [{"name": "POD_IP", "value": "x"}]}}, "POD_IP: is a variable that Penstock sets; leave it"),
        ({"container": {"ports": [{"containerPort": 7403}]}}, "7403: Penstock has a port of this number"),
        ({"container": {"volumeMounts": [{"name": "x", "mountPath": "/etc/penstock/keys"}]}}, "choose another path"),
        ({"container": {"volumeMounts": [{"name": "x", "mountPath": "/keys/"}]}}, "volumeMounts: /keys: Penstock"),
        ({"container": {"resources": {"limits": {"nvidia.com/gpu": 4}}}}, "a worker has 1 here by its hardware"),
    ],
)  # fmt: skip
def test_what_penstock_needs_is_refused_with_its_place(fields: dict, text: str) -> None:
    mounts = [{"path": "/keys", "kind": "secret", "name": "keys"}]
    with pytest.raises(ConfigError, match=text) as caught:
        objects_of(graph_of(None, fields), mounts=mounts)
    assert str(caught.value).startswith("roles.decode.kubernetes.")


@pytest.mark.parametrize(
    "fields",
    [
        {"pod": {"containers": [{"name": "log", "env": [{"name": {}}], "ports": ["x"]}]}},
        {"pod": {"topologySpreadConstraints": None, "securityContext": None, "affinity": {"a": ["b"]}}},
        {"container": {"securityContext": {"capabilities": ["ALL"]}, "resources": None}},
        {
            "container": {
                "env": [{"name": "a", "valueFrom": "x"}],
                "ports": [{"containerPort": 1, "name": []}],
            }
        },
        {"pod": {"volumes": [{"name": "extra", "configMap": ["x"]}]}},
    ],
)
def test_what_only_the_api_server_refuses_reaches_it(fields: dict) -> None:
    assert objects_of(graph_of(fields, fields))
