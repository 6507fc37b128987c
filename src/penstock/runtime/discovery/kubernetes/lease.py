"""A worker's registration: two `coordination.k8s.io/v1` Leases, of which one says that it lives and the other has its record.

Only the small one is renewed, so that a renewal moves no record. All workers of a namespace together renew at a rate that hardly grows
with their number: a Lease says itself for how long it is valid. The pod is the owner, so that the garbage collector removes both with it.
A withdrawn Lease has no holder, as one that a leader releases.
"""

import base64
import datetime as dt
import math
import re
from dataclasses import dataclass
from typing import Self

from penstock.core.clock import wall_time_s
from penstock.core.ids import WorkerId
from penstock.runtime.kubernetes.client import LEASES, Object
from penstock.runtime.kubernetes.pod import Pod

DEPLOYMENT_LABEL = "penstock.dev/deployment"
RECORD = "penstock.dev/registration"
REFUSED_START = "penstock.dev/refused-start"
_NAME, _RECORD_NAME = "penstock-worker-", "penstock-record-"
_RENEWALS_PER_S, _WORKERS_FOR_ONE_MORE = 0.7, 300
"""All workers of a namespace together renew about 0.7 times a second, and once more for every 300 of them."""
_INT32_MAX = 2**31 - 1
_NUMBER = re.compile("[0-9a-f]{16}")
_START = "penstock-start-"


def renewal_s(num_workers: int, ttl_s: float) -> float:
    """Give how often a worker renews its Lease, so that all of a namespace do not overload the API server: three times in `ttl_s` where they are few."""
    per_s = _RENEWALS_PER_S + num_workers / _WORKERS_FOR_ONE_MORE
    return max(ttl_s / 3, num_workers / per_s)


@dataclass(frozen=True, slots=True)
class Seen:
    """A worker's Lease as a watcher sees it.

    Attributes:
        is_held: False where it is withdrawn.
        mark: changes with each renewal.
        age_s: since its renewal, by the clocks of two hosts.
        valid_s: after its last renewal; 0 where it does not say.
    """

    worker_id: WorkerId
    is_held: bool
    mark: str
    uid: str
    revision: str
    age_s: float
    valid_s: float

    @classmethod
    def of(cls, body: Object) -> Self | None:
        """Read a Lease; None for one of others. What is not as a worker writes it counts as not said."""
        metadata, spec = body["metadata"], _mapping(body.get("spec"))
        worker_id = _worker_of(metadata["name"], _NAME)
        if worker_id is None:
            return None
        renewed, valid_s = spec.get("renewTime"), spec.get("leaseDurationSeconds")
        try:
            age_s = wall_time_s() - dt.datetime.fromisoformat(renewed or "").timestamp()
        except (TypeError, ValueError, OverflowError):
            age_s = math.inf
        uid = str(metadata.get("uid"))
        return cls(
            worker_id,
            bool(spec.get("holderIdentity")),
            f"{uid} {renewed}",
            uid,
            metadata["resourceVersion"],
            age_s,
            float(min(max(0, valid_s), _INT32_MAX)) if isinstance(valid_s, int) else 0.0,
        )


def record_in(body: Object) -> tuple[WorkerId, bytes] | None:
    """Give the worker and the encoded registration of a Lease that has one; of what cannot be read the bytes are empty."""
    metadata = body["metadata"]
    name = metadata["name"]  # a release before keeps the record in the Lease that it renews
    worker_id = _worker_of(name, _RECORD_NAME if name.startswith(_RECORD_NAME) else _NAME)
    text = _mapping(metadata.get("annotations")).get(RECORD)
    if worker_id is None or text is None:
        return None
    return worker_id, _decoded(text)  # one that is empty is refused as damaged


def lease_name(worker_id: WorkerId) -> str:
    return f"{_NAME}{worker_id:016x}"


def record_name(worker_id: WorkerId) -> str:
    return f"{_RECORD_NAME}{worker_id:016x}"


def _worker_of(name: str, prefix: str) -> WorkerId | None:
    """Give the worker of a Lease's name; None for Leases of others, whose numbers are not written as workers write them."""
    number = name.removeprefix(prefix)
    is_worker = name.startswith(prefix) and _NUMBER.fullmatch(number) is not None
    return WorkerId(int(number, 16)) if is_worker else None


def lease_of(worker_id: WorkerId, name: str, *, deployment: str, pod: Pod | None, valid_s: float) -> Object:
    """Make a worker's Lease, renewed now.

    Args:
        worker_id: names it.
        name: the worker's, for people who list Leases.
        deployment: label by which watchers choose.
        pod: its owner; None for none.
        valid_s: seconds after which it has lapsed.
    """
    body = _lease(lease_name(worker_id), deployment, pod)
    return body | {"spec": {"holderIdentity": name, **renewed(valid_s)}}


def record_of(worker_id: WorkerId, record: bytes, *, deployment: str, pod: Pod | None) -> Object:
    """Make the Lease that has a worker's record, which nobody holds or renews; the arguments are as for `lease_of`."""
    return _lease(record_name(worker_id), deployment, pod, **{RECORD: base64.b64encode(record).decode()})


def renewed(valid_s: float) -> Object:
    """Give the fields of a Lease's `spec` that a renewal sets."""
    return {"renewTime": now(), "leaseDurationSeconds": max(1, math.ceil(valid_s))}


def start_lease(key: str, data: bytes, *, deployment: str, pod: Pod | None) -> Object:
    """Make the Lease that is the note of a refused start: it has no holder, and its process deletes it at once."""
    return _lease(f"{_START}{key}", deployment, pod, **{REFUSED_START: base64.b64encode(data).decode()})


def start_of(body: Object) -> bytes | None:
    """Give the note in a Lease of `start_lease`; None for other Leases."""
    if not body["metadata"]["name"].startswith(_START):
        return None
    return _decoded(_mapping(body["metadata"].get("annotations")).get(REFUSED_START, ""))


def _decoded(text: object) -> bytes:
    """Decode an annotation; empty for what is not base64."""
    try:
        return base64.b64decode(text, validate=True) if isinstance(text, str) else b""
    except ValueError:
        return b""


def _mapping(found: object) -> Object:
    return found if isinstance(found, dict) else {}


def _lease(name: str, deployment: str, pod: Pod | None, **annotations: str) -> Object:
    metadata: Object = {
        "name": name,
        "labels": {DEPLOYMENT_LABEL: deployment, "app.kubernetes.io/managed-by": "penstock"},
    }
    if annotations:
        metadata["annotations"] = annotations
    if pod is not None:
        metadata["ownerReferences"] = [{"apiVersion": "v1", "kind": "Pod", "name": pod.name, "uid": pod.uid}]
    return {"apiVersion": LEASES.api_version, "kind": LEASES.kind, "metadata": metadata, "spec": {}}


def now() -> str:
    """Give the time as Kubernetes' MicroTime."""
    return dt.datetime.fromtimestamp(wall_time_s(), dt.UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
