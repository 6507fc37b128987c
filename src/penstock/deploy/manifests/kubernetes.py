"""All objects of a graph in Kubernetes, in the order in which they are applied, with the fields that the graph adds to its pods."""

from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from itertools import chain
from pathlib import PurePosixPath
from typing import Any

from penstock.core.errors import ConfigError
from penstock.deploy.manifests.deployed import FRONTEND, Deployed, check_names, check_places, check_replicas
from penstock.deploy.manifests.network import (
    access,
    check_gateway,
    gateway,
    network_policies,
    planner_objects,
    services,
)
from penstock.deploy.manifests.options import GRAPH_PATH, RenderOptions
from penstock.deploy.manifests.pod_graph import make_pod_graph
from penstock.deploy.manifests.workloads import (
    CACHE_OWNER,
    DISK_VOLUME,
    KIND,
    SCRATCH,
    SHARED_MEMORY,
    budgets,
    cache_claim,
    check_one_node,
    workloads,
)
from penstock.graph import Graph
from penstock.graph.kubernetes import APPENDED, MERGE_KEYS, ONE_SOURCE, KubernetesSpec

_OURS = "penstock.dev/"
"""Prefix of labels and annotations of Penstock's own."""
_GPU = "nvidia.com/gpu"
Layer = tuple[str, KubernetesSpec]


def patch_pods(deployed: Deployed, part: str, templates: Sequence[dict[str, Any]]) -> None:
    """Merge into the templates of a part what the graph says of all pods, then what it says of this part's.

    Raises:
        ConfigError: it says something of what Penstock needs; one line for each field.
    """
    layers = list(_layers(deployed, part))
    problems = dict.fromkeys(
        line for template in templates for where, spec in layers for line in _refused(template, where, spec)
    )
    if problems:
        raise ConfigError("\n".join(problems))
    for template in templates:
        for _, spec in layers:
            _patch(template, spec)


def _layers(deployed: Deployed, part: str) -> Iterator[Layer]:
    graph = deployed.graph
    if graph.kubernetes is not None:
        yield "kubernetes", graph.kubernetes
    if part == FRONTEND and graph.frontend.kubernetes is not None:
        yield "frontend.kubernetes", graph.frontend.kubernetes
    for name, role in deployed.roles.items():
        if part == name.value and role.kubernetes is not None:
            yield f"roles.{name}.kubernetes", role.kubernetes


def _patch(template: dict[str, Any], spec: KubernetesSpec) -> None:
    named = {"labels": spec.labels, "annotations": spec.annotations}
    template["metadata"] = _merged(template["metadata"], {key: each for key, each in named.items() if each})
    pod = _merged(template["spec"], spec.pod)
    main = template["spec"]["containers"][0]["name"]
    pod["containers"] = _merged(pod, {"containers": [{"name": main, **spec.container}]})["containers"]
    template["spec"] = pod


def _merged(base: Mapping[str, Any], patch: Mapping[str, Any]) -> dict[str, Any]:
    """Merge as a strategic merge patch does: mappings by key, null deletes, lists by the key of their entries, or replaced.

    But entries of one list are never merged with each other: a container may have a port twice, for TCP and UDP.
    """
    made = dict(base)
    for field, value in patch.items():
        before = made.get(field)
        if value is None:
            made.pop(field, None)
        elif isinstance(value, dict):
            made[field] = _merged(before if isinstance(before, dict) else {}, value)
        elif isinstance(value, list | tuple):
            made[field] = _merged_list(field, before if isinstance(before, list) else (), value)
        else:
            made[field] = value
    return made


def _merged_list(field: str, before: Sequence[Any], entries: Sequence[Any]) -> list[Any]:
    if field in APPENDED:
        return [*before, *(deepcopy(entry) for entry in entries if entry not in before)]
    key = MERGE_KEYS.get(field)
    if key is None or not all(_has_key(entry, key) for entry in (*before, *entries)):
        return deepcopy(list(entries))
    made: dict[Any, list[Any]] = {}
    for entry in before:
        made.setdefault(entry[key], []).append(entry)
    new: dict[Any, list[Any]] = {}
    for entry in entries:
        was = made.get(entry[key], [{}])[0]
        if field in ONE_SOURCE and not entry.keys() <= was.keys():
            was = {}
        new.setdefault(entry[key], []).append(_merged(was, entry))
    return list(chain.from_iterable((made | new).values()))


def _has_key(entry: Any, key: str) -> bool:
    return isinstance(entry, dict) and isinstance(entry.get(key), str | int)


def _refused(template: dict[str, Any], where: str, spec: KubernetesSpec) -> Iterator[str]:
    """Say in one line each what is Penstock's own."""
    for kind, own in (("labels", template["metadata"]["labels"]), ("annotations", {})):
        for name in getattr(spec, kind):
            if name in own or name.startswith(_OURS):
                yield f"{where}.{kind}.{name}: Penstock knows its pods by it; choose another name"
    container = template["spec"]["containers"][0]
    pod, main = f"{where}.pod", container["name"]
    for entry in spec.pod.get("containers") or ():
        if entry["name"] == main:
            yield f"{pod}.containers: {main}: is Penstock's container; set its fields in {where}.container"
    for entry in spec.pod.get("initContainers") or ():
        if entry["name"] == CACHE_OWNER:
            yield f"{pod}.initContainers: {CACHE_OWNER}: is Penstock's own; choose another name"
    volumes = {each["name"] for each in template["spec"]["volumes"]} | {DISK_VOLUME}
    for entry in spec.pod.get("volumes") or ():
        if entry["name"] in volumes - {SCRATCH, SHARED_MEMORY}:
            yield f"{pod}.volumes: {entry['name']}: is a volume that Penstock needs; choose another name"
    yield from _refused_of_container(container, f"{where}.container", spec.container)


def _refused_of_container(
    container: Mapping[str, Any], where: str, patch: Mapping[str, Any]
) -> Iterator[str]:
    variables = {each["name"]: each for each in container["env"]}
    for entry in patch.get("env") or ():
        if (own := variables.get(entry["name"])) is None:
            continue
        source = own.get("valueFrom", {}).get("secretKeyRef")
        fix = (
            f"leave it out, and put the value into the Secret {source['name']} as {source['key']}"
            if source
            else "leave it out"
        )
        yield f"{where}.env: {entry['name']}: is a variable that Penstock sets; {fix}"
    names = [each["name"] for each in container["ports"]]
    numbers = {each["containerPort"] for each in container["ports"]}
    for entry in patch.get("ports") or ():
        if entry["containerPort"] in numbers or entry.get("name") in names:
            yield f"{where}.ports: {entry['containerPort']}: Penstock has a port of this number or name; choose others"
    paths = {each["mountPath"] for each in container["volumeMounts"]}
    for entry in patch.get("volumeMounts") or ():
        path = str(PurePosixPath(entry["mountPath"]))
        if path in paths or PurePosixPath(path).is_relative_to(GRAPH_PATH):
            yield f"{where}.volumeMounts: {path}: Penstock needs what is there; choose another path"
    for kind in ("requests", "limits"):
        count = ((patch.get("resources") or {}).get(kind) or {}).get(_GPU)
        own_count = container["resources"].get(kind, {}).get(_GPU)
        if count is not None and str(count) != own_count:
            yield (
                f"{where}.resources.{kind}: {_GPU}: {count}: a worker has {own_count or 0} here by its hardware and parallelism; leave"
                " it out, or set it to null where another resource has the GPUs"
            )


WORKLOADS = ("Deployment", "StatefulSet", KIND)
"""Kinds of objects that have pods."""


def kubernetes_objects(graph: Graph, options: RenderOptions) -> list[dict[str, Any]]:
    """Give the objects that run a graph, as the API of Kubernetes takes them; equal for equal arguments.

    The Secret is not among them: pods refer to it, and its owner makes it. Where the graph has no registry, its workers are Leases.

    Raises:
        ConfigError: the graph has what no pod could have; one line for each.
    """
    check_names(graph)
    check_replicas(graph)
    check_places(graph)
    if options.gateway is not None:
        check_gateway(graph)
    runtime = {"discovery": "kubernetes"} if graph.runtime.discovery == "local" else {}
    deployed = Deployed(graph=graph, pods=make_pod_graph(graph, options, runtime), options=options)
    check_one_node(deployed)
    claim = cache_claim(deployed)
    objects = [
        *access(deployed),
        deployed.object(
            "v1", "ConfigMap", deployed.config_name, immutable=True, data=dict(deployed.pods.files)
        ),
        *([claim] if claim is not None else []),
        *(
            network_policies(deployed) if options.network_policy else ()
        ),  # before the pods, which would run open
        *budgets(deployed),
        *services(deployed),
        *workloads(deployed),
        *planner_objects(deployed),
        *(gateway(deployed, options.gateway) if options.gateway is not None else ()),
        *([_service_monitor(deployed)] if options.service_monitor else []),
    ]
    for each in objects:
        if each["kind"] in WORKLOADS:
            part = each["metadata"]["labels"]["app.kubernetes.io/component"]
            patch_pods(deployed, part, pod_templates(each))
    return objects


def pod_templates(workload: dict[str, Any]) -> list[dict[str, Any]]:
    """Give the templates of a workload's pods: of a LeaderWorkerSet that of leaders and that of followers."""
    if workload["kind"] == KIND:
        group = workload["spec"]["leaderWorkerTemplate"]
        return [group["leaderTemplate"], group["workerTemplate"]]
    return [workload["spec"]["template"]]


def _service_monitor(deployed: Deployed) -> dict[str, Any]:
    """Let Prometheus ask each frontend, whose metrics say what it sees of all workers, too."""
    endpoint: dict[str, Any] = {"port": "http", "path": "/metrics", "interval": "15s"}
    if deployed.graph.frontend.tls is not None:
        endpoint |= {"scheme": "https", "tlsConfig": {"insecureSkipVerify": True}}
    return deployed.object(
        "monitoring.coreos.com/v1",
        "ServiceMonitor",
        deployed.part_name(FRONTEND),
        FRONTEND,
        spec={"selector": {"matchLabels": deployed.selector(FRONTEND)}, "endpoints": [endpoint]},
    )
