"""What the API server's objects do in a cluster: workloads make pods, a scheduler places them, a kubelet runs them.

One step of `Cluster.settle` is one round of all controllers; nothing waits and nothing runs by itself.
"""

import copy
import hashlib
import json
from dataclasses import dataclass, field
from typing import Any

from tests.support.kubernetes.autoscaler import autoscale
from tests.support.kubernetes.eviction import is_ready
from tests.support.kubernetes.fields import Manager
from tests.support.kubernetes.groups import groups_of, roll_groups
from tests.support.kubernetes.kubelet import Nodes
from tests.support.kubernetes.resources import Kind, Object
from tests.support.kubernetes.store import Store, Stored, now

_CONTROLLER = Manager("kube-controller-manager", "Update")
_KUBELET = Manager("kubelet", "Update", "status")
_HASH = "pod-template-hash"
TROUBLES: dict[str, tuple[str, str]] = {
    "image": ("ImagePullBackOff", 'Back-off pulling image "registry.invalid/penstock:1"'),
    "config": ("CreateContainerConfigError", 'secret "chat-secret" not found'),
    "crash": ("CrashLoopBackOff", "back-off 5m0s restarting failed container"),
}
"""Why a container waits, and what is said of it."""
_UNSCHEDULABLE = "0/3 nodes are available: 3 Insufficient nvidia.com/gpu."


@dataclass(slots=True)
class Cluster:
    """Plays the controllers for one API server's store.

    Attributes:
        troubles: what is wrong with new pods of a part: `unschedulable`, `image`, `config` or `crash`.
        held: parts whose ending pods go on draining.
        nodes: run pods as processes; None plays them.
        metrics: external metrics that autoscalers see.
    """

    store: Store
    namespace: str = "default"
    troubles: dict[str, str] = field(default_factory=dict)
    held: set[str] = field(default_factory=set)
    made: int = 0
    nodes: Nodes | None = None
    metrics: dict[str, float] = field(default_factory=dict)

    def kind(self, name: str) -> Kind:
        group, _, plural = name.rpartition("/")
        kind = self.store.kinds.find(group, "v1", plural)
        assert kind is not None
        return kind

    def pods(self, part: str | None = None) -> list[Object]:
        return [
            stored.body
            for stored in self.store.all(self.kind("pods"), self.namespace)
            if part in {None, stored.body["metadata"]["labels"].get("app.kubernetes.io/component")}
        ]

    def settle(self) -> None:
        """Run one round of all controllers."""
        for pod in self.pods():
            self._run_pod(pod)
        for plural in ("apps/deployments", "apps/statefulsets"):
            for stored in self.store.all(self.kind(plural), self.namespace):
                self._roll(self.kind(plural), stored)
        for stored in groups_of(self.store, self.namespace):
            roll_groups(self, stored)
        if self.metrics:
            autoscale(self.store, self.namespace, self.metrics)

    def _roll(self, kind: Kind, stored: Stored) -> None:
        """Bring a workload's pods a step nearer to its template and number, one new or old pod at a time."""
        spec = stored.body["spec"]
        revision = hashlib.sha256(json.dumps(spec["template"], sort_keys=True).encode()).hexdigest()[:8]
        part = stored.body["metadata"]["labels"]["app.kubernetes.io/component"]
        owned = [
            pod
            for pod in self.pods(part)
            if any(owner["uid"] == stored.uid for owner in pod["metadata"].get("ownerReferences", ()))
        ]
        alive = [pod for pod in owned if "deletionTimestamp" not in pod["metadata"]]
        new = [pod for pod in alive if pod["metadata"]["labels"][_HASH] == revision]
        old = [pod for pod in alive if pod not in new]
        wanted = int(spec.get("replicas", 1))
        ready = [pod for pod in alive if is_ready(pod)]
        surge = spec.get("strategy", {}).get("rollingUpdate", {}).get("maxSurge", 0)
        if len(new) < wanted and len(alive) < wanted + (surge if old else 0):
            for _ in range(min(wanted - len(new), wanted + (surge if old else 0) - len(alive))):
                self._make_pod(stored, spec["template"], revision)
        elif old and (len(ready) > wanted - (0 if surge else 1) or not is_ready(old[0])):
            self.store.delete(self.kind("pods"), (self.namespace, old[0]["metadata"]["name"]), {})
        elif len(new) > wanted:
            first = sorted(new, key=lambda pod: (is_ready(pod), _deletion_cost(pod), -new.index(pod)))
            for pod in first[: len(new) - wanted]:
                self.store.delete(self.kind("pods"), (self.namespace, pod["metadata"]["name"]), {})
        status = {
            "observedGeneration": stored.body["metadata"]["generation"],
            "replicas": len(alive),
            "updatedReplicas": len(new),
            "readyReplicas": len(ready),
        }
        name = (self.namespace, stored.body["metadata"]["name"])
        self.store.change(
            kind, name, lambda body: {**body, "status": status}, _CONTROLLER, subresource="status"
        )

    def _make_pod(self, owner: Stored, template: Object, revision: str) -> None:
        self.made += 1
        metadata = owner.body["metadata"]
        body: Object = {
            "metadata": {
                "name": f"{metadata['name']}-{revision}-{self.made}",
                "labels": {**template["metadata"]["labels"], _HASH: revision},
                "ownerReferences": [
                    {
                        "apiVersion": owner.body["apiVersion"], "kind": owner.body["kind"], "name": metadata["name"],
                        "uid": owner.uid, "controller": True,
                    }
                ],
            },
            "spec": copy.deepcopy(template["spec"]),
        }  # fmt: skip
        self.store.create(self.kind("pods"), self.namespace, body, _CONTROLLER)

    def _run_pod(self, pod: Object) -> None:
        """Schedule and start a pod, or end one that is deleted."""
        name = pod["metadata"]["name"]
        part = pod["metadata"]["labels"]["app.kubernetes.io/component"]
        has_trouble = part in self.troubles and not is_ready(pod)
        if self.nodes is not None and not (has_trouble and "deletionTimestamp" not in pod["metadata"]):
            self.nodes.sync(pod)
            return
        if "deletionTimestamp" in pod["metadata"]:
            if part not in self.held:
                self.store.delete(self.kind("pods"), (self.namespace, name), {"gracePeriodSeconds": 0})
            return
        trouble = None if is_ready(pod) else self.troubles.get(part)
        if trouble == "unschedulable":
            why = {"reason": "Unschedulable", "message": _UNSCHEDULABLE}
            conditions = [{"type": "PodScheduled", "status": "False", **why}]
            self.set_status(name, phase="Pending", conditions=conditions)
            return
        conditions = [
            {"type": "PodScheduled", "status": "True"},
            {"type": "Ready", "status": "False" if trouble else "True"},
        ]
        container = {"name": "penstock", "image": pod["spec"]["containers"][0]["image"], "restartCount": 0}
        if trouble is None:
            container |= {"ready": True, "state": {"running": {"startedAt": now()}}}
        else:
            reason, message = TROUBLES[trouble]
            container |= {"ready": False, "state": {"waiting": {"reason": reason, "message": message}}}
        if trouble == "crash":
            ended = {"exitCode": 137, "reason": "OOMKilled"}
            container |= {"restartCount": 6, "lastState": {"terminated": ended}}
        if not (trouble is None and is_ready(pod)):
            self.set_status(name, phase="Running", conditions=conditions, containerStatuses=[container])

    def set_status(self, name: str, **fields: Any) -> None:
        """Set these fields of a pod's status."""
        self.store.change(
            self.kind("pods"),
            (self.namespace, name),
            lambda body: {**body, "status": {**(body.get("status") or {}), **fields}},
            _KUBELET,
            subresource="status",
        )


def _deletion_cost(pod: Object) -> int:
    annotations = pod["metadata"].get("annotations") or {}
    return int(annotations.get("controller.kubernetes.io/pod-deletion-cost", 0))
