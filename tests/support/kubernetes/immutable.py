"""Fields that the API server answers with 422 when an update changes them, for the kinds that Penstock renders.

As in Kubernetes' validation of each kind; LeaderWorkerSet's webhook lets every field change that is rendered.
"""

import copy
import re
from collections.abc import Callable, Iterator
from typing import Any

from tests.support.kubernetes.resources import Kind, Object

_STATEFUL_SET = (
    "replicas", "ordinals", "template", "updateStrategy", "revisionHistoryLimit", "persistentVolumeClaimRetentionPolicy", "minReadySeconds",
)  # fmt: skip
_UNITS = {"": 0, "Ki": 1, "Mi": 2, "Gi": 3, "Ti": 4}


def causes(kind: Kind, before: Object, after: Object) -> list[str]:
    """Say what of an update is forbidden; empty where it may be done."""
    check = _CHECKS.get(kind.name)
    return [] if check is None else list(check(before, after))


def _deployment(before: Object, after: Object) -> Iterator[str]:
    if before["spec"].get("selector") != after.get("spec", {}).get("selector"):
        yield "spec.selector: Invalid value: field is immutable"


def _stateful_set(before: Object, after: Object) -> Iterator[str]:
    if _without(before["spec"], _STATEFUL_SET) != _without(after.get("spec", {}), _STATEFUL_SET):
        *others, last = (f"'{field}'" for field in _STATEFUL_SET)
        yield f"spec: Forbidden: updates to statefulset spec for fields other than {', '.join(others)} and {last} are forbidden"


def _config_map(before: Object, after: Object) -> Iterator[str]:
    if not before.get("immutable"):
        return
    for field in ("immutable", "data", "binaryData"):
        if before.get(field) != after.get(field):
            yield f"{field}: Forbidden: field is immutable when `immutable` is set"


def _service(before: Object, after: Object) -> Iterator[str]:
    was, now = (each.get("spec", {}).get("clusterIP") for each in (before, after))
    if now and was != now:
        yield f"spec.clusterIPs[0]: Invalid value: {now!r}: may not change once set"


def _claim(before: Object, after: Object) -> Iterator[str]:
    was, now = copy.deepcopy(before["spec"]), copy.deepcopy(after.get("spec", {}))
    sizes = [_bytes(spec.get("resources", {}).pop("requests", {}).get("storage", "0")) for spec in (was, now)]
    if was != now:
        yield "spec: Forbidden: spec is immutable after creation except resources.requests and volumeAttributesClassName for bound claims"
    if sizes[1] < sizes[0]:
        yield "spec.resources.requests.storage: Forbidden: field can not be less than status.capacity"


def _role_binding(before: Object, after: Object) -> Iterator[str]:
    if before.get("roleRef") != after.get("roleRef"):
        yield "roleRef: Invalid value: cannot change roleRef"


_CHECKS: dict[str, Callable[[Object, Object], Iterator[str]]] = {
    "Deployment": _deployment,
    "ReplicaSet": _deployment,
    "StatefulSet": _stateful_set,
    "ConfigMap": _config_map,
    "Secret": _config_map,
    "Service": _service,
    "PersistentVolumeClaim": _claim,
    "RoleBinding": _role_binding,
}


def _without(spec: Object, fields: tuple[str, ...]) -> dict[str, Any]:
    return {key: value for key, value in spec.items() if key not in fields}


def _bytes(size: str) -> int:
    number, unit = re.fullmatch(r"(\d+)(\D*)", size).groups()  # type: ignore[union-attr]
    return int(number) << 10 * _UNITS[unit]
