"""What keeps pods running: Deployments, a StatefulSet where a worker keeps KV on disk, and how many may be away at once."""

from collections.abc import Iterator
from typing import Any

from penstock.core.errors import ConfigError
from penstock.core.types.instances import Role
from penstock.deploy.manifests.kubernetes.deployed import FRONTEND, Deployed
from penstock.deploy.manifests.kubernetes.leader_worker_set import leader_worker_set
from penstock.deploy.manifests.kubernetes.pods import frontend_pod, worker_pod
from penstock.deploy.manifests.kubernetes.volumes import disk_claim
from penstock.deploy.manifests.pod_graph import pods_of
from penstock.engine.registry import engine_kind
from penstock.graph import RoleSpec
from penstock.perf.model.hardware import find_hardware

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
