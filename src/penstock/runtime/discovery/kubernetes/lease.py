"""A worker's registration as a `coordination.k8s.io/v1` Lease, the object that Kubernetes has for who is alive.

The record is an annotation; the pod is the owner, so that the garbage collector removes the Lease with it. A withdrawn Lease has
no holder, as one that a leader releases.
"""

import base64
import binascii
import datetime as dt
import math
from dataclasses import dataclass
from typing import Self

from penstock.core.clock import wall_time_s
from penstock.core.ids import WorkerId
from penstock.runtime.kubernetes.client import LEASES, Object
from penstock.runtime.kubernetes.pod import Pod

DEPLOYMENT_LABEL = "penstock.dev/deployment"
RECORD = "penstock.dev/registration"
REFUSED_START = "penstock.dev/refused-start"
_NAME = "penstock-worker-"
_START = "penstock-start-"


@dataclass(frozen=True, slots=True)
class Seen:
    """A Lease as a watcher sees it.

    Attributes:
        record: the encoded registration; None where it is withdrawn.
        mark: changes with each renewal.
        age_s: since its renewal, by the clocks of two hosts.
    """

    worker_id: WorkerId
    record: bytes | None
    mark: str
    uid: str
    revision: str
    age_s: float

    @classmethod
    def of(cls, body: Object) -> Self | None:
        """Read a Lease; None for one of others."""
        metadata, spec = body["metadata"], body.get("spec") or {}
        worker_id = worker_of(metadata["name"])
        if worker_id is None:
            return None
        text = (metadata.get("annotations") or {}).get(RECORD, "")
        try:
            record = base64.b64decode(text, validate=True)
        except (binascii.Error, ValueError):
            record = b""  # refused as damaged
        renewed = spec.get("renewTime") or ""
        try:
            age_s = wall_time_s() - dt.datetime.fromisoformat(renewed).timestamp()
        except ValueError:
            age_s = math.inf
        return cls(
            worker_id,
            record if spec.get("holderIdentity") else None,
            f"{metadata['uid']} {renewed}",
            metadata["uid"],
            metadata["resourceVersion"],
            age_s,
        )


def lease_name(worker_id: WorkerId) -> str:
    return f"{_NAME}{worker_id:016x}"


def worker_of(name: str) -> WorkerId | None:
    """Give the worker of a Lease's name; None for Leases of others."""
    try:
        return WorkerId(int(name.removeprefix(_NAME), 16)) if name.startswith(_NAME) else None
    except ValueError:
        return None


def lease_of(
    worker_id: WorkerId, name: str, record: bytes, *, deployment: str, pod: Pod | None, ttl_s: float
) -> Object:
    """Make a worker's Lease, renewed now.

    Args:
        worker_id: names it.
        name: the worker's, for people who list Leases.
        record: the encoded registration.
        deployment: label by which watchers choose.
        pod: its owner; None for none.
        ttl_s: seconds after which it has lapsed.
    """
    metadata: Object = {
        "name": lease_name(worker_id),
        "labels": {DEPLOYMENT_LABEL: deployment, "app.kubernetes.io/managed-by": "penstock"},
        "annotations": {RECORD: base64.b64encode(record).decode()},
    }
    if pod is not None:
        metadata["ownerReferences"] = [_owner(pod)]
    return {
        "apiVersion": LEASES.api_version,
        "kind": LEASES.kind,
        "metadata": metadata,
        "spec": {
            "holderIdentity": name,
            "leaseDurationSeconds": max(1, math.ceil(ttl_s)),
            "renewTime": now(),
        },
    }


def start_lease(key: str, data: bytes, *, deployment: str, pod: Pod | None) -> Object:
    """Make the Lease that is the note of a refused start: it has no holder, and its process deletes it at once."""
    metadata: Object = {
        "name": f"{_START}{key}",
        "labels": {DEPLOYMENT_LABEL: deployment, "app.kubernetes.io/managed-by": "penstock"},
        "annotations": {REFUSED_START: base64.b64encode(data).decode()},
    }
    if pod is not None:
        metadata["ownerReferences"] = [_owner(pod)]
    return {"apiVersion": LEASES.api_version, "kind": LEASES.kind, "metadata": metadata, "spec": {}}


def start_of(body: Object) -> bytes | None:
    """Give the note in a Lease of `start_lease`; None for other Leases."""
    text = (body["metadata"].get("annotations") or {}).get(REFUSED_START, "")
    if not body["metadata"]["name"].startswith(_START):
        return None
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        return b""


def _owner(pod: Pod) -> Object:
    return {"apiVersion": "v1", "kind": "Pod", "name": pod.name, "uid": pod.uid}


def now() -> str:
    """Give the time as Kubernetes' MicroTime."""
    return dt.datetime.fromtimestamp(wall_time_s(), dt.UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
