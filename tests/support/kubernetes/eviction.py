"""The subresource `eviction` of pods: a deletion that keeps PodDisruptionBudgets."""

from tests.support.kubernetes.fields import Manager
from tests.support.kubernetes.problems import Refused
from tests.support.kubernetes.resources import Kind, Object
from tests.support.kubernetes.selectors import Selector
from tests.support.kubernetes.store import Name, Store

PODS = ("", "pods")
_MANAGER = Manager("kube-apiserver", "Update", "status")


def evict(store: Store, pods: Kind, name: Name, body: Object) -> None:
    """Delete a pod with its grace period, and note why in its conditions; raises Refused (429) where a budget forbids it."""
    pod = store.get(pods, name).body
    if "deletionTimestamp" not in pod["metadata"]:
        budgets = store.kinds.find("policy", "v1", "poddisruptionbudgets")
        assert budgets is not None
        for budget in store.all(budgets, name[0]):
            _check(store, pods, budget.body, pod)
    target = {
        "type": "DisruptionTarget", "status": "True", "reason": "EvictionByEvictionAPI",
        "message": "Eviction API: evicting",
    }  # fmt: skip

    def mark(live: Object) -> Object:
        status = live.get("status") or {}
        others = [each for each in status.get("conditions") or () if each["type"] != target["type"]]
        return {**live, "status": {**status, "conditions": [*others, target]}}

    store.change(pods, name, mark, _MANAGER, subresource="status")
    store.delete(pods, name, body.get("deleteOptions") or {})


def is_ready(pod: Object) -> bool:
    conditions = (pod.get("status") or {}).get("conditions") or ()
    return any(condition["type"] == "Ready" and condition["status"] == "True" for condition in conditions)


def _check(store: Store, pods: Kind, budget: Object, pod: Object) -> None:
    """Refuse where the budget has no disruption left, as its controller counts them."""
    labels = ",".join(f"{key}={value}" for key, value in budget["spec"]["selector"]["matchLabels"].items())
    selector = Selector(labels)
    if not selector.matches(pod):
        return
    covered = [
        each.body for each in store.all(pods, pod["metadata"]["namespace"]) if selector.matches(each.body)
    ]
    expected = _expected(store, covered)
    healthy = sum(is_ready(each) and "deletionTimestamp" not in each["metadata"] for each in covered)
    least = max(0, expected - budget["spec"]["maxUnavailable"])
    if healthy - is_ready(pod) < least:
        raise Refused(
            429, "TooManyRequests", "Cannot evict pod as it would violate the pod's disruption budget.",
            {"causes": [{"reason": "DisruptionBudget", "message": f"The disruption budget {budget['metadata']['name']} needs"
             f" {least} healthy pods and has {healthy} currently"}]},
        )  # fmt: skip


def _expected(store: Store, covered: list[Object]) -> int:
    """Add up what the workloads of some pods want."""
    wanted = {}
    for pod in covered:
        for owner in pod["metadata"].get("ownerReferences") or ():
            plural = {"Deployment": "deployments", "StatefulSet": "statefulsets"}.get(owner["kind"])
            kind = store.kinds.find("apps", "v1", plural) if plural else None
            if kind is not None:
                workload = store.get(kind, (pod["metadata"]["namespace"], owner["name"])).body
                wanted[owner["uid"]] = int(workload["spec"].get("replicas", 1))
    return sum(wanted.values())
