"""The subresource `scale`."""

from typing import Any

from tests.support.kubernetes.problems import invalid, stale
from tests.support.kubernetes.resources import Kind, Object


def scale_of(kind: Kind, body: Object) -> Object:
    """Give the `autoscaling/v1` Scale of an object."""
    assert kind.scale is not None
    spec_path, status_path, selector_path = kind.scale
    metadata = {
        key: body["metadata"].get(key)
        for key in ("name", "namespace", "uid", "resourceVersion", "creationTimestamp")
    }
    selector = _at(body, selector_path) if selector_path else None
    if isinstance(selector, dict):
        selector = ",".join(f"{key}={value}" for key, value in selector.get("matchLabels", {}).items())
    status = {"replicas": _at(body, status_path) or 0}
    if selector:
        status["selector"] = selector
    return {
        "kind": "Scale", "apiVersion": "autoscaling/v1", "metadata": metadata,
        "spec": {"replicas": _at(body, spec_path) or 0}, "status": status,
    }  # fmt: skip


def edited_scale(kind: Kind, live: Object, given: Object, *, is_patch: bool) -> Object:
    """Set an object's replicas as a `Scale`, whole or as a merge patch, says; raises Refused (409, 422)."""
    assert kind.scale is not None
    revision = given.get("metadata", {}).get("resourceVersion")
    if revision and revision != live["metadata"]["resourceVersion"]:
        raise stale(kind.plural, live["metadata"]["name"])
    replicas = given.get("spec", {}).get("replicas", _at(live, kind.scale[0]) if is_patch else 0)
    if not isinstance(replicas, int) or replicas < 0:
        raise invalid(
            "Scale",
            live["metadata"]["name"],
            [f"spec.replicas: Invalid value: {replicas}: should be non-negative"],
        )
    *path, last = kind.scale[0].strip(".").split(".")
    node: Any = live
    for step in path:
        node = node.setdefault(step, {})
    node[last] = replicas
    return live


def _at(body: Object, path: str) -> Any:
    node: Any = body
    for step in path.strip(".").split("."):
        node = node.get(step) if isinstance(node, dict) else None
    return node
