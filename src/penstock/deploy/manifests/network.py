"""How the pods of a graph are reached and what they may ask: Services, NetworkPolicies, accounts, the planner and the gateway's endpoint picker."""

import json
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

from penstock.core.errors import ConfigError
from penstock.core.listening import Address
from penstock.deploy.hosts.kubernetes_connector import GROUP, ROLES
from penstock.deploy.manifests.deployed import FRONTEND, WORKER_LABEL, Deployed
from penstock.deploy.manifests.pod_graph import (
    KV_PORT,
    PICKER_PORT,
    REQUEST_PORT,
    frontend_port,
    probe_port,
    weights_from_hub,
    workers_per_pod,
)
from penstock.deploy.manifests.workloads import (
    container_security,
    deployment,
    model_environment,
    planner_pod,
    pod_template,
    volume_mounts,
)
from penstock.deploy.supervisor.local_part import PLANNER
from penstock.graph import DEMO_MODEL, Graph

_GROUP = "rbac.authorization.k8s.io"
DISCOVERY_RULES: list[dict[str, Any]] = [
    {
        "apiGroups": ["coordination.k8s.io"],
        "resources": ["leases"],
        "verbs": ["get", "list", "watch", "create", "patch", "delete"],
    },
]
"""What discovery by Kubernetes asks: workers are Leases."""


def access(deployed: Deployed) -> Iterator[dict[str, Any]]:
    """Give the account of frontends and workers, and with discovery by Kubernetes its role; without, pods get no token at all."""
    yield from account(deployed, deployed.name, DISCOVERY_RULES if deployed.asks_api else None)


def account(deployed: Deployed, name: str, rules: list[dict[str, Any]] | None) -> Iterator[dict[str, Any]]:
    """Give an account that may do what `rules` say; None gives its pods no token."""
    yield deployed.object("v1", "ServiceAccount", name, automountServiceAccountToken=rules is not None)
    if rules is not None:
        yield deployed.object(f"{_GROUP}/v1", "Role", name, rules=rules)
        subject = {"kind": "ServiceAccount", "name": name}
        if deployed.options.namespace is not None:
            subject["namespace"] = deployed.options.namespace
        yield deployed.object(
            f"{_GROUP}/v1",
            "RoleBinding",
            name,
            roleRef={"apiGroup": _GROUP, "kind": "Role", "name": name},
            subjects=[subject],
        )


def planner_objects(deployed: Deployed) -> Iterator[dict[str, Any]]:
    """Give the planner's account, its Service and its Deployment of one pod; nothing for a graph without."""
    port = planner_port(deployed)
    if port is None:
        return
    name = deployed.part_name(PLANNER)
    rules = [
        *(DISCOVERY_RULES if deployed.asks_api else ()),
        {
            "apiGroups": [GROUP],
            "resources": [ROLES.plural],
            "resourceNames": [deployed.part_name(role) for role in deployed.roles],
            "verbs": ["get", "patch"],
        },
    ]
    yield from account(deployed, name, rules)
    selector = deployed.selector(PLANNER)
    ports = [{"name": "planner", "port": port, "targetPort": port}]
    yield deployed.object(
        "v1", "Service", name, PLANNER, spec={"type": "ClusterIP", "selector": selector, "ports": ports}
    )
    template = planner_pod(deployed, port)
    template["spec"] |= {"serviceAccountName": name, "automountServiceAccountToken": True}
    yield deployed.object(
        "apps/v1",
        "Deployment",
        name,
        PLANNER,
        spec={
            "replicas": 1,
            "revisionHistoryLimit": 3,
            "selector": {"matchLabels": selector},
            "strategy": {"type": "Recreate"},  # two at once would each scale
            "template": template,
        },
    )


def planner_port(deployed: Deployed) -> int | None:
    """Give the port at which pods connect to the planner; None without a planner."""
    planner = deployed.pods.graph.planner
    return None if planner is None or planner.address is None else Address.parse(planner.address).port


_HTTPS = 443
_API_SERVER = 6443
_DNS = 53
_DEFAULT_PORTS = {"http": 80, "https": 443, "nats": 4222, "tls": 4222}
_OWN_TRANSFER = ("vllm", "sglang", "trtllm")
"""Engines that move KV themselves, at ports that they choose."""


def services(deployed: Deployed) -> Iterator[dict[str, Any]]:
    """Give the Service of clients, and the one without an address that names workers."""
    scheme = "https" if deployed.graph.frontend.tls is not None else "http"
    port = {
        "name": "http",
        "port": frontend_port(deployed.graph),
        "targetPort": "http",
        "appProtocol": scheme,
    }
    yield deployed.object(
        "v1",
        "Service",
        deployed.part_name(FRONTEND),
        FRONTEND,
        spec={"type": "ClusterIP", "selector": deployed.selector(FRONTEND), "ports": [port]},
    )
    yield deployed.object(
        "v1",
        "Service",
        deployed.part_name("workers"),
        spec={
            "clusterIP": "None",
            "selector": deployed.selector() | {WORKER_LABEL: "true"},
            "ports": [
                {"name": "requests", "port": REQUEST_PORT, "targetPort": REQUEST_PORT},
                {"name": "kv", "port": KV_PORT, "targetPort": KV_PORT},
            ],
        },
    )


def network_policies(deployed: Deployed) -> Iterator[dict[str, Any]]:
    """Give a policy of frontends, one of workers and one of the planner: who may come in, and at which ports they go out."""
    probes, port = probe_port(deployed.graph), planner_port(deployed)
    to_planner = () if port is None else (_to(deployed.selector(PLANNER), _tcp(port)),)
    requests = _tcp(REQUEST_PORT) if _are_alone(deployed) else None
    workers = deployed.selector() | {WORKER_LABEL: "true"}
    yield _policy(
        deployed,
        FRONTEND,
        deployed.selector(FRONTEND),
        ingress=[{"ports": _tcp(frontend_port(deployed.graph), probes)}],
        egress=[_to(workers, requests), *to_planner, *_outside(_frontend_ports(deployed))],
    )
    among = None if moves_kv_itself(deployed) else _tcp(REQUEST_PORT, KV_PORT)
    yield _policy(
        deployed,
        "workers",
        workers,
        ingress=[
            _from(deployed.selector(FRONTEND), requests),
            _from(workers, among),
            {"ports": _tcp(probes)},
        ],
        egress=[_to(workers, among), *to_planner, *_outside(_worker_ports(deployed))],
    )
    for name, role in deployed.roles.items():
        if role.nodes > 1:  # engines choose the ports between their nodes
            own = deployed.selector(name.value)
            yield _policy(deployed, f"{name}-nodes", own, ingress=[_from(own, None)], egress=[_to(own, None)])
    if port is not None:
        yield _policy(
            deployed,
            PLANNER,
            deployed.selector(PLANNER),
            ingress=[_from(deployed.selector(), _tcp(port)), {"ports": _tcp(probes)}],
            egress=[*_outside(_planner_ports(deployed))],
        )


def picker_policy(deployed: Deployed, part: str) -> dict[str, Any]:
    """Give the policy of the endpoint picker: gateways may be anywhere, and it asks the API alone, and the hub."""
    ports = {_HTTPS, _API_SERVER, *deployed.options.egress_ports}
    ingress = [{"ports": _tcp(PICKER_PORT)}]
    return _policy(deployed, part, deployed.selector(part), ingress=ingress, egress=[*_outside(ports)])


def moves_kv_itself(deployed: Deployed) -> bool:
    """Whether an engine of several roles moves KV by ports of its own, which no graph knows."""
    return len(deployed.roles) > 1 and any(role.engine in _OWN_TRANSFER for role in deployed.roles.values())


def _are_alone(deployed: Deployed) -> bool:
    """Whether each worker has a pod, and so a port, of its own; several of one pod take free ports."""
    return all(workers_per_pod(role) == 1 for role in deployed.roles.values())


def _policy(deployed: Deployed, part: str, selector: dict[str, str], **rules: Any) -> dict[str, Any]:
    spec = {"podSelector": {"matchLabels": selector}, "policyTypes": ["Ingress", "Egress"], **rules}
    return deployed.object("networking.k8s.io/v1", "NetworkPolicy", deployed.part_name(part), spec=spec)


def _outside(ports: set[int]) -> Iterator[dict[str, Any]]:
    """Allow names to be resolved, and these ports anywhere."""
    yield {"ports": [{"protocol": "UDP", "port": _DNS}, {"protocol": "TCP", "port": _DNS}]}
    if ports:
        yield {"ports": _tcp(*sorted(ports))}


def _common_ports(deployed: Deployed) -> set[int]:
    """Give the ports of registries, brokers of events and collectors of traces."""
    graph = deployed.pods.graph
    ports = {port_of(url) for url in (*graph.runtime.urls, *graph.runtime.event_urls)}
    ports |= set(deployed.options.egress_ports)
    if deployed.asks_api:
        ports |= {_HTTPS, _API_SERVER}
    if graph.tracing is not None:
        ports.add(port_of(graph.tracing.endpoint))
    if weights_from_hub(graph):
        ports.add(_HTTPS)
    return ports


def _frontend_ports(deployed: Deployed) -> set[int]:
    """Give the ports of servers with media and of other regions, to which frontends run the links."""
    graph = deployed.graph
    ports = _common_ports(deployed) | {port for _, port in graph.frontend.media.fetch.places}
    return ports | {port_of(url) for region in graph.regions for url in region.urls}


def _planner_ports(deployed: Deployed) -> set[int]:
    return _common_ports(deployed) | {_HTTPS, _API_SERVER}


def _worker_ports(deployed: Deployed) -> set[int]:
    ports = _common_ports(deployed)
    for role in deployed.roles.values():
        if (url := role.kv.object.url) and not url.startswith("file:"):
            named = {port_of(text) for text in _urls_in([url, dict(role.kv.object.options)])}
            ports |= named or {_HTTPS}
        if workers_per_pod(role) != 1 or role.engine == "openai":
            ports |= {port_of(text) for text in _urls_in(role.engine_args)}
    return ports


def port_of(url: str) -> int:
    """Give the port that a URL names, or that of its scheme."""
    parts = urlsplit(url)
    return parts.port or _DEFAULT_PORTS.get(parts.scheme, _HTTPS)


def _urls_in(node: Any) -> Iterator[str]:
    if isinstance(node, dict):
        node = list(node.values())
    if isinstance(node, list | tuple):
        for inner in node:
            yield from _urls_in(inner)
    elif isinstance(node, str) and node.startswith(("http://", "https://", "tcp://")):
        yield node


def _tcp(*ports: int) -> list[dict[str, Any]]:
    return [{"protocol": "TCP", "port": port} for port in ports]


def _to(selector: dict[str, str], ports: list[dict[str, Any]] | None) -> dict[str, Any]:
    rule: dict[str, Any] = {"to": [{"podSelector": {"matchLabels": selector}}]}
    return rule if ports is None else rule | {"ports": ports}


def _from(selector: dict[str, str], ports: list[dict[str, Any]] | None) -> dict[str, Any]:
    rule: dict[str, Any] = {"from": [{"podSelector": {"matchLabels": selector}}]}
    return rule if ports is None else rule | {"ports": ports}


PICKER = "picker"
_POOLS = "inference.networking.k8s.io"
_GATEWAYS = "gateway.networking.k8s.io"
_RULES = [
    {"apiGroups": [""], "resources": ["pods"], "verbs": ["get", "list", "watch"]},
    {"apiGroups": [_POOLS], "resources": ["inferencepools"], "verbs": ["get", "list", "watch"]},
]
_GRACE_S = 10.0
_PROBES_START_MAX = 60
"""Probes of 10 s until the picker has the model's small files."""


def gateway(deployed: Deployed, name: str) -> Iterator[dict[str, Any]]:
    """Give the pool of frontends, the route to it from the Gateway `name`, and the picker.

    Any frontend can answer any request, so the gateway chooses one itself where the picker is away.
    """
    reference = {
        "name": deployed.part_name(PICKER),
        "port": {"number": PICKER_PORT},
        "failureMode": "FailOpen",
    }
    yield deployed.object(
        f"{_POOLS}/v1",
        "InferencePool",
        deployed.name,
        spec={
            "selector": {"matchLabels": deployed.selector(FRONTEND)},
            "targetPorts": [{"number": frontend_port(deployed.graph)}],
            "endpointPickerRef": reference,
        },
    )
    backend = {"group": _POOLS, "kind": "InferencePool", "name": deployed.name}
    yield deployed.object(
        f"{_GATEWAYS}/v1",
        "HTTPRoute",
        deployed.name,
        spec={"parentRefs": [{"name": name}], "rules": [{"backendRefs": [backend]}]},
    )
    yield deployed.object(
        "v1",
        "Service",
        deployed.part_name(PICKER),
        PICKER,
        spec={
            "type": "ClusterIP",
            "selector": deployed.selector(PICKER),
            "ports": [{"name": "grpc", "port": PICKER_PORT, "targetPort": "grpc", "appProtocol": "http2"}],
        },
    )
    yield from account(deployed, deployed.part_name(PICKER), _RULES)
    if deployed.options.network_policy:
        yield picker_policy(deployed, PICKER)
    yield deployment(deployed, PICKER, 1, _pod(deployed), has_spare=True)


def check_gateway(graph: Graph) -> None:
    """Check that a picker could serve the graph.

    Raises:
        ConfigError: it could not; one line for each reason.
    """
    problems = []
    if graph.model == DEMO_MODEL:
        problems.append(
            "gateway: the picker reads the tokenizer of a hub model or directory, and demo is neither; name one"
        )
    if graph.served_name is not None and graph.served_name != graph.model:
        problems.append(
            f"served_name: {graph.served_name}: the picker knows the model as {graph.model}; leave it out, or --gateway"
        )
    if graph.frontend.tls is not None:
        problems.append(
            "frontend.tls: gateways speak plain HTTP to pods of a pool; leave it out, or --gateway"
        )
    if problems:
        raise ConfigError("\n".join(problems))


def _pod(deployed: Deployed) -> dict[str, Any]:
    graph = deployed.graph
    adapters = sorted({name for role in deployed.roles.values() for name in role.adapters})
    port = str(PICKER_PORT)
    arguments = ["router", graph.model, "--pool", deployed.name, "--endpoint-picker-port", port]
    arguments += ["--set", "endpoint_picker.host=0.0.0.0", "--block-size", str(graph.block_size)]
    if adapters:
        arguments += ["--set", f"adapters={json.dumps(adapters)}"]
    probe = {"grpc": {"port": PICKER_PORT, "service": "liveness"}}
    container = {
        "name": PICKER,
        "image": deployed.options.image,
        "args": arguments,
        "env": model_environment(deployed),
        "ports": [{"name": "grpc", "containerPort": PICKER_PORT}],
        "startupProbe": probe | {"failureThreshold": _PROBES_START_MAX},
        "readinessProbe": {"grpc": {"port": PICKER_PORT, "service": "readiness"}},
        "livenessProbe": probe,
        "resources": {"requests": {"cpu": "1", "memory": "512Mi"}},
        "securityContext": container_security(),
        "volumeMounts": volume_mounts(deployed, FRONTEND),
    }
    template = pod_template(deployed, PICKER, None, container, _GRACE_S)
    template["spec"] |= {
        "serviceAccountName": deployed.part_name(PICKER),
        "automountServiceAccountToken": True,
    }
    return template
