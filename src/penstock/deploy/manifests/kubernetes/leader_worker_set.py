"""The LeaderWorkerSet of a role with `nodes`: one group of pods for each worker."""

from typing import Any

from penstock.core.types.instances import Role
from penstock.deploy.manifests.kubernetes.deployed import Deployed
from penstock.deploy.manifests.kubernetes.pods import REVISIONS, follower_pod
from penstock.deploy.manifests.pod_graph import pods_of
from penstock.graph import RoleSpec

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
