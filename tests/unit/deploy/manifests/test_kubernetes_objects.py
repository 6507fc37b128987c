"""Objects of Kubernetes for every example graph: valid, consistent with each other, and with what the processes need."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.cli import make_parser
from penstock.core.errors import ConfigError
from penstock.deploy.card import frontend_drain_s, worker_drain_s
from penstock.deploy.manifests.kubernetes import WORKLOADS, kubernetes_objects
from penstock.deploy.manifests.options import Cache, RenderOptions
from penstock.deploy.manifests.pod_graph import dump_all
from penstock.deploy.supervisor.local_part import LocalPart
from penstock.graph import Graph, Overrides, build, load
from tests.support.rendered import EXAMPLES, by_kind, example, objects_of, pods, validate

OF_SEVERAL_NODES = {"deepseek-r1-gb200-sglang.yaml", "deepseek-r1-gb200-trtllm.yaml"}
ON_NODES = [path for path in EXAMPLES if path.name not in OF_SEVERAL_NODES]
OLDEST, NEWEST = "1.31", "1.37"
STORE = {"url": "s3://bucket/kv", "size": "1TiB", "options": {"aws_endpoint_url": "http://minio:9000"}}
REGIONS = [{"name": "eu", "urls": ["http://10.0.1.1:8123", "https://eu.example"]}]


@pytest.fixture(scope="module", params=ON_NODES, ids=lambda path: path.stem)
def graph(request: pytest.FixtureRequest) -> Graph:
    return example(request.param)


@pytest.fixture(scope="module")
def objects(graph: Graph) -> list[dict]:
    return objects_of(graph)


def container(template: dict) -> dict:
    (only,) = template["spec"]["containers"]
    return only


def selects(selector: dict[str, str], labels: dict[str, str]) -> bool:
    return selector.items() <= labels.items()


def test_every_object_is_valid_and_yaml_reads_it_back(graph: Graph, objects: list[dict]) -> None:
    for each in objects:
        validate(each, NEWEST)
    text = dump_all(objects)
    assert text == dump_all(objects_of(graph)), "the same each time"
    assert list(yaml.safe_load_all(text)) == objects
    names = [(each["kind"], each["metadata"]["name"]) for each in objects]
    assert len(names) == len(set(names))
    assert all(re.fullmatch(r"[a-z]([a-z0-9-]{0,61}[a-z0-9])?", name) for _, name in names)


def test_older_clusters_take_them_and_a_misspelt_field_would_be_found() -> None:
    objects = objects_of(example(ON_NODES[0]))
    for each in objects:
        validate(each, OLDEST)
    policy = next(each for each in objects if each["kind"] == "NetworkPolicy")
    policy["spec"]["ingres"] = policy["spec"].pop("ingress")
    with pytest.raises(kubernetes_validate.ValidationError):
        validate(policy, NEWEST)


def test_pods_read_their_graph_and_run_all_of_it(graph: Graph, objects: list[dict], tmp_path: Path) -> None:
    (config,) = by_kind(objects, "ConfigMap").values()
    for name, text in config["data"].items():
        (tmp_path / name).write_text(text.replace("/etc/penstock/", f"{tmp_path}/"))
    replicas = {
        name: each["spec"]["replicas"]
        for kind in ("Deployment", "StatefulSet")
        for name, each in by_kind(objects, kind).items()
    }
    run = {}
    for name, template in pods(objects).items():
        command, file, *flags = container(template)["args"]
        flags = [flag.replace("$(POD_IP)", "10.1.2.3") for flag in flags]
        options = make_parser().parse_args([command, str(tmp_path / Path(file).name), *flags])
        read = load(options.file, Overrides(options.set))
        part = LocalPart.parse(options.part, read.roles.present())
        if part.has_frontends:
            run["frontend"] = replicas[name] * read.frontend.processes
            assert read.frontend.host == "0.0.0.0"
        for role, spec in part.of(read.roles.present()).items():
            run[role] = replicas[name] * spec.replicas
            ours = graph.roles.present()[role].model_dump(exclude={"replicas", "replicas_max", "profile"})
            assert spec.model_dump(exclude={"replicas", "replicas_max", "profile"}) == ours
            assert read.runtime.listen == "tcp://10.1.2.3:7401"
            assert read.worker.kv_transfer.transfer.listen[-1] == "tcp://10.1.2.3:7402"
        same = {"name", "model", "block_size", "router", "slo", "request_plane", "supervision", "tracing"}
        assert read.model_dump(include=same) == graph.model_dump(include=same)
    declared = {role: spec.replicas for role, spec in graph.roles.present().items()}
    assert run == {"frontend": graph.frontend.processes, **declared}


def test_what_one_object_says_of_another_is_there(objects: list[dict]) -> None:
    templates = pods(objects)
    labels = [template["metadata"]["labels"] for template in templates.values()]
    for kind in ("Deployment", "StatefulSet"):
        for each in by_kind(objects, kind).values():
            assert selects(
                each["spec"]["selector"]["matchLabels"], each["spec"]["template"]["metadata"]["labels"]
            )
    for each in by_kind(objects, "PodDisruptionBudget").values():
        assert sum(selects(each["spec"]["selector"]["matchLabels"], one) for one in labels) == 1
    for each in by_kind(objects, "Service").values():
        chosen = [
            container(template)
            for template in templates.values()
            if selects(each["spec"]["selector"], template["metadata"]["labels"])
        ]
        assert chosen
        for port in each["spec"]["ports"]:
            for one in chosen:
                known = {port["name"]: port["containerPort"] for port in one["ports"]}
                assert port["targetPort"] in {*known, *known.values()}
    accounts, maps = by_kind(objects, "ServiceAccount"), by_kind(objects, "ConfigMap")
    for template in templates.values():
        spec, one = template["spec"], container(template)
        assert spec["serviceAccountName"] in accounts
        volumes = {volume["name"]: volume for volume in spec["volumes"]}
        assert {mount["name"] for mount in one["volumeMounts"]} == set(volumes)
        assert volumes["graph"]["configMap"]["name"] in maps
        names = {port["name"] for port in one["ports"]}
        assert len(names) == len(one["ports"]) == len({port["containerPort"] for port in one["ports"]})
        for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
            asked = one[probe]["httpGet"]
            known = {"probes": {"/live", "/ready"}, "http": {"/health", "/live"}}
            assert asked["port"] in names
            assert asked["path"] in known[asked["port"]]


def test_pods_may_do_no_more_than_they_need_and_have_the_time_to_end(
    graph: Graph, objects: list[dict]
) -> None:
    """Their shared memory is bounded, and they are spread among their own revision."""
    for name, template in pods(objects).items():
        spec, one = template["spec"], container(template)
        assert spec["securityContext"]["runAsNonRoot"]
        assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        assert one["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        }
        for variable in one["env"]:
            if re.search(r"SECRET|TOKEN|KEY", variable["name"]):
                assert "value" not in variable
                assert variable["valueFrom"]["secretKeyRef"]["name"] == f"{graph.name}-secret"
        sleep = one.get("lifecycle", {}).get("preStop", {}).get("exec", {}).get("command", ["", "0"])
        ends_s = frontend_drain_s(graph) if name.endswith("-frontend") else worker_drain_s(graph)
        assert spec["terminationGracePeriodSeconds"] >= int(sleep[1]) + ends_s + 1
        in_memory = [each for each in spec["volumes"] if "medium" in each.get("emptyDir", {})]
        assert [each["emptyDir"]["sizeLimit"] for each in in_memory] == ["8Gi"] * len(in_memory), name
        for spread in spec["topologySpreadConstraints"]:
            assert spread["matchLabelKeys"] == ["pod-template-hash", "controller-revision-hash"]
            assert not set(spread["matchLabelKeys"]) & set(spread["labelSelector"]["matchLabels"])


def allowed(
    rules: list[dict], side: str, labels: dict[str, str] | None, port: int, protocol: str = "TCP"
) -> bool:
    """Whether a rule lets a peer with these labels through at a port; None is somebody outside of the deployment."""
    for rule in rules:
        peers = rule.get(side)
        if peers is not None and (
            labels is None or not any(selects(peer["podSelector"]["matchLabels"], labels) for peer in peers)
        ):
            continue
        ports = rule.get("ports")
        if ports is None or {"protocol": protocol, "port": port} in ports:
            return True
    return False


def test_network_policies_let_through_what_the_processes_need_and_nothing_else(
    graph: Graph, objects: list[dict]
) -> None:
    labels = {name: template["metadata"]["labels"] for name, template in pods(objects).items()}
    policies = by_kind(objects, "NetworkPolicy").values()

    def rules(name: str, direction: str) -> list[dict]:
        (policy,) = [
            each for each in policies if selects(each["spec"]["podSelector"]["matchLabels"], labels[name])
        ]
        return policy["spec"][direction]

    (frontend,) = [name for name in labels if name.endswith("-frontend")]
    workers = [name for name in labels if name != frontend]
    assert allowed(rules(frontend, "ingress"), "from", None, graph.frontend.port), "clients"
    for name in labels:
        assert allowed(rules(name, "ingress"), "from", None, 7403), "the kubelet's probes"
        assert allowed(rules(name, "egress"), "to", None, 53, "UDP"), "names"
        assert allowed(rules(name, "egress"), "to", None, 443), "the API of Kubernetes, weights"
        assert allowed(rules(name, "egress"), "to", None, 6443), "that API behind its Service"
        assert not allowed(rules(name, "egress"), "to", None, 22)
    for worker in workers:
        assert allowed(rules(frontend, "egress"), "to", labels[worker], 7401)
        assert allowed(rules(worker, "ingress"), "from", labels[frontend], 7401), "requests"
        assert not allowed(rules(worker, "ingress"), "from", labels[frontend], 7402)
        assert not allowed(rules(worker, "ingress"), "from", None, 7401), "strangers"
        own = len(workers) > 1 and any(role.engine == "vllm" for role in graph.roles.present().values())
        for other in workers:
            for port, needed in ((7401, True), (7402, True), (5600, own), (50_000, own)):
                assert allowed(rules(worker, "egress"), "to", labels[other], port) is needed
                assert allowed(rules(worker, "ingress"), "from", labels[other], port) is needed


@pytest.mark.parametrize("name", sorted(OF_SEVERAL_NODES))
def test_workers_of_several_nodes_are_refused(name: str) -> None:
    (path,) = (path for path in EXAMPLES if path.name == name)
    said = r"roles\.\w+: \d+ GPUs on a node: a machine with gb200 has 4; start such workers as servers"
    with pytest.raises(ConfigError, match=said):
        objects_of(example(path))


@pytest.mark.parametrize(
    ("fields", "options", "of_frontends", "of_workers"),
    [
        ({"roles": {"aggregated": {"engine": "paged", "kv": {"object": STORE}}}}, {"egress_ports": (16443,)}, {16443}, {9000, 16443}),
        ({"router": {"location": {"region": "us"}}, "regions": REGIONS}, {}, {8123, 443}, {443}),
    ],
    ids=["a store, and ports that are asked for", "other regions"],
)  # fmt: skip
def test_pods_may_reach_what_the_graph_names(
    fields: dict, options: dict, of_frontends: set[int], of_workers: set[int]
) -> None:
    graph = build({"name": "chat", "model": "demo"} | fields)
    policies = by_kind(objects_of(graph, **options), "NetworkPolicy")
    for part, reached in (("frontend", of_frontends), ("workers", of_workers)):
        egress = policies[f"chat-{part}"]["spec"]["egress"]
        ports = {port for port in (9000, 16443, 8123) if allowed(egress, "to", None, port)}
        assert ports == reached - {443}
        assert allowed(egress, "to", None, 443)


def test_a_cache_of_the_node_is_given_to_the_pods_user() -> None:
    graph = build({"name": "chat", "model": "org/m", "roles": {"aggregated": {}}})
    for kind, count in (("host:/data/cache", 1), ("pod", 0), ("size:1Gi", 0), ("claim:c", 0)):
        objects = objects_of(graph, cache=Cache.read(kind))
        for each in objects:
            validate(each, NEWEST)
        for template in pods(objects).values():
            made = template["spec"].get("initContainers", [])
            assert len(made) == count
            for one in made:
                assert one["command"] == ["/bin/chown", "10001:10001", "/var/cache/penstock"]
                assert template["spec"]["securityContext"]["runAsUser"] == 10001
                assert one["image"] == container(template)["image"]


def derived(workload: dict) -> list[str]:
    """Give the longest names and labels that the controllers of Kubernetes make of a workload's name, with 1,000 pods or groups."""
    name, revision = workload["metadata"]["name"], 10 * "f"
    return {
        "Deployment": [],
        "StatefulSet": [f"{name}-999", f"{name}-{revision}"],
        "LeaderWorkerSet": [name, f"{name}-999-9", f"{name}-{revision}", f"{name}-999-{revision}"],
    }[workload["kind"]]


def labels_in(node: Any) -> Iterator[str]:
    if isinstance(node, dict):
        for key, inner in node.items():
            if key in {"labels", "matchLabels"}:
                yield from inner.values()
            yield from labels_in(inner)
    elif isinstance(node, list):
        for inner in node:
            yield from labels_in(inner)


WIDE = {"engine": "vllm", "hardware": "h100", "nodes": 2, "tensor_parallel": 16}
DISK = {"kv": {"disk": {"path": "/var/lib/penstock-kv/blocks", "size": "10GiB"}}}
SHAPES: list[dict] = [
    {"aggregated": {"engine": "vllm", "hardware": "h100"}},
    {"prefill": {}, "decode": DISK},
    {"aggregated": DISK},
    {"aggregated": WIDE},
]


@settings(max_examples=60)
@given(
    name=st.from_regex(r"[a-z]([a-z0-9-]{0,40}[a-z0-9])?", fullmatch=True)
    | st.integers(30, 41).map("n".__mul__),
    roles=st.sampled_from(SHAPES),
    has_gateway=st.booleans(),
)
def test_every_name_and_label_has_at_most_63_characters(name: str, roles: dict, has_gateway: bool) -> None:
    options = RenderOptions(gateway="entry" if has_gateway else None, cache=Cache(kind="size", name="1Gi"))
    graph = build({"name": name, "model": "org/model", "roles": roles})
    if len(name) > (37 if WIDE in roles.values() else 40) or name == "default":
        with pytest.raises(ConfigError, match="name: "):
            kubernetes_objects(graph, options)
        return
    objects = kubernetes_objects(graph, options)
    for each in objects:
        texts = {*labels_in(each), *(derived(each) if each["kind"] in WORKLOADS else ())}
        if each["kind"] != "ConfigMap":
            texts.add(each["metadata"]["name"])
        assert max(map(len, texts)) <= 63, each["kind"]
