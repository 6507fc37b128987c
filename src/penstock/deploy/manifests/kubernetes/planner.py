"""The planner's pod: it scales the operator's PenstockRoles, and every other pod connects to it."""

from collections.abc import Iterator
from typing import Any

from penstock.core.listening import Address
from penstock.deploy.hosts.roles import GROUP, ROLES
from penstock.deploy.manifests.kubernetes.access import DISCOVERY_RULES, account
from penstock.deploy.manifests.kubernetes.deployed import Deployed
from penstock.deploy.manifests.kubernetes.pods import planner_pod
from penstock.deploy.supervisor.local_part import PLANNER


def planner_objects(deployed: Deployed) -> Iterator[dict[str, Any]]:
    """Give the planner's account, its Service and its Deployment of one pod; nothing for a graph without."""
    port = planner_port(deployed)
    if port is None:
        return
    name = deployed.part_name(PLANNER)
    rules = [
        *(DISCOVERY_RULES if deployed.asks_api else ()),
        {
            "apiGroups": [GROUP],
            "resources": [ROLES.plural],
            "resourceNames": [deployed.part_name(role) for role in deployed.roles],
            "verbs": ["get", "patch"],
        },
    ]
    yield from account(deployed, name, rules)
    selector = deployed.selector(PLANNER)
    ports = [{"name": "planner", "port": port, "targetPort": port}]
    yield deployed.object(
        "v1", "Service", name, PLANNER, spec={"type": "ClusterIP", "selector": selector, "ports": ports}
    )
    template = planner_pod(deployed, port)
    template["spec"] |= {"serviceAccountName": name, "automountServiceAccountToken": True}
    yield deployed.object(
        "apps/v1",
        "Deployment",
        name,
        PLANNER,
        spec={
            "replicas": 1,
            "revisionHistoryLimit": 3,
            "selector": {"matchLabels": selector},
            "strategy": {"type": "Recreate"},  # two at once would each scale
            "template": template,
        },
    )


def planner_port(deployed: Deployed) -> int | None:
    """Give the port at which pods connect to the planner; None without a planner."""
    planner = deployed.pods.graph.planner
    return None if planner is None or planner.address is None else Address.parse(planner.address).port
