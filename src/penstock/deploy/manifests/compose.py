"""A compose file: the whole graph on one host, in containers."""

import math
from collections.abc import Iterator, Sequence
from typing import Any

from penstock.core.errors import ConfigError
from penstock.deploy.drain import frontend_drain_s, worker_drain_s
from penstock.deploy.manifests.options import CACHE_PATH, GRAPH_PATH, RenderOptions
from penstock.deploy.manifests.paths import disk_directory, is_on_disk_of_pod, weights_from_hub
from penstock.deploy.manifests.pod_graph import (
    GRAPH_FILE,
    PodGraph,
    account_variables,
    frontend_port,
    make_pod_graph,
    pods_of,
    probe_port,
    workers_per_pod,
)
from penstock.deploy.manifests.yaml_text import dump
from penstock.deploy.secret import SECRET_VARIABLE
from penstock.deploy.state import ADMIN_TOKEN_VARIABLE
from penstock.deploy.supervisor.resources.devices import Devices, devices_of, expect_one_machine
from penstock.frontend.limits.keys import API_KEY_VARIABLE
from penstock.graph import Graph

_FRONTEND = "frontend"
_HUB = f"tcp://{_FRONTEND}:7400"
_SECRETS = {
    SECRET_VARIABLE: f"${{{SECRET_VARIABLE}:?set it, as openssl rand -hex 32 prints it}}",
    ADMIN_TOKEN_VARIABLE: f"${{{ADMIN_TOKEN_VARIABLE}:-}}",
    API_KEY_VARIABLE: f"${{{API_KEY_VARIABLE}:-}}",
}
_USER = "10001:10001"
_SHARED_MEMORY = "8gb"
_PUBLISHED_AT = {"127.0.0.1": "127.0.0.1:", "localhost": "127.0.0.1:", "::1": "[::1]:"}
"""frontend.host: prefix of a published port; every interface for others."""
_SHARED_FILES = {"secret", "configmap"}


def compose_file(graph: Graph, options: RenderOptions) -> str:
    """Write the compose file of a graph.

    One service runs the frontends and, where the graph has no registry, the one that the others join. Workers with GPUs, a disk tier
    or vLLM's connector have a service each, since replicas of a service are alike.

    Raises:
        ConfigError: the graph has what no container of one host could have.
    """
    if graph.runtime.discovery == "kubernetes":
        raise ConfigError(
            "runtime.discovery: kubernetes: containers of one host need no cluster; leave it out, or use --target kubernetes"
        )
    for mount in options.mounts:
        if mount.kind in _SHARED_FILES:
            raise ConfigError(
                f"--mount {mount.path}={mount.kind}:{mount.name}: compose has no {mount.kind}; mount a directory of the host, as"
                f" --mount {mount.path}=host:/DIRECTORY, or a volume as claim:NAME"
            )
    if options.cache.kind == "size":
        raise ConfigError(
            f"--cache size:{options.cache.name}: volumes of compose have no size; use claim:NAME or host:/DIRECTORY"
        )
    for role, spec in graph.roles.present().items():
        if spec.nodes > 1:
            raise ConfigError(
                f"roles.{role}.nodes: {spec.nodes}: containers of compose are on one host; leave it out, or use --target kubernetes or"
                " slurm"
            )
    expect_one_machine(graph.roles.present())
    pods = make_pod_graph(graph, options, {}, processes=graph.frontend.processes)
    volumes: dict[str, Any] = {}
    services = dict(_services(graph, options, pods, volumes))
    document = {
        "name": graph.name.lower().replace(".", "-"),
        "services": services,
        "configs": {_config_name(name): {"content": _plain(text)} for name, text in pods.files.items()},
        "volumes": volumes,
    }
    return dump({name: value for name, value in document.items() if value})


def _services(
    graph: Graph, options: RenderOptions, pods: PodGraph, volumes: dict[str, Any]
) -> Iterator[tuple[str, dict[str, Any]]]:
    has_hub = graph.runtime.discovery == "local"
    frontend = _service(graph, options, pods, volumes, image=options.image)
    frontend["command"] = [*_command(_FRONTEND), *(["--set", f"runtime.hub={_HUB}"] if has_hub else [])]
    port = frontend_port(graph)
    frontend["ports"] = [f"{_PUBLISHED_AT.get(graph.frontend.host, '')}{port}:{port}"]
    frontend["stop_grace_period"] = f"{math.ceil(frontend_drain_s(graph)) + 1}s"
    yield _FRONTEND, frontend
    devices = Devices(None)
    for name, role in graph.roles.present().items():
        gpus, disk = devices_of(role), is_on_disk_of_pod(role, options)
        image = options.gpu_image if gpus else options.image
        service = _service(graph, options, pods, volumes, image=image)
        join = ["--join", _HUB] if has_hub else []
        service["command"] = [*_command(f"{name}={workers_per_pod(role)}"), *join]
        service["depends_on"] = {_FRONTEND: {"condition": "service_started"}}
        service["stop_grace_period"] = f"{math.ceil(worker_drain_s(graph)) + 1}s"
        service["shm_size"] = _SHARED_MEMORY
        if not gpus and not disk and role.engine != "vllm":
            yield name.value, service | {"deploy": {"replicas": pods_of(role)}}
            continue
        for number in range(1, pods_of(role) + 1):
            worker = f"{name}-{number}"
            own = _gpus(devices.take(worker, gpus)) if gpus else {}
            if role.engine == "vllm":
                own["environment"] = service["environment"] | {"VLLM_NIXL_SIDE_CHANNEL_HOST": worker}
            if disk:
                volumes[f"{worker}-kv"] = {}
                volume = {"type": "volume", "source": f"{worker}-kv", "target": disk_directory(role)}
                own["volumes"] = [*service["volumes"], volume]
                own["depends_on"] = service["depends_on"] | {
                    f"{worker}-owner": {"condition": "service_completed_successfully"}
                }
                yield f"{worker}-owner", _owner(image, volume)
            yield worker, service | own


def _owner(image: str, volume: dict[str, Any]) -> dict[str, Any]:
    """Give a volume, which root owns at first, to the user of the other containers, and end."""
    return {
        "image": image,
        "user": "0:0",
        "entrypoint": ["/bin/chown", _USER, volume["target"]],
        "volumes": [volume],
        "network_mode": "none",
        "read_only": True,
        "cap_drop": ["ALL"],
        "cap_add": ["CHOWN"],
        "security_opt": ["no-new-privileges:true"],
    }


def _gpus(taken: Sequence[int]) -> dict[str, Any]:
    """Give a service these GPUs of the host."""
    reserved = {"driver": "nvidia", "device_ids": [str(index) for index in taken], "capabilities": ["gpu"]}
    return {"deploy": {"resources": {"reservations": {"devices": [reserved]}}}}


def _command(run: str) -> list[str]:
    return ["up", str(GRAPH_PATH / GRAPH_FILE), "--run", run]


def _service(
    graph: Graph, options: RenderOptions, pods: PodGraph, volumes: dict[str, Any], *, image: str
) -> dict[str, Any]:
    """Give what all services have."""
    environment = {"HOME": "/tmp", "XDG_RUNTIME_DIR": "/tmp", **_SECRETS}  # noqa: S108 - the container's own
    environment |= {name: f"${{{name}:-}}" for name in account_variables(graph.runtime)}
    mounted: list[dict[str, Any]] = []
    if weights_from_hub(graph):
        environment |= {"HF_HOME": str(CACHE_PATH / "huggingface"), "HF_TOKEN": "${HF_TOKEN:-}"}
        mounted.append(_cache(options, volumes))
    for mount in options.mounts:
        kind = "bind" if mount.kind == "host" else "volume"
        mounted.append({"type": kind, "source": mount.name, "target": mount.path})
        if kind == "volume":
            volumes[mount.name] = {"external": True}
    probe = f"import urllib.request as r; r.urlopen('http://127.0.0.1:{probe_port(graph)}/ready', timeout=3)"
    return {
        "image": image,
        "user": _USER,
        "environment": environment,
        "configs": [{"source": _config_name(name), "target": str(GRAPH_PATH / name)} for name in pods.files],
        "volumes": mounted,
        "tmpfs": ["/tmp:exec"],  # noqa: S108 - engines run what they compile there
        "read_only": True,
        "cap_drop": ["ALL"],
        "security_opt": ["no-new-privileges:true"],
        "restart": "unless-stopped",
        "healthcheck": {
            "test": ["CMD", "/opt/penstock/bin/python", "-c", probe],
            "interval": "10s",
            "timeout": "5s",
            "retries": 3,
            "start_period": f"{math.ceil(graph.supervision.start_timeout_s)}s",
        },
    }


def _cache(options: RenderOptions, volumes: dict[str, Any]) -> dict[str, Any]:
    cache = options.cache
    if cache.kind == "host":
        return {"type": "bind", "source": cache.name, "target": str(CACHE_PATH)}
    name = cache.name or "cache"
    volumes[name] = {"external": True} if cache.kind == "claim" else {}
    return {"type": "volume", "source": name, "target": str(CACHE_PATH)}


def _config_name(file: str) -> str:
    return file.replace(".", "-")


def _plain(text: str) -> str:
    """Keep compose from replacing what looks like its variables."""
    return text.replace("$", "$$")
