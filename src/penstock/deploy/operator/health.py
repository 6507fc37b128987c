"""How a deployment is, in words: what keeps pods from running, and what is under way."""

import datetime as dt
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from penstock.core.clock import wall_time_s
from penstock.core.types.instances import Role
from penstock.deploy.hosts.kubernetes_connector import ROLES
from penstock.deploy.manifests.deployed import FRONTEND
from penstock.deploy.operator.cache import Copy
from penstock.deploy.operator.definitions import GRAPHS
from penstock.runtime.kubernetes import KubernetesClient, Object

_IMAGE = {"ImagePullBackOff", "ErrImagePull", "InvalidImageName", "ErrImageNeverPull", "RegistryUnavailable"}
_CONFIG = {"CreateContainerConfigError", "CreateContainerError"}
_NAMES_MAX = 3


@dataclass(frozen=True, slots=True)
class Problem:
    """What keeps a pod from running; `reason` is the condition's."""

    pod: str
    reason: str
    text: str


@dataclass(slots=True)
class PartHealth:
    """Frontends, one role's workers, the planner, or the endpoint picker.

    Attributes:
        wanted: pods.
        ready: pods that are ready.
        total: pods there are, of old revisions and those that end among them.
        is_current: whether all pods are of the newest revision.
        scaled_by: the autoscaler that owns its number; empty for none.
    """

    name: str
    wanted: int
    ready: int = 0
    total: int = 0
    is_current: bool = False
    scaled_by: str = ""
    problems: list[Problem] = field(default_factory=list)
    ending: list[str] = field(default_factory=list)

    @property
    def is_role(self) -> bool:
        return self.name in set(Role)


def part_of(
    name: str, workloads: Sequence[Object], pods: Iterable[Object], *, wanted: int | None = None
) -> PartHealth:
    """Read a part's state.

    Args:
        name: of the part.
        workloads: its own, more than one while one takes the place of another.
        pods: of all its workloads.
        wanted: pods that it should have; None where only its workload says it.
    """
    specs = [workload.get("spec") or {} for workload in workloads]
    statuses = [workload.get("status") or {} for workload in workloads]
    part = PartHealth(name, sum(int(spec.get("replicas", 1)) for spec in specs) if wanted is None else wanted)
    part.ready = sum(int(status.get("readyReplicas") or 0) for status in statuses)
    part.total = sum(int(status.get("replicas") or 0) for status in statuses)
    updated = sum(int(status.get("updatedReplicas") or 0) for status in statuses)
    is_seen = all(
        int(status.get("observedGeneration") or 0) >= int(workload["metadata"].get("generation") or 0)
        for workload, status in zip(workloads, statuses, strict=True)
    )
    part.is_current = len(workloads) == 1 and is_seen and updated == part.total == part.wanted
    for pod in pods:
        if "deletionTimestamp" in pod["metadata"]:
            part.ending.append(_ending(pod))
        elif (problem := problem_of(pod)) is not None:
            part.problems.append(problem)
    return part


def problem_of(pod: Object) -> Problem | None:
    """Say what keeps a pod from running; None where nothing does."""
    name, status = pod["metadata"]["name"], pod.get("status") or {}
    for condition in status.get("conditions") or ():
        is_unscheduled = condition.get("type") == "PodScheduled" and condition.get("status") == "False"
        if is_unscheduled and condition.get("reason") == "Unschedulable":
            return Problem(name, "Unschedulable", f"no node takes it: {condition.get('message', '')}")
    for container in (*(status.get("initContainerStatuses") or ()), *(status.get("containerStatuses") or ())):
        waiting = (container.get("state") or {}).get("waiting") or {}
        reason, text = waiting.get("reason", ""), waiting.get("message", "")
        if reason in _IMAGE:
            return Problem(name, "ImagePullFailed", f"image {container.get('image', '')}: {text or reason}")
        if reason in _CONFIG:
            return Problem(name, "ConfigMissing", text or reason)
        if reason == "CrashLoopBackOff":
            return Problem(name, "CrashLoop", _crash(container))
    return None


def _crash(container: Object) -> str:
    """Say how a container ended last."""
    ended = (container.get("lastState") or {}).get("terminated") or {}
    count = container.get("restartCount", 0)
    text = f"ended {count} times, last with exit code {ended.get('exitCode', '?')}"
    if ended.get("reason") not in {None, "Error", "Completed"}:
        text += f" ({ended['reason']})"
    if ended.get("message"):
        text += f": {str(ended['message']).strip().splitlines()[-1][:300]}"
    return f"{text}; kubectl logs --previous says why"


def _ending(pod: Object) -> str:
    """Say of a pod that ends why, where that is known."""
    for condition in (pod.get("status") or {}).get("conditions") or ():
        if condition.get("type") == "DisruptionTarget" and condition.get("status") == "True":
            return f"{pod['metadata']['name']} drains ({condition.get('reason')}: {condition.get('message', '')})"
    return f"{pod['metadata']['name']} drains"


def conditions_of(parts: Sequence[PartHealth]) -> dict[str, tuple[bool, str, str]]:
    """Give Ready, Progressing and Degraded as (whether, reason, message)."""
    problems = [problem for part in parts for problem in part.problems]
    return {"Ready": _ready(parts), "Progressing": _progressing(parts), "Degraded": _degraded(problems)}


def serves(parts: Sequence[PartHealth]) -> bool:
    """Whether a request would be answered."""
    return _ready(parts)[0]


def _ready(parts: Sequence[PartHealth]) -> tuple[bool, str, str]:
    by_name = {part.name: part for part in parts if part.is_role or part.name == FRONTEND}
    has = {name: part.ready > 0 for name, part in by_name.items()}
    if not has.get(FRONTEND):
        return False, "NoFrontend", "no frontend is ready, so that clients reach none"
    if has.get("aggregated") or (has.get("prefill") and has.get("decode")):
        return True, "Serving", f"{_counts(by_name.values())} ready"
    missing = [part.name for part in parts if part.is_role and not part.ready]
    return (
        False,
        "NoWorkers",
        f"no worker of {' and '.join(missing)} is ready, so that no request is answered",
    )


def _progressing(parts: Sequence[PartHealth]) -> tuple[bool, str, str]:
    ending = [text for part in parts for text in part.ending]
    changing = [
        part for part in parts if not part.is_current or part.ready < part.wanted or part.total != part.wanted
    ]
    if not changing and not ending:
        return False, "Complete", "all pods are of the newest revision"
    texts = [
        f"{part.name}: {part.ready} of {part.wanted} ready"
        if part.wanted or not part.total
        else f"{part.name}: {part.total} pods end once those that take their place are ready"
        for part in changing
    ]
    if any(not part.is_current and part.total for part in changing):
        reason = "RollingOut"
    elif ending:
        reason = "Draining"
    else:
        reason = "Starting"
    return True, reason, "; ".join(texts + _some(ending))


def _degraded(problems: Sequence[Problem]) -> tuple[bool, str, str]:
    if not problems:
        return False, "AsExpected", "no pod has a problem"
    order = ["ImagePullFailed", "ConfigMissing", "CrashLoop", "Unschedulable"]
    sorted_ = sorted(problems, key=lambda problem: (order.index(problem.reason), problem.pod))
    texts = [f"{problem.pod}: {problem.text}" for problem in sorted_]
    return True, sorted_[0].reason, "; ".join(_some(texts))


def _counts(parts: Iterable[PartHealth]) -> str:
    return ", ".join(f"{part.name} {part.ready}/{part.wanted}" for part in parts)


def _some(texts: list[str]) -> list[str]:
    left = len(texts) - _NAMES_MAX
    return texts if left <= 0 else [*texts[:_NAMES_MAX], f"and {left} more"]


Conditions = dict[str, tuple[bool, str, str]]
_MESSAGE_CHARACTERS_MAX = 2000


def graph_status(body: Object, parts: Sequence[PartHealth], failed: Conditions | None = None) -> Object:
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
    client: KubernetesClient, roles: Copy, body: Object, part: PartHealth, selector: str
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
