"""What LeaderWorkerSet's controller does: a leader and its followers for each group, made anew as a whole when a pod of it goes."""

import copy
import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.support.kubernetes.eviction import is_ready
from tests.support.kubernetes.fields import Manager
from tests.support.kubernetes.resources import Object
from tests.support.kubernetes.store import Store, Stored

_CONTROLLER = Manager("lws-controller-manager", "Update")
_KIND = ("leaderworkerset.x-k8s.io", "v1", "leaderworkersets")
_LABELS = "leaderworkerset.sigs.k8s.io/"
_GROUP, _INDEX, _HASH = f"{_LABELS}group-index", f"{_LABELS}worker-index", f"{_LABELS}template-revision-hash"
_REVISION = "controller-revision-hash"
_SCHEMA = Path(__file__).parents[2] / "data" / "leader_worker_set.json"


def definition() -> Object:
    """Give the CustomResourceDefinition of LeaderWorkerSet."""
    version = {
        "name": "v1", "served": True, "storage": True, "schema": {"openAPIV3Schema": json.loads(_SCHEMA.read_text())},
        "subresources": {"status": {}, "scale": {
            "specReplicasPath": ".spec.replicas", "statusReplicasPath": ".status.replicas",
            "labelSelectorPath": ".status.hpaPodSelector",
        }},
    }  # fmt: skip
    names = {"plural": _KIND[2], "singular": "leaderworkerset", "kind": "LeaderWorkerSet"}
    return {
        "apiVersion": "apiextensions.k8s.io/v1", "kind": "CustomResourceDefinition",
        "metadata": {"name": f"{_KIND[2]}.{_KIND[0]}"},
        "spec": {"group": _KIND[0], "scope": "Namespaced", "names": names, "versions": [version]},
    }  # fmt: skip


def groups_of(store: Store, namespace: str) -> Iterator[Stored]:
    """Give the LeaderWorkerSets of a namespace, none where the cluster has no such kind."""
    kind = store.kinds.find(*_KIND)
    if kind is not None:
        yield from store.all(kind, namespace)


def roll_groups(cluster: Any, stored: Stored) -> None:
    """Bring a LeaderWorkerSet's pods a step nearer to its templates and number, one group at a time."""
    spec = stored.body["spec"]
    group = spec["leaderWorkerTemplate"]
    revision = hashlib.sha256(json.dumps(group, sort_keys=True).encode()).hexdigest()[:10]
    owned: dict[int, list[Object]] = {}
    for pod in cluster.pods():
        if any(owner["uid"] == stored.uid for owner in pod["metadata"].get("ownerReferences", ())):
            owned.setdefault(int(pod["metadata"]["labels"][_GROUP]), []).append(pod)
    ready = {
        index
        for index, pods in owned.items()
        if len(pods) == group["size"] and all(map(is_ready, pods)) and not any(map(_is_ending, pods))
    }
    rolls = False
    for index in range(spec["replicas"]):
        pods = owned.get(index, [])
        is_old = any(pod["metadata"]["labels"][_HASH] != revision for pod in pods)
        if not pods:
            _make_group(cluster, stored, index, revision)
        elif len(pods) < group["size"] or any(map(_is_ending, pods)) or (is_old and not rolls):
            rolls = rolls or is_old
            _end(cluster, pods)
    for index in owned.keys() - set(range(spec["replicas"])):
        _end(cluster, owned[index])
    status = {
        "observedGeneration": stored.body["metadata"]["generation"],
        "replicas": len(owned),
        "readyReplicas": len(ready),
        "updatedReplicas": sum(
            all(pod["metadata"]["labels"][_HASH] == revision for pod in pods) for pods in owned.values()
        ),
    }
    kind = cluster.store.kinds.find(*_KIND)
    name = (cluster.namespace, stored.body["metadata"]["name"])
    cluster.store.change(
        kind, name, lambda body: {**body, "status": status}, _CONTROLLER, subresource="status"
    )


def _is_ending(pod: Object) -> bool:
    return "deletionTimestamp" in pod["metadata"]


def _end(cluster: Any, pods: list[Object]) -> None:
    for pod in pods:
        if not _is_ending(pod):
            cluster.store.delete(cluster.kind("pods"), (cluster.namespace, pod["metadata"]["name"]), {})


def _make_group(cluster: Any, stored: Stored, index: int, revision: str) -> None:
    metadata, group = stored.body["metadata"], stored.body["spec"]["leaderWorkerTemplate"]
    for number in range(group["size"]):
        template = group["workerTemplate" if number else "leaderTemplate"]
        owner = f"{metadata['name']}-{index}" if number else metadata["name"]  # the StatefulSet
        labels = {_GROUP: str(index), _INDEX: str(number), _HASH: revision, _REVISION: f"{owner}-{revision}"}
        body: Object = {
            "metadata": {
                "name": f"{metadata['name']}-{index}" + (f"-{number}" if number else ""),
                "labels": {**template["metadata"]["labels"], **labels},
                "ownerReferences": [
                    {
                        "apiVersion": stored.body["apiVersion"], "kind": stored.body["kind"], "name": metadata["name"],
                        "uid": stored.uid, "controller": True,
                    }
                ],
            },
            "spec": copy.deepcopy(template["spec"]),
        }  # fmt: skip
        cluster.store.create(cluster.kind("pods"), cluster.namespace, body, _CONTROLLER)
