"""What a graph adds to its pods in Kubernetes: fields of pods and containers by their own names, and how they are merged."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import pydantic

from penstock.core.config import Config, nearest, wrong
from penstock.core.document import check_plain

LIST, MAPPING, VALUE = "a list", "a mapping", "one value"
POD = {
    "affinity": MAPPING, "containers": LIST, "dnsConfig": MAPPING, "dnsPolicy": VALUE, "enableServiceLinks": VALUE,
    "hostAliases": LIST, "hostIPC": VALUE, "hostNetwork": VALUE, "hostPID": VALUE, "hostUsers": VALUE,
    "imagePullSecrets": LIST, "initContainers": LIST, "nodeSelector": MAPPING, "os": MAPPING, "overhead": MAPPING,
    "preemptionPolicy": VALUE, "priority": VALUE, "priorityClassName": VALUE, "readinessGates": LIST,
    "resourceClaims": LIST, "resources": MAPPING, "runtimeClassName": VALUE, "schedulerName": VALUE,
    "schedulingGates": LIST, "schedulingGroup": MAPPING, "securityContext": MAPPING, "setHostnameAsFQDN": VALUE,
    "shareProcessNamespace": VALUE, "tolerations": LIST, "topologySpreadConstraints": LIST, "volumes": LIST,
}  # fmt: skip
"""Field of a pod -> what it holds."""
CONTAINER = {
    "env": LIST, "envFrom": LIST, "imagePullPolicy": VALUE, "ports": LIST, "resizePolicy": LIST, "resources": MAPPING,
    "securityContext": MAPPING, "stdin": VALUE, "stdinOnce": VALUE, "terminationMessagePath": VALUE,
    "terminationMessagePolicy": VALUE, "tty": VALUE, "volumeDevices": LIST, "volumeMounts": LIST,
}  # fmt: skip
"""Field of Penstock's container -> what it holds."""
MERGE_KEYS = {
    "claims": "name", "containers": "name", "env": "name", "hostAliases": "ip", "imagePullSecrets": "name",
    "initContainers": "name", "ports": "containerPort", "resourceClaims": "name", "schedulingGates": "name",
    "topologySpreadConstraints": "topologyKey", "volumeDevices": "devicePath", "volumeMounts": "mountPath",
    "volumes": "name",
}  # fmt: skip
"""List, wherever it is in a pod -> the field by which its entries are merged."""
ONE_SOURCE = {"env", "resourceClaims", "volumes"}
"""Lists whose entries have one source: another source takes the place of the first."""
APPENDED = {"tolerations"}
NEEDED = {"containers", "env", "ports", "volumeMounts", "volumes"}
"""Lists that no null may remove."""

_COMMAND = "pods run penstock up with the graph; leave it out, and set fields of the graph, or engine_args for the engine's own"
_ACCOUNT = "pods have an account of Penstock's, named after the deployment; leave it out, and bind further rights to that account"
_PROBE = "probes ask the supervisor, which watches the processes; leave it out, and set supervision"
_DRAIN = "it follows from the time to drain; leave it out, and set frontend.drain_timeout_s or worker.drain_timeout_s"
_RESTART = "a workload's pods are always restarted; leave it out"
_IDENTITY = "the workload names its pods; leave it out"
_OF_PODS = "no template of pods may have it; leave it out"
NOT_OF_POD = {
    "activeDeadlineSeconds": _OF_PODS,
    "automountServiceAccountToken": _ACCOUNT,
    "ephemeralContainers": _OF_PODS,
    "hostname": _IDENTITY,
    "hostnameOverride": _IDENTITY,
    "nodeName": "a pod is given to the nodes by the scheduler; use nodeSelector or affinity",
    "restartPolicy": _RESTART,
    "serviceAccount": _ACCOUNT,
    "serviceAccountName": _ACCOUNT,
    "subdomain": _IDENTITY,
    "terminationGracePeriodSeconds": _DRAIN,
}
"""Field of a pod that a graph may not set -> why, and what to do."""
NOT_OF_CONTAINER = {
    "args": _COMMAND,
    "command": _COMMAND,
    "image": "images are set by --image and --gpu-image, or options of a PenstockGraph; leave it out",
    "lifecycle": _DRAIN,
    "livenessProbe": _PROBE,
    "name": "the container has a name; leave it out, and set other containers in pod.containers",
    "readinessProbe": _PROBE,
    "restartPolicy": _RESTART,
    "restartPolicyRules": _RESTART,
    "startupProbe": _PROBE,
    "workingDir": _COMMAND,
}
"""Likewise, of Penstock's container."""


def kind_of(value: Any) -> str:
    """Say what a value is."""
    return LIST if isinstance(value, list | tuple) else MAPPING if isinstance(value, dict) else VALUE


class KubernetesSpec(Config):
    """Fields of pods, merged over those that Penstock renders. Only `penstock render --target kubernetes` and the operator read them."""

    labels: dict[str, str | None] = pydantic.Field(default_factory=dict)
    """Further labels of the pods; null removes one that is set for all pods."""
    annotations: dict[str, str | None] = pydantic.Field(default_factory=dict)
    """Further annotations of the pods; null likewise."""
    pod: dict[str, Any] = pydantic.Field(default_factory=dict)
    """Fields of PodSpec, such as `tolerations`, `nodeSelector` and `imagePullSecrets`."""
    container: dict[str, Any] = pydantic.Field(default_factory=dict)
    """Fields of Penstock's container in these pods, such as `resources`, `env` and `volumeMounts`."""

    @pydantic.field_validator("pod")
    @classmethod
    def _check_pod(cls, pod: dict[str, Any]) -> dict[str, Any]:
        return _checked(pod, POD, _elsewhere("container", CONTAINER) | NOT_OF_CONTAINER | NOT_OF_POD)

    @pydantic.field_validator("container")
    @classmethod
    def _check_container(cls, container: dict[str, Any]) -> dict[str, Any]:
        return _checked(container, CONTAINER, _elsewhere("pod", POD) | NOT_OF_POD | NOT_OF_CONTAINER)


def _elsewhere(place: str, fields: Iterable[str]) -> dict[str, str]:
    return dict.fromkeys(fields, f"is a field of the {place}; set it in {place}")


def _checked(data: dict[str, Any], known: Mapping[str, str], not_here: Mapping[str, str]) -> dict[str, Any]:
    """Return the fields if they have the names and shapes of Kubernetes; the API server checks what is inside."""
    check_plain(data, use="which go to Kubernetes as JSON")
    for problem in _problems(data, known, not_here):
        raise wrong(problem)
    return data


def _problems(data: dict[str, Any], known: Mapping[str, str], not_here: Mapping[str, str]) -> Iterator[str]:
    for field, value in data.items():
        if field not in known:
            yield f"{field}: {not_here.get(field) or f'unknown field of Kubernetes{nearest(field, list(known))}'}"
        elif value is None:
            if field in NEEDED:
                yield f"{field}: null would remove what Penstock needs in it; leave it out, or give a list of further entries"
        elif kind_of(value) != known[field]:
            yield f"{field}: must be {known[field]}, got {value!r}"
        elif known[field] == LIST:
            yield from _of_entries(field, value)
        elif field == "resources":
            for part, inner in value.items():
                if inner is not None and kind_of(inner) != (LIST if part == "claims" else MAPPING):
                    yield f"resources.{part}: must be {LIST if part == 'claims' else MAPPING}, got {inner!r}"


def _of_entries(field: str, entries: list[Any]) -> Iterator[str]:
    key = MERGE_KEYS.get(field)
    for number, entry in enumerate(entries):
        if not isinstance(entry, dict):
            yield f"{field}.{number}: must be a mapping, got {entry!r}"
        elif key is not None and key not in entry:
            yield f"{field}.{number}.{key}: missing; entries are merged by it"
        elif key is not None and type(entry[key]) is not (kind := int if field == "ports" else str):
            yield f"{field}.{number}.{key}: must be {'an integer' if kind is int else 'text'}, got {entry[key]!r}"
