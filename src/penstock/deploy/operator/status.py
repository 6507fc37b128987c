"""The status of PenstockGraphs and PenstockRoles, written where it has changed."""

import datetime as dt
from collections.abc import Sequence

from penstock.core.clock import wall_time_s
from penstock.deploy.hosts.roles import ROLES
from penstock.deploy.operator.cache import Copy
from penstock.deploy.operator.definitions import GRAPHS
from penstock.deploy.operator.health import Part, conditions_of
from penstock.runtime.kubernetes import KubernetesClient, Object

Conditions = dict[str, tuple[bool, str, str]]
_MESSAGE_CHARACTERS_MAX = 2000


def graph_status(body: Object, parts: Sequence[Part], failed: Conditions | None = None) -> Object:
    """Make a PenstockGraph's status.

    Args:
        body: as it is, whose transition times stay where a condition does.
        parts: all that runs as pods.
        failed: conditions that say otherwise than the pods: the graph is wrong, or an object was refused.
    """
    conditions = conditions_of(parts) | (failed or {})
    before = {each["type"]: each for each in (body.get("status") or {}).get("conditions") or ()}
    now = dt.datetime.fromtimestamp(wall_time_s(), dt.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    generation = body["metadata"].get("generation", 1)
    listed = []
    for kind, (is_true, reason, message) in conditions.items():
        status, old = "True" if is_true else "False", before.get(kind)
        since = old["lastTransitionTime"] if old is not None and old["status"] == status else now
        listed.append(
            {
                "type": kind, "status": status, "reason": reason, "message": message[:_MESSAGE_CHARACTERS_MAX],
                "lastTransitionTime": since, "observedGeneration": generation,
            }
        )  # fmt: skip
    workers = [part for part in parts if part.is_role]
    return {
        "observedGeneration": generation,
        "workers": f"{sum(min(part.ready, part.wanted) for part in workers)}/{sum(part.wanted for part in workers)}",
        "summary": _summary(conditions),
        "parts": [
            {"name": part.name, "replicas": part.wanted, "ready": part.ready, "scaledBy": part.scaled_by}
            for part in parts
        ],
        "conditions": listed,
    }


async def write_graph_status(client: KubernetesClient, graphs: Copy, body: Object, status: Object) -> None:
    """Write a PenstockGraph's status where it has changed, also into the copy."""
    if body.get("status") != status:
        graphs.wrote(await client.patch(GRAPHS, body["metadata"]["name"], {"status": status}, "status"))


async def write_role_status(
    client: KubernetesClient, roles: Copy, body: Object, part: Part, selector: str
) -> None:
    """Write a PenstockRole's status where it has changed, also into the copy."""
    status = {
        "replicas": part.total,
        "readyReplicas": part.ready,
        "selector": selector,
        "scaledBy": part.scaled_by,
    }
    if body.get("status") != status:
        roles.wrote(await client.patch(ROLES, body["metadata"]["name"], {"status": status}, "status"))


def _summary(conditions: Conditions) -> str:
    """Choose what a person should know first."""
    ready, progressing, degraded = (conditions[kind] for kind in ("Ready", "Progressing", "Degraded"))
    if degraded[0]:
        return degraded[1]
    if progressing[0]:
        return progressing[1]
    return ready[1]
