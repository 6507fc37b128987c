"""Services, and NetworkPolicies that open the ports in use alone."""

from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

from penstock.deploy.manifests.kubernetes.deployed import FRONTEND, WORKER_LABEL, Deployed
from penstock.deploy.manifests.kubernetes.planner import planner_port
from penstock.deploy.manifests.paths import weights_from_hub
from penstock.deploy.manifests.pod_graph import (
    KV_PORT,
    PICKER_PORT,
    REQUEST_PORT,
    frontend_port,
    probe_port,
    workers_per_pod,
)
from penstock.deploy.supervisor.local_part import PLANNER

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
