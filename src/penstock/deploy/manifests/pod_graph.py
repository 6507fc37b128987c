"""The graph as pods read it: a field that holds for one machine alone is changed or refused."""

import hashlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any
from urllib.parse import urlsplit

import yaml

from penstock.core.errors import ConfigError
from penstock.core.listening import Address
from penstock.deploy.card import refuse_shape
from penstock.deploy.manifests.options import GRAPH_PATH, RenderOptions
from penstock.deploy.supervisor.local_part import runnable_roles
from penstock.engine.registry import engine_kind
from penstock.graph import DEMO_MODEL, Graph, RoleSpec
from penstock.graph.runtime import RuntimeSpec
from penstock.runtime.credentials import EVENTS_VARIABLE, REGISTRY_VARIABLE

RELATIVE = "is relative to a directory of this machine; name an absolute path, and mount it in the pods"
_SECRET_WORDS = ("secret", "password", "credential", "api_key", "access_key", "token")
_NOT_SECRET = ("tokens", "tokenizer", "api_key_file", "token_id")


def lost_paths(graph: Graph, options: RenderOptions) -> Iterator[str]:
    """Say in one line for each path that is in no mount how to mount it, and for each secret that it must go."""
    for field, path, writes in (*_read_paths(graph), *_written_paths(graph)):
        if (problem := _problem(path, options, writes=writes)) is not None:
            yield f"{field}: {path}: {problem}"
    for field, url in _addresses(graph):
        if _is_loopback(url):
            yield f"{field}: {url}: each pod has a loopback address of its own; name the Service or address of what answers"
    if graph.frontend.access_log not in {None, "-"}:
        yield f"frontend.access_log: {graph.frontend.access_log}: a pod's lines go to stderr, where kubectl logs finds them; set it to -"
    for name, role in graph.roles.present().items():
        if (
            role.kv.disk.path
            and not is_on_disk_of_pod(role, options)
            and options.mount_of(role.kv.disk.path) is None
        ):
            yield (
                f"roles.{name}.kv.disk: {role.kv.disk.path}: is a file of the image; name one in a directory of its own, as"
                " /var/lib/penstock-kv/blocks"
            )
        for place, value in _leaves(role.engine_args, ("roles", name.value, "engine_args")):
            key = str(place[-1]).lower()
            if (
                isinstance(value, str)
                and any(word in key for word in _SECRET_WORDS)
                and not any(word in key for word in _NOT_SECRET)
            ):
                yield f"{'.'.join(map(str, place))}: (not shown): a graph is no place for a secret; leave it out, and set it in the pods' environment"
            elif isinstance(value, str) and value.startswith("/") and options.mount_of(value) is None:
                yield f"{'.'.join(map(str, place))}: {value}: {_no_mount(value)}"
            elif isinstance(value, str) and _is_loopback(value):
                yield f"{'.'.join(map(str, place))}: {value}: each pod has a loopback address of its own; name the server's Service or address"


def is_on_disk_of_pod(role: RoleSpec, options: RenderOptions) -> bool:
    """Whether a role's disk tier gets a volume of each pod: its directory is in no mount, and none of the image."""
    path = PurePosixPath(role.kv.disk.path)
    return bool(role.kv.disk.path) and options.mount_of(str(path)) is None and len(path.parent.parts) > 2


def is_local_model(model: str) -> bool:
    """Whether a model is a directory of the pods, by its name alone: who renders may have none of it."""
    return model != DEMO_MODEL and (model.startswith(("/", "~", ".")) or model.count("/") > 1)


def _addresses(graph: Graph) -> Iterator[tuple[str, str]]:
    """Give what pods connect to, beside servers in an engine's arguments."""
    for field in ("urls", "event_urls"):
        for index, url in enumerate(getattr(graph.runtime, field)):
            yield f"runtime.{field}.{index}", url
    if graph.tracing is not None:
        yield "tracing.endpoint", graph.tracing.endpoint
    for region in graph.regions:
        for index, url in enumerate(region.urls):
            yield f"regions.{region.name}.urls.{index}", url
    for name, role in graph.roles.present().items():
        if (endpoint := role.kv.object.options.get("endpoint")) is not None:
            yield f"roles.{name}.kv.object.options.endpoint", endpoint


def _read_paths(graph: Graph) -> Iterator[tuple[str, str, bool]]:
    if is_local_model(graph.model):
        yield "model", graph.model, False
    given = {
        "frontend.api_key_file": graph.frontend.api_key_file,
        "runtime.secret_file": graph.runtime.secret_file,
        "runtime.registry_credentials_file": graph.runtime.registry_credentials_file,
        "runtime.event_credentials_file": graph.runtime.event_credentials_file,
    }
    for region in graph.regions:
        given[f"regions.{region.name}.api_key_file"] = region.api_key_file
    for section, tls in (
        ("frontend.tls", graph.frontend.tls),
        ("runtime.tls", graph.runtime.tls),
        ("worker.kv_transfer.transfer.tls", graph.worker.kv_transfer.transfer.tls),
        *((f"regions.{region.name}.tls", region.tls) for region in graph.regions),
    ):
        for field in ("certificate", "key", "authority"):
            given[f"{section}.{field}"] = getattr(tls, field, None)
    for field, path in given.items():
        if path is not None:
            yield field, str(path), False


def _written_paths(graph: Graph) -> Iterator[tuple[str, str, bool]]:
    if graph.frontend.batches.directory is not None:
        yield "frontend.batches.directory", graph.frontend.batches.directory, True
    if graph.worker.step_log is not None:
        yield "worker.step_log", graph.worker.step_log, True
    for name, role in graph.roles.present().items():
        url = role.kv.object.url
        if url.startswith("file:"):
            yield f"roles.{name}.kv.object.url", urlsplit(url).path, True


def _problem(path: str, options: RenderOptions, *, writes: bool) -> str | None:
    if not path.startswith("/"):
        return RELATIVE
    mount = options.mount_of(path)
    if mount is None:
        return _no_mount(path, writes=writes)
    if writes and not mount.is_writable:
        return f"is written, and {mount.kind}:{mount.name} cannot be; mount a claim or host directory at {mount.path}"
    return None


def _no_mount(path: str, *, writes: bool = False) -> str:
    example = "claim:NAME" if writes else "secret:NAME or claim:NAME"
    return f"no pod has it; mount its directory by --mount {PurePosixPath(path).parent}={example}"


def _is_loopback(value: str) -> bool:
    try:
        host = urlsplit(value).hostname if "://" in value else None
    except ValueError:
        return False
    return host in {"localhost", "::1"} or (host or "").startswith("127.")


def _leaves(node: Any, path: tuple[str | int, ...]) -> Iterator[tuple[tuple[str | int, ...], Any]]:
    if isinstance(node, dict):
        for key, inner in node.items():
            yield from _leaves(inner, (*path, key))
    elif isinstance(node, list | tuple):
        for index, inner in enumerate(node):
            yield from _leaves(inner, (*path, index))
    else:
        yield path, node


def weights_from_hub(graph: Graph) -> bool:
    """Whether pods download the model."""
    return graph.model != DEMO_MODEL and not is_local_model(graph.model)


def disk_directory(role: RoleSpec) -> str:
    """Give the directory of a role's disk tier."""
    return str(PurePosixPath(role.kv.disk.path).parent)


class _Dumper(getattr(yaml, "CSafeDumper", yaml.SafeDumper)):  # type: ignore[misc]
    def ignore_aliases(self, data: Any) -> bool:  # noqa: ARG002
        return True


def _text(dumper: yaml.SafeDumper, text: str) -> yaml.Node:
    style = "|" if "\n" in text and not any(line != line.rstrip() for line in text.split("\n")) else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Dumper.add_representer(str, _text)


def dump(document: Any) -> str:
    """Write one document, its keys in their order, in ASCII: other characters are escaped, as readers disagree on some."""
    return yaml.dump(document, Dumper=_Dumper, sort_keys=False, width=10_000)


def dump_all(objects: Iterable[Mapping[str, Any]]) -> str:
    """Write one document for each object."""
    return "".join(f"---\n{dump(each)}" for each in objects)


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
