"""The graph as pods read it: a field that holds for one machine alone is changed or refused."""

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from penstock.core.errors import ConfigError
from penstock.core.listening import Address
from penstock.deploy.card import refuse_shape
from penstock.deploy.manifests.options import GRAPH_PATH, RenderOptions
from penstock.deploy.manifests.paths import lost_paths
from penstock.deploy.manifests.yaml_text import dump
from penstock.deploy.supervisor.local_part import runnable_roles
from penstock.engine.registry import engine_kind
from penstock.graph import Graph, RoleSpec
from penstock.graph.runtime import RuntimeSpec
from penstock.runtime.credentials import EVENTS_VARIABLE, REGISTRY_VARIABLE

GRAPH_FILE = "graph.yaml"
REQUEST_PORT = 7401
"""Where workers answer frontends."""
KV_PORT = 7402
"""Where workers read each other's KV."""
PLANNER_PORT = 7404
"""Where the planner's supervisor listens for those of other pods."""
LEADER_PORT = 7405
"""Where the first node of a worker over several gathers the others."""
PROBE_PORT = 7403
"""Where supervisors answer probes; `runtime.probes` names another."""
PICKER_PORT = 9002
"""Where an inference gateway asks the endpoint picker."""
_FRONTEND_PORT = 8000
_FILES_BYTES_MAX = 900_000
"""A ConfigMap has at most 1 MiB."""
_HASH_DIGITS = 10
_LOOPBACK = {"127.0.0.1", "localhost", "::1", "0.0.0.0", "::"}  # noqa: S104


@dataclass(frozen=True, slots=True)
class PodGraph:
    """A graph for pods.

    Attributes:
        graph: as `penstock up` in a pod reads it: one frontend process, one worker of each role.
        files: graph.yaml, and the profiles that it names, by file name.
    """

    graph: Graph
    files: dict[str, str]

    @property
    def digest(self) -> str:
        """Name the content of the files, in small hexadecimal digits."""
        content = "".join(f"{name}\0{text}\0" for name, text in sorted(self.files.items()))
        return hashlib.sha256(content.encode()).hexdigest()[:_HASH_DIGITS]


def make_pod_graph(graph: Graph, options: RenderOptions, runtime: Mapping[str, str]) -> PodGraph:
    """Change a graph of one machine to one of pods.

    Args:
        graph: the deployment.
        options: where it runs.
        runtime: fields of `runtime` that are set there.

    Raises:
        ConfigError: one line for each field that no pod could have, `PATH: VALUE: why; what to do`.
    """
    runnable_roles(graph)
    if problems := [*_of_one_machine(graph), *lost_paths(graph, options)]:
        raise ConfigError("\n".join(problems))
    refuse_shape(graph.model)
    document = graph.model_dump(mode="json", exclude_unset=True)
    document.pop("kubernetes", None)  # it is in the templates
    files: dict[str, str] = {}
    frontend = document.setdefault("frontend", {})
    frontend.pop("kubernetes", None)
    frontend |= {
        "host": _any_address(graph.frontend.host),
        "port": frontend_port(graph),
        "processes": 1,
    }
    probes = {"probes": f"tcp://0.0.0.0:{probe_port(graph)}"}
    document["runtime"] = document.get("runtime", {}) | probes | dict(runtime)
    roles = document.setdefault("roles", {"aggregated": {}})
    for name, role in graph.roles.present().items():
        ours = roles[name.value] | {"replicas": workers_per_pod(role)}
        for field in ("replicas_max", "kubernetes"):
            ours.pop(field, None)
        if role.profile is not None:
            files[f"{name}.profile.json"] = Path(role.profile).read_text(encoding="utf-8")
            ours["profile"] = str(GRAPH_PATH / f"{name}.profile.json")
        roles[name.value] = ours
    made = Graph.parse(document, source="as pods read it")
    files = {GRAPH_FILE: dump(document), **files}
    size = sum(len(text.encode()) for text in files.values())
    if size > _FILES_BYTES_MAX:
        raise ConfigError(
            f"graph and profiles: have {size} bytes, and a ConfigMap at most {_FILES_BYTES_MAX}; measure profiles of fewer cells"
        )
    return PodGraph(made, files)


def frontend_port(graph: Graph) -> int:
    return graph.frontend.port or _FRONTEND_PORT


def probe_port(graph: Graph) -> int:
    probes = graph.runtime.probes
    return PROBE_PORT if probes is None else Address.parse(probes).port


def account_variables(spec: RuntimeSpec) -> list[str]:
    """Name the variables in which pods may get accounts of registries, where no file of the graph has them."""
    registry = [REGISTRY_VARIABLE] if spec.urls and spec.registry_credentials_file is None else []
    return registry + ([EVENTS_VARIABLE] if spec.event_urls and spec.event_credentials_file is None else [])


def workers_per_pod(role: RoleSpec) -> int:
    """Give the workers of one pod: one; all where each answers for a server of its own, as they differ by their number."""
    return role.replicas if _counts_servers(role) else 1


def pods_of(role: RoleSpec) -> int:
    """Give the pods of a role."""
    return min(role.replicas, 1) if _counts_servers(role) else role.replicas


def pods_max(role: RoleSpec) -> int | None:
    """Give the most pods that a role may have: one where it answers for servers by their URLs, which a second would count again."""
    return 1 if _counts_servers(role) else None


def _counts_servers(role: RoleSpec) -> bool:
    counter = engine_kind(role.engine).count_workers
    return counter is not None and counter(role.engine_args) is not None


def _any_address(host: str) -> str:
    return "::" if ":" in host else "0.0.0.0"  # noqa: S104 - a pod's own


def _of_one_machine(graph: Graph) -> Iterator[str]:
    """Say in one line each what is of one machine, and no pod has."""
    runtime = graph.runtime
    if graph.frontend.host not in _LOOPBACK:
        yield f"frontend.host: {graph.frontend.host}: no pod has this address; leave it out"
    for field in ("hub", "join", "listen", "advertise", "leader"):
        if (value := getattr(runtime, field)) is not None:
            yield f"runtime.{field}: {value}: pods have addresses of their own; leave it out, or set it to null by --set"
    yield from _refused_ports(graph)
    yield from _refused_roles(graph)
    transfer = graph.worker.kv_transfer.transfer
    if any(address.startswith("tcp://") for address in transfer.listen):
        yield f"worker.kv_transfer.transfer.listen: {', '.join(transfer.listen)}: pods listen at port {KV_PORT}; leave it out"
    if transfer.secret.get_secret_value():
        yield "worker.kv_transfer.transfer.secret: (not shown): a graph is no place for a secret; leave it out: PENSTOCK_SECRET is used"
    if graph.worker.own_cores:
        yield "worker.own_cores: true: a pod has the cores that its node gives it; leave it out, and set cpu limits"
    if graph.planner is not None and graph.planner.scales != "pods":
        yield (
            "planner: (a mapping): nothing here would start the pods that it wants; apply the graph as a PenstockGraph, whose"
            " operator does, or leave it out and scale by an autoscaler or kubectl scale"
        )


def _refused_ports(graph: Graph) -> Iterator[str]:
    ports = {"frontend.port": frontend_port(graph), "runtime.probes": probe_port(graph)}
    for field, port in ports.items():
        if port in {REQUEST_PORT, KV_PORT, LEADER_PORT} or list(ports.values()).count(port) > 1:
            yield f"{field}: {port}: is a port that pods use otherwise; choose another"
        if port < 1024:
            yield f"{field}: {port}: needs root, which pods have not; choose one above 1023: the Service may have any"


def _refused_roles(graph: Graph) -> Iterator[str]:
    for name, role in graph.roles.present().items():
        if role.adapters_per_worker is not None and role.adapters_per_worker < len(role.adapters):
            yield (
                f"roles.{name}.adapters_per_worker: {role.adapters_per_worker}: a role's pods are alike; leave it out, or give"
                " graphs of their own to groups of adapters"
            )
        if role.kv.disk.path and role.kv.disk.size.is_multiple:
            yield f"roles.{name}.kv.disk.size: {role.kv.disk.size}: volumes are of a size in bytes; give one, as 100GiB"
        if len(set(role.locations)) > 1:
            yield (
                f"roles.{name}.locations: {len(set(role.locations))} places: a role's pods are alike, and know zone and region from"
                " their nodes; leave it out"
            )
