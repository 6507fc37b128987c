"""Plays the controller of HorizontalPodAutoscalers: external metrics with an average value, the tolerance, and both bounds.

It reads and writes its target by the subresource `scale` alone. Not kept: other metrics, windows and policies of `behavior`.
"""

import functools
import math
from collections.abc import Mapping

from tests.support.kubernetes.fields import Manager
from tests.support.kubernetes.resources import Kind, Object
from tests.support.kubernetes.scale import edited_scale, scale_of
from tests.support.kubernetes.store import Store

_MANAGER = Manager("kube-controller-manager", "Update", "scale")
_TOLERANCE = 0.1


def autoscale(store: Store, namespace: str, values: Mapping[str, float]) -> None:
    """Run each autoscaler once; `values` are the external metrics that there are."""
    autoscalers = store.kinds.find("autoscaling", "v2", "horizontalpodautoscalers")
    assert autoscalers is not None
    for stored in store.all(autoscalers, namespace):
        spec = stored.body["spec"]
        kind = _target_kind(store, spec["scaleTargetRef"])
        name = (namespace, spec["scaleTargetRef"]["name"])
        scale = scale_of(kind, store.get(kind, name).body)
        assert scale["status"]["selector"], "an autoscaler refuses a target that selects no pods"
        wanted = _wanted(spec, scale["status"]["replicas"], values)
        if wanted is not None and wanted != scale["spec"]["replicas"]:
            edit = functools.partial(_scaled, kind, wanted)
            store.change(kind, name, edit, _MANAGER)


def _scaled(kind: Kind, replicas: int, live: Object) -> Object:
    return edited_scale(kind, live, {"spec": {"replicas": replicas}}, is_patch=True)


def _wanted(spec: Object, current: int, values: Mapping[str, float]) -> int | None:
    """Give the number of pods that the largest metric asks for; None where there is no metric."""
    wanted = []
    for metric in spec["metrics"]:
        external = metric["external"]
        if (value := values.get(external["metric"]["name"])) is not None:
            target = float(external["target"]["averageValue"])
            is_near = current > 0 and abs(value / (target * current) - 1) <= _TOLERANCE
            wanted.append(current if is_near else math.ceil(value / target))
    if not wanted:
        return None
    return int(min(max(*wanted, spec["minReplicas"]), spec["maxReplicas"]))


def _target_kind(store: Store, reference: Object) -> Kind:
    group, _, version = reference["apiVersion"].rpartition("/")
    (kind,) = (each for each in store.kinds.of(group, version) if each.name == reference["kind"])
    return kind
