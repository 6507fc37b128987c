"""The workloads of a graph: a Deployment, StatefulSet or LeaderWorkerSet for each part, with its pods, volumes and budgets."""

import math
from collections.abc import Iterator
from typing import Any

from penstock.core.errors import ConfigError
from penstock.core.types.instances import Role
from penstock.deploy.card import frontend_drain_s, worker_drain_s
from penstock.deploy.identity import SECRET_VARIABLE
from penstock.deploy.manifests.deployed import FRONTEND, HARDWARE_LABEL, WORKER_LABEL, Deployed
from penstock.deploy.manifests.options import CACHE_PATH, GRAPH_PATH
from penstock.deploy.manifests.pod_graph import (
    GRAPH_FILE,
    KV_PORT,
    LEADER_PORT,
    REQUEST_PORT,
    account_variables,
    disk_directory,
    frontend_port,
    pods_of,
    probe_port,
    weights_from_hub,
    workers_per_pod,
)
from penstock.deploy.state import ADMIN_TOKEN_VARIABLE
from penstock.deploy.supervisor.local_part import PLANNER
from penstock.deploy.supervisor.resources import devices_of
from penstock.engine.registry import engine_kind
from penstock.frontend.limits.keys import API_KEY_VARIABLE
from penstock.graph import RoleSpec
from penstock.perf.hardware import find_hardware
from penstock.runtime.credentials import EVENTS_VARIABLE, REGISTRY_VARIABLE

CACHE_OWNER = "cache-owner"
DISK_VOLUME, SCRATCH, SHARED_MEMORY = "kv-disk", "scratch", "shared-memory"

_SHARED_MEMORY_SIZE = "8Gi"
"""Of engines' message queues and of NCCL; without a limit it could grow to the node's memory. KV tiers in memory are elsewhere."""


def volume_mounts(deployed: Deployed, part: str) -> list[dict[str, Any]]:
    """Give where a part's container has its volumes; the root of the image is read-only."""
    mounts: list[dict[str, Any]] = [
        {"name": "graph", "mountPath": str(GRAPH_PATH), "readOnly": True},
        {"name": SCRATCH, "mountPath": "/tmp"},  # noqa: S108 - the pod's own
    ]
    role = _role(deployed, part)
    if role is not None:
        mounts.append({"name": SHARED_MEMORY, "mountPath": "/dev/shm"})  # noqa: S108 - likewise
        if deployed.has_own_disk(role):
            mounts.append({"name": DISK_VOLUME, "mountPath": disk_directory(role)})
    if weights_from_hub(deployed.graph):
        mounts.append({"name": "cache", "mountPath": str(CACHE_PATH)})
    for number, mount in enumerate(deployed.options.mounts):
        each = {"name": f"mount-{number}", "mountPath": mount.path}
        mounts.append(each if mount.is_writable else each | {"readOnly": True})
    return mounts


def volumes(deployed: Deployed, role: RoleSpec | None) -> list[dict[str, Any]]:
    """Give the volumes of a part's pods; the disk tier's is a StatefulSet's own."""
    made: list[dict[str, Any]] = [
        {"name": "graph", "configMap": {"name": deployed.config_name}},
        {"name": SCRATCH, "emptyDir": {}},
    ]
    if role is not None:
        made.append(
            {"name": SHARED_MEMORY, "emptyDir": {"medium": "Memory", "sizeLimit": _SHARED_MEMORY_SIZE}}
        )
    if weights_from_hub(deployed.graph):
        made.append({"name": "cache"} | _cache(deployed))
    for number, mount in enumerate(deployed.options.mounts):
        source: dict[str, Any] = {
            "secret": {"secret": {"secretName": mount.name}},
            "configmap": {"configMap": {"name": mount.name}},
            "claim": {"persistentVolumeClaim": {"claimName": mount.name}},
            "host": {"hostPath": {"path": mount.name, "type": "Directory"}},
        }[mount.kind]
        made.append({"name": f"mount-{number}"} | source)
    return made


def cache_claim(deployed: Deployed) -> dict[str, Any] | None:
    """Give the claim of the cache, if it is ours."""
    cache = deployed.options.cache
    if cache.kind != "size" or not weights_from_hub(deployed.graph):
        return None
    spec = {"accessModes": ["ReadWriteMany"], "resources": {"requests": {"storage": cache.name}}}
    return deployed.object("v1", "PersistentVolumeClaim", f"{deployed.name}-cache", spec=spec)


def cache_owner(deployed: Deployed, image: str, user: int) -> list[dict[str, Any]]:
    """Give the container that lets `user` write to a cache of the node, whose directory the kubelet makes for root; none for others."""
    if deployed.options.cache.kind != "host" or not weights_from_hub(deployed.graph):
        return []
    security = {
        "runAsUser": 0,
        "runAsNonRoot": False,
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"], "add": ["CHOWN"]},
    }
    return [
        {
            "name": CACHE_OWNER,
            "image": image,
            "command": ["/bin/chown", f"{user}:{user}", str(CACHE_PATH)],
            "resources": {"requests": {"cpu": "10m", "memory": "16Mi"}},
            "securityContext": security,
            "volumeMounts": [{"name": "cache", "mountPath": str(CACHE_PATH)}],
        }
    ]


def disk_claim(deployed: Deployed, role: RoleSpec) -> dict[str, Any]:
    """Give the claim of one worker's disk tier: its size and a tenth more, for the file system."""
    mebibytes = -(-role.kv.disk.size.num_bytes * 11 // 10 // (1 << 20)) + 1
    return {
        "metadata": {"name": DISK_VOLUME, "labels": deployed.selector()},
        "spec": {
            "accessModes": ["ReadWriteOnce"],
            "resources": {"requests": {"storage": f"{mebibytes}Mi"}},
        },
    }


def _cache(deployed: Deployed) -> dict[str, Any]:
    cache = deployed.options.cache
    if cache.kind == "host":
        return {"hostPath": {"path": cache.name, "type": "DirectoryOrCreate"}}
    if cache.kind == "pod":
        return {"emptyDir": {}}
    return {
        "persistentVolumeClaim": {
            "claimName": cache.name if cache.kind == "claim" else f"{deployed.name}-cache"
        }
    }


def _role(deployed: Deployed, part: str) -> RoleSpec | None:
    return deployed.roles[Role(part)] if part in {role.value for role in deployed.roles} else None


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


API, KIND = "leaderworkerset.x-k8s.io/v1", "LeaderWorkerSet"
INDEX_LABEL = "leaderworkerset.sigs.k8s.io/worker-index"
"""Label with a pod's index in its group; 0 is the leader."""
_GROUP = "leaderworkerset.sigs.k8s.io/group-key"
_ZONE = "topology.kubernetes.io/zone"


def leader_worker_set(
    deployed: Deployed, name: Role, role: RoleSpec, leader: dict[str, Any]
) -> dict[str, Any]:
    """Make the LeaderWorkerSet; its `replicas` are the role's workers.

    Args:
        deployed: the deployment that is rendered.
        name: of the role.
        role: settings of the role.
        leader: template of the leaders' pods.
    """
    follower = follower_pod(deployed, name, role)
    leader["spec"]["topologySpreadConstraints"] = [_spread_leaders(deployed, name)]
    del follower["spec"]["topologySpreadConstraints"]  # followers go to their leader's zone
    for template in (leader, follower):
        template["spec"]["affinity"] = _together(deployed, name)
    return deployed.object(
        API,
        KIND,
        deployed.part_name(name),
        name.value,
        spec={
            "replicas": pods_of(role),
            "startupPolicy": "LeaderCreated",
            "networkConfig": {"subdomainPolicy": "Shared"},
            "rolloutStrategy": {
                "type": "RollingUpdate",
                "rollingUpdateConfiguration": {"maxUnavailable": 1, "maxSurge": 0},  # spare GPUs are rare
            },
            "leaderWorkerTemplate": {
                "size": role.nodes,
                "restartPolicy": "RecreateGroupOnPodRestart",
                "leaderTemplate": leader,
                "workerTemplate": follower,
            },
        },
    )


def _spread_leaders(deployed: Deployed, name: Role) -> dict[str, Any]:
    """Prefer to spread the groups over zones."""
    return {
        "labelSelector": {"matchLabels": deployed.selector(name.value) | {INDEX_LABEL: "0"}},
        "matchLabelKeys": REVISIONS,
        "maxSkew": 1,
        "topologyKey": _ZONE,
        "whenUnsatisfiable": "ScheduleAnyway",
    }


def _together(deployed: Deployed, name: Role) -> dict[str, Any]:
    """Prefer one zone for all pods of a group, and a separate node for each pod."""
    selector = {"matchLabels": deployed.selector(name.value)}
    term = {"labelSelector": selector, "matchLabelKeys": [_GROUP]}
    own_nodes = {"labelSelector": selector, "topologyKey": "kubernetes.io/hostname"}
    return {
        "podAffinity": {
            "preferredDuringSchedulingIgnoredDuringExecution": [
                {"weight": 100, "podAffinityTerm": term | {"topologyKey": _ZONE}}
            ]
        },
        "podAntiAffinity": {
            "preferredDuringSchedulingIgnoredDuringExecution": [{"weight": 50, "podAffinityTerm": own_nodes}]
        },
    }


_STARTS_S_EXTRA = 600
"""Of a pod before its processes start: scheduling, pulling the image."""
_HISTORY = 3


def workloads(deployed: Deployed) -> Iterator[dict[str, Any]]:
    """Give the workload of frontends and of each role, each with its disruption budget."""
    yield deployment(
        deployed, FRONTEND, deployed.graph.frontend.processes, frontend_pod(deployed), has_spare=True
    )
    for name, role in deployed.roles.items():
        pod = worker_pod(deployed, name, role)
        if role.nodes > 1:
            yield leader_worker_set(deployed, name, role, pod)
        elif deployed.has_own_disk(role):
            yield _stateful_set(deployed, name.value, role, pod)
        else:
            has_spare = not deployed.gpus(role)
            yield deployment(deployed, name.value, pods_of(role), pod, has_spare=has_spare)


def budgets(deployed: Deployed) -> Iterator[dict[str, Any]]:
    """Let a node's drain take one pod of each part at a time."""
    for part in (FRONTEND, *(name.value for name in deployed.roles)):
        spec = {"maxUnavailable": 1, "selector": {"matchLabels": deployed.selector(part)}}
        yield deployed.object("policy/v1", "PodDisruptionBudget", deployed.part_name(part), part, spec=spec)


def check_one_node(deployed: Deployed) -> None:
    """Check that the GPUs of each pod are on one node.

    Raises:
        ConfigError: a worker has more GPUs on a node than a machine of its hardware.
    """
    for name, role in deployed.roles.items():
        most, gpus = find_hardware(role.hardware).host_devices, deployed.gpus(role)
        if most is not None and gpus > most:
            nodes = -(-role.devices // most)
            spans = (
                engine_kind(role.engine).follow is not None
                and name is Role.AGGREGATED
                and role.data_parallel == 1
            )
            fix = (
                f"set roles.{name}.nodes: {nodes}"
                if spans
                else "start such workers as servers of their engine, and name these by engine openai"
            )
            raise ConfigError(
                f"roles.{name}: {gpus} GPUs on a node: a machine with {role.hardware} has {most}; {fix}, or lower the parallelism"
            )


def deployment(
    deployed: Deployed, part: str, replicas: int, pod: dict[str, Any], *, has_spare: bool
) -> dict[str, Any]:
    """Make a Deployment.

    Args:
        deployed: whose it is.
        part: its pods.
        replicas: their number.
        pod: their template.
        has_spare: whether a new pod may start before an old one ends; GPUs are seldom free for it.
    """
    surge, unavailable = (1, 0) if has_spare else (0, 1)
    return deployed.object(
        "apps/v1",
        "Deployment",
        deployed.part_name(part),
        part,
        spec={
            "replicas": replicas,
            "revisionHistoryLimit": _HISTORY,
            "progressDeadlineSeconds": _start_limit_s(deployed),
            "selector": {"matchLabels": deployed.selector(part)},
            "strategy": {
                "type": "RollingUpdate",
                "rollingUpdate": {"maxSurge": surge, "maxUnavailable": unavailable},
            },
            "template": pod,
        },
    )


def _stateful_set(deployed: Deployed, part: str, role: RoleSpec, pod: dict[str, Any]) -> dict[str, Any]:
    return deployed.object(
        "apps/v1",
        "StatefulSet",
        deployed.part_name(part),
        part,
        spec={
            "replicas": pods_of(role),
            "revisionHistoryLimit": _HISTORY,
            "serviceName": deployed.part_name("workers"),
            "podManagementPolicy": "Parallel",
            "selector": {"matchLabels": deployed.selector(part)},
            "updateStrategy": {"type": "RollingUpdate"},
            "persistentVolumeClaimRetentionPolicy": {"whenDeleted": "Delete", "whenScaled": "Delete"},
            "template": pod,
            "volumeClaimTemplates": [disk_claim(deployed, role)],
        },
    )


def _start_limit_s(deployed: Deployed) -> int:
    return int(deployed.graph.supervision.start_timeout_s) + _STARTS_S_EXTRA
