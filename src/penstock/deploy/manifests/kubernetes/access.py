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
    """Give the account of frontends and workers, and with discovery by Kubernetes its role; without, pods get no token at all."""
    yield from account(deployed, deployed.name, DISCOVERY_RULES if deployed.asks_api else None)


def account(deployed: Deployed, name: str, rules: list[dict[str, Any]] | None) -> Iterator[dict[str, Any]]:
    """Give an account that may do what `rules` say; None gives its pods no token."""
    yield deployed.object("v1", "ServiceAccount", name, automountServiceAccountToken=rules is not None)
    if rules is not None:
        yield deployed.object(f"{_GROUP}/v1", "Role", name, rules=rules)
        subject = {"kind": "ServiceAccount", "name": name}
        if deployed.options.namespace is not None:
            subject["namespace"] = deployed.options.namespace
        yield deployed.object(
            f"{_GROUP}/v1",
            "RoleBinding",
            name,
            roleRef={"apiGroup": _GROUP, "kind": "Role", "name": name},
            subjects=[subject],
        )
