"""The pod of each part: one `penstock up` that runs frontends, or one worker of a role."""

import math
from typing import Any

from penstock.core.types.instances import Role
from penstock.deploy.drain import frontend_drain_s, worker_drain_s
from penstock.deploy.manifests.kubernetes.deployed import FRONTEND, HARDWARE_LABEL, WORKER_LABEL, Deployed
from penstock.deploy.manifests.kubernetes.volumes import cache_owner, volume_mounts, volumes
from penstock.deploy.manifests.options import CACHE_PATH, GRAPH_PATH
from penstock.deploy.manifests.paths import weights_from_hub
from penstock.deploy.manifests.pod_graph import (
    GRAPH_FILE,
    KV_PORT,
    LEADER_PORT,
    REQUEST_PORT,
    account_variables,
    frontend_port,
    probe_port,
    workers_per_pod,
)
from penstock.deploy.secret import SECRET_VARIABLE
from penstock.deploy.state import ADMIN_TOKEN_VARIABLE
from penstock.deploy.supervisor.local_part import PLANNER
from penstock.deploy.supervisor.resources.devices import devices_of
from penstock.frontend.limits.keys import API_KEY_VARIABLE
from penstock.graph import RoleSpec
from penstock.runtime.credentials import EVENTS_VARIABLE, REGISTRY_VARIABLE

USER = 10_001
"""Of the images."""
CONTAINER = "penstock"
"""Name of the container of frontends, workers and the planner."""
NIXL_PORT = 5600
"""First port of vLLM's NIXL connector, one for each rank."""
REVISIONS = ["pod-template-hash", "controller-revision-hash"]
"""Labels of a pod's revision, of which a Deployment's pods have the first and a StatefulSet's the second: pods are spread among those of
their own revision, so that a rollout ends spread, too. Kubernetes ignores a key that a pod does not have."""
_PRE_STOP_S = 5
"""Time in which Services and proxies forget a pod that ends, before it is told to."""
_GRACE_S = 5
_SECRET_KEYS = {REGISTRY_VARIABLE: "registry-credentials", EVENTS_VARIABLE: "event-credentials"}
_PROBE_START_S = 60
"""Longest time from a container's start until its supervisor answers; models load later."""


def frontend_pod(deployed: Deployed) -> dict[str, Any]:
    """Give the pod template of frontends."""
    container = _container(deployed, FRONTEND, run=FRONTEND, image=deployed.options.image)
    container["ports"].insert(0, {"name": "http", "containerPort": frontend_port(deployed.graph)})
    scheme = "HTTPS" if deployed.graph.frontend.tls is not None else "HTTP"
    container["readinessProbe"] = _http("/health", "http", period_s=5, failures=2, scheme=scheme)
    container["lifecycle"] = {"preStop": {"exec": {"command": ["sleep", str(_PRE_STOP_S)]}}}
    container["resources"] = {"requests": {"cpu": "1", "memory": "1Gi"}}
    grace_s = _PRE_STOP_S + frontend_drain_s(deployed.graph) + _GRACE_S
    return pod_template(deployed, FRONTEND, None, container, grace_s)


def planner_pod(deployed: Deployed, port: int) -> dict[str, Any]:
    """Give the pod template of the planner, which listens at `port`."""
    container = _container(deployed, PLANNER, run=PLANNER, image=deployed.options.image)
    container["args"] += ["--set", f"planner.address=tcp://0.0.0.0:{port}"]
    container["ports"].insert(0, {"name": "planner", "containerPort": port})
    container["readinessProbe"] = _http("/live", "probes", period_s=5, failures=2)
    container["resources"] = {"requests": {"cpu": "100m", "memory": "512Mi"}}
    return pod_template(deployed, PLANNER, None, container, _GRACE_S)


def worker_pod(deployed: Deployed, name: Role, role: RoleSpec) -> dict[str, Any]:
    """Give the pod template of a role's workers."""
    container = _worker_container(deployed, name, role, run=f"{name}={workers_per_pod(role)}")
    if workers_per_pod(role) == 1:
        container["args"] += ["--set", f"runtime.listen=tcp://$(POD_IP):{REQUEST_PORT}"]
        container["args"] += [
            "--set",
            f"worker.kv_transfer.transfer.listen=[memory, unix, 'tcp://$(POD_IP):{KV_PORT}']",
        ]
        container["ports"][:0] = [
            {"name": "requests", "containerPort": REQUEST_PORT},
            {"name": "kv", "containerPort": KV_PORT},
        ]
    if role.nodes > 1:
        container["args"] += ["--leader", f"tcp://$(POD_IP):{LEADER_PORT}"]
        container["ports"].insert(0, {"name": "leader", "containerPort": LEADER_PORT})
    if role.engine == "vllm":
        container["env"] += [
            {"name": "VLLM_NIXL_SIDE_CHANNEL_HOST", "value": "$(POD_IP)"},
            {"name": "VLLM_NIXL_SIDE_CHANNEL_PORT", "value": str(NIXL_PORT)},
        ]
    return _worker_template(deployed, name, role, container)


def follower_pod(deployed: Deployed, name: Role, role: RoleSpec) -> dict[str, Any]:
    """Give the pod template of the nodes that follow, of a role whose workers span several; LeaderWorkerSet sets the variables."""
    container = _worker_container(deployed, name, role, run=name.value)
    container["args"] += ["--node-rank", "$(LWS_WORKER_INDEX)"]
    container["args"] += ["--leader", f"tcp://$(LWS_LEADER_ADDRESS):{LEADER_PORT}"]
    return _worker_template(deployed, name, role, container)


def _worker_container(deployed: Deployed, name: Role, role: RoleSpec, *, run: str) -> dict[str, Any]:
    """Give the container of one node of a worker, with the GPUs of that node."""
    gpus = deployed.gpus(role)
    image = deployed.options.gpu_image if gpus else deployed.options.image
    container = _container(deployed, name.value, run=run, image=image)
    container["readinessProbe"] = _http("/ready", "probes", period_s=5, failures=2)
    requests = {"cpu": "1", "memory": _memory(role)}
    container["resources"] = {"requests": requests}
    if gpus:
        container["resources"] = {
            "requests": requests | {"nvidia.com/gpu": str(gpus)},
            "limits": {"nvidia.com/gpu": str(gpus)},
        }
    return container


def _worker_template(
    deployed: Deployed, name: Role, role: RoleSpec, container: dict[str, Any]
) -> dict[str, Any]:
    grace_s = worker_drain_s(deployed.graph) + _GRACE_S
    template = pod_template(deployed, name.value, role, container, grace_s)
    template["metadata"]["labels"][WORKER_LABEL] = "true"
    if deployed.gpus(role):
        template["metadata"]["labels"][HARDWARE_LABEL] = role.hardware
        template["spec"]["tolerations"] = [
            {"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}
        ]
    if selector := _node_selector(role):
        template["spec"]["nodeSelector"] = selector
    return template


def _container(deployed: Deployed, part: str, *, run: str, image: str) -> dict[str, Any]:
    return {
        "name": CONTAINER,
        "image": image,
        "args": ["up", str(GRAPH_PATH / GRAPH_FILE), "--run", run],
        "env": _environment(deployed, part),
        "ports": [{"name": "probes", "containerPort": probe_port(deployed.graph)}],
        "startupProbe": _http("/live", "probes", period_s=2, failures=_PROBE_START_S // 2),
        "livenessProbe": _http("/live", "probes", period_s=10, failures=6),
        "securityContext": container_security(),
        "volumeMounts": volume_mounts(deployed, part),
    }


def container_security() -> dict[str, Any]:
    """Give the rights of every container: none."""
    return {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }


def model_environment(deployed: Deployed) -> list[dict[str, Any]]:
    """Give what a container reads a model by, from the hub where it has it from there."""
    own = "/tmp"  # noqa: S108 - the pod's own
    environment: list[dict[str, Any]] = [
        {"name": "HOME", "value": own},
        {"name": "XDG_RUNTIME_DIR", "value": own},
    ]
    if weights_from_hub(deployed.graph):
        environment.append({"name": "HF_HOME", "value": str(CACHE_PATH / "huggingface")})
        environment.append(_secret(deployed, "HF_TOKEN", "hf-token"))
    return environment


def pod_template(
    deployed: Deployed, part: str, role: RoleSpec | None, container: dict[str, Any], grace_s: float
) -> dict[str, Any]:
    """Give the template of a part's pods, which have one container; `role` has its volumes beside those of all parts."""
    owner = cache_owner(deployed, container["image"], USER)
    spread = {
        "labelSelector": {"matchLabels": deployed.selector(part)},
        "matchLabelKeys": REVISIONS,
        "maxSkew": 1,
    }
    return {
        "metadata": {"labels": deployed.selector(part) | {"app.kubernetes.io/part-of": "penstock"}},
        "spec": {
            "serviceAccountName": deployed.name,
            "automountServiceAccountToken": deployed.asks_api,
            "enableServiceLinks": False,
            "terminationGracePeriodSeconds": math.ceil(grace_s),
            "securityContext": {
                "runAsNonRoot": True,
                "runAsUser": USER,
                "runAsGroup": USER,
                "fsGroup": USER,
                "fsGroupChangePolicy": "OnRootMismatch",
                "seccompProfile": {"type": "RuntimeDefault"},
            },
            "topologySpreadConstraints": [
                spread | {"topologyKey": key, "whenUnsatisfiable": "ScheduleAnyway"}
                for key in ("topology.kubernetes.io/zone", "kubernetes.io/hostname")
            ],
            **({"initContainers": owner} if owner else {}),
            "containers": [container],
            "volumes": volumes(deployed, role),
        },
    }


def _environment(deployed: Deployed, part: str) -> list[dict[str, Any]]:
    """Give what differs by pod and node, and secrets by reference.

    A pod is a host: it shares memory with no other one. Pods of one node are behind one switch, as a rack's hosts are.
    """
    places = [
        ("POD_IP", "status.podIP"),
        ("PENSTOCK_HOST", "metadata.name"),
        ("PENSTOCK_POD_NAME", "metadata.name"),
        ("PENSTOCK_POD_UID", "metadata.uid"),
        ("PENSTOCK_RACK", "spec.nodeName"),
        ("PENSTOCK_ZONE", "metadata.labels['topology.kubernetes.io/zone']"),
        ("PENSTOCK_REGION", "metadata.labels['topology.kubernetes.io/region']"),
    ]
    secrets = [(SECRET_VARIABLE, "secret")]
    if part == FRONTEND:
        secrets += [(ADMIN_TOKEN_VARIABLE, "admin-token"), (API_KEY_VARIABLE, "api-key")]
    secrets += [(name, _SECRET_KEYS[name]) for name in account_variables(deployed.graph.runtime)]
    environment: list[dict[str, Any]] = [
        {"name": name, "valueFrom": {"fieldRef": {"fieldPath": path}}} for name, path in places
    ]
    return [
        *environment,
        *model_environment(deployed),
        *(_secret(deployed, name, key) for name, key in secrets),
    ]


def _secret(deployed: Deployed, name: str, key: str) -> dict[str, Any]:
    """Give a variable with a value of the Secret, of which all but the first may be absent."""
    reference: dict[str, Any] = {"name": deployed.secret_name, "key": key}
    if key != "secret":
        reference["optional"] = True
    return {"name": name, "valueFrom": {"secretKeyRef": reference}}


def _http(path: str, port: str, *, period_s: int, failures: int, scheme: str = "HTTP") -> dict[str, Any]:
    return {
        "httpGet": {"path": path, "port": port, "scheme": scheme},
        "periodSeconds": period_s,
        "timeoutSeconds": 3,
        "failureThreshold": failures,
    }


def _memory(role: RoleSpec) -> str:
    """Give the memory that a worker's pod asks for: 2 GiB, 6 GiB for the process of each GPU, and the KV tier in memory.

    There is no limit: pages of weights that are read count as the pod's, and none should end it.
    """
    host = role.kv.host
    num_bytes = 0 if host.is_multiple else host.num_bytes
    return f"{((2 + 6 * devices_of(role)) << 10) + math.ceil(num_bytes / (1 << 20))}Mi"


def _node_selector(role: RoleSpec) -> dict[str, str]:
    place = role.location_of(0)
    labels = {
        "topology.kubernetes.io/region": place.region,
        "topology.kubernetes.io/zone": place.zone,
        "kubernetes.io/hostname": place.host,
    }
    return {label: name for label, name in labels.items() if name}
