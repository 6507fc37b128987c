"""Under which account pods run, and what it may ask the API of Kubernetes."""

from collections.abc import Iterator
from typing import Any

from penstock.deploy.manifests.kubernetes.deployed import Deployed

_GROUP = "rbac.authorization.k8s.io"
DISCOVERY_RULES: list[dict[str, Any]] = [
    {
        "apiGroups": ["coordination.k8s.io"],
        "resources": ["leases"],
        "verbs": ["get", "list", "watch", "create", "patch", "delete"],
    },
]
"""What discovery by Kubernetes asks: workers are Leases."""


def access(deployed: Deployed) -> Iterator[dict[str, Any]]:
    """Give the account, and with discovery by Kubernetes its role; without, pods get no token at all."""
    yield deployed.object(
        "v1", "ServiceAccount", deployed.name, automountServiceAccountToken=deployed.asks_api
    )
    if deployed.asks_api:
        yield deployed.object(f"{_GROUP}/v1", "Role", deployed.name, rules=DISCOVERY_RULES)
        subject = {"kind": "ServiceAccount", "name": deployed.name}
        if deployed.options.namespace is not None:
            subject["namespace"] = deployed.options.namespace
        yield deployed.object(
            f"{_GROUP}/v1",
            "RoleBinding",
            deployed.name,
            roleRef={"apiGroup": _GROUP, "kind": "Role", "name": deployed.name},
            subjects=[subject],
        )
