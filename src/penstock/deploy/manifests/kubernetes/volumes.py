"""Volumes of pods: the graph's files, scratch, the cache of weights, mounts, disk tiers."""

from typing import Any

from penstock.core.types.instances import Role
from penstock.deploy.manifests.kubernetes.deployed import Deployed
from penstock.deploy.manifests.options import CACHE_PATH, GRAPH_PATH
from penstock.deploy.manifests.paths import disk_directory, weights_from_hub
from penstock.graph import RoleSpec

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
