"""The fields of a pod and of a container that a graph may set, what they hold, and why others are Penstock's own.

Source: PodSpec and Container of Kubernetes 1.37, with the merge keys of its strategic merge patch.
"""

from typing import Any

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
