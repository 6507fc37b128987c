"""Makes what a PenstockGraph wants from what there is. Each call looks at everything again; nothing is remembered but to save calls."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from penstock.core.errors import ConfigError, Unavailable
from penstock.core.log import get_logger
from penstock.core.types.instances import Role
from penstock.deploy.hosts.roles import ROLES
from penstock.deploy.manifests.kubernetes.deployed import FRONTEND
from penstock.deploy.manifests.kubernetes.gateway import PICKER
from penstock.deploy.manifests.kubernetes.leader_worker_set import INDEX_LABEL
from penstock.deploy.manifests.kubernetes.objects import WORKLOADS
from penstock.deploy.manifests.pod_graph import pods_max, pods_of
from penstock.deploy.operator.cache import (
    COMPONENT,
    DEPLOYMENTS,
    GRAPH_LABEL,
    INSTANCE,
    KEPT,
    LEADER_WORKER_SETS,
    PODS,
    STATEFUL_SETS,
    ClusterCache,
    Copy,
)
from penstock.deploy.operator.desired import Desired, digest_of
from penstock.deploy.operator.health import Part, part_of
from penstock.deploy.operator.status import Conditions, graph_status, write_graph_status, write_role_status
from penstock.deploy.supervisor.local_part import PLANNER
from penstock.graph import RoleSpec
from penstock.runtime.kubernetes.client import KubernetesClient, KubernetesError, Object, Resource

MANAGER = "penstock-operator"
NUMBER = "penstock.dev/graph-replicas"
"""Annotation: the graph's number of workers when it was last given to the role."""
DELETION_COST, FIRST_TO_END = "controller.kubernetes.io/pod-deletion-cost", "-1000"
_KINDS = {
    resource.kind: resource
    for resource in (
        DEPLOYMENTS,
        STATEFUL_SETS,
        LEADER_WORKER_SETS,
        *KEPT,
        Resource("", "v1", "persistentvolumeclaims", "PersistentVolumeClaim"),
        Resource("monitoring.coreos.com", "v1", "servicemonitors", "ServiceMonitor"),
        Resource("inference.networking.k8s.io", "v1", "inferencepools", "InferencePool"),
        Resource("gateway.networking.k8s.io", "v1", "httproutes", "HTTPRoute"),
    )
}
_PASSING = {409, 429}
"""Refusals that a later try cures, like those of 500 and above."""
_log = get_logger()


@dataclass(slots=True)
class _Applied:
    """What was applied last for one graph, so that pods that come and go cause no calls."""

    digest: str = ""
    generations: dict[tuple[str, str], int] = field(default_factory=dict)
    names: set[tuple[str, str]] = field(default_factory=set)
    is_clean: bool = False


class Reconciler:
    """One event loop owns it, and one task calls it."""

    def __init__(self, client: KubernetesClient, cache: ClusterCache) -> None:
        """Act by `client` on what `cache` shows."""
        self._client = client
        self._cache = cache
        self._applied: dict[str, _Applied] = {}

    async def reconcile(self, name: str, *, is_full: bool = False) -> None:
        """Bring one graph a step nearer; `is_full` applies all again, against changes that nobody told.

        Raises:
            Unavailable: the API server does not answer, or refuses an object; the status says so where it can.
        """
        body = self._cache.graphs.objects.get(name)
        if body is None or "deletionTimestamp" in body["metadata"]:
            self._applied.pop(name, None)  # the garbage collector takes the rest
            return
        try:
            desired = Desired.of(body)
        except ConfigError as error:
            failed = {
                "Ready": (False, "InvalidGraph", error.message),
                "Degraded": (True, "InvalidGraph", f"what runs is left as it is: {error.message}"),
            }
            await self._write_failed(body, failed)
            return
        try:
            scaled_by = await self._apply(desired, is_full=is_full)
        except KubernetesError as error:
            if error.status in _PASSING or error.status >= 500:
                raise
            parts = self._parts(name, dict.fromkeys(desired.parts, ""))
            failed = {"Degraded": (True, "ApplyFailed", error.message)}
            await write_graph_status(self._client, body, graph_status(body, parts, failed))
            raise
        parts = self._parts(name, {part: scaled_by.get(part, "") for part in desired.parts})
        await self._tidy(desired, parts)
        for part in parts:
            if (role := self._cache.roles_of(name).get(part.name)) is not None:
                selector = f"app.kubernetes.io/name=penstock,{INSTANCE}={name},{COMPONENT}={part.name}"
                if desired.roles[Role(part.name)].nodes > 1:
                    selector += f",{INDEX_LABEL}=0"  # a worker is counted by its leader
                await write_role_status(self._client, role, part, selector)
        await write_graph_status(self._client, body, graph_status(body, parts))

    async def say_failed(self, name: str, error: Unavailable) -> None:
        """Say in a graph's status that it could not be applied for a while, once: news of a change wake the graph.

        Raises:
            Unavailable: the API server does not answer, or refuses.
        """
        body = self._cache.graphs.objects.get(name)
        if body is None:
            return
        generation, said = body["metadata"].get("generation", 1), (body.get("status") or {}).get("conditions")
        for each in said or ():
            is_said = each["status"] == "True" and each["reason"] == "ApplyFailed"
            if is_said and each.get("observedGeneration") == generation:
                return
        text = f"tried several times: {error.message}; what is applied of it stays, and it tries again"
        await self._write_failed(body, {"Degraded": (True, "ApplyFailed", text)})

    async def say_crashed(self, name: str, error: Exception) -> None:
        """Say in a graph's status that the operator failed at it, in words that stay the same: news of a change wake the graph.

        Raises:
            Unavailable: the API server does not answer, or refuses.
        """
        body = self._cache.graphs.objects.get(name)
        if body is not None:
            text = f"the operator failed at this graph ({type(error).__name__}); its log says where: report it; it tries again"
            await self._write_failed(body, {"Degraded": (True, "OperatorFailed", text)})

    async def _write_failed(self, body: Object, failed: Conditions) -> None:
        name = body["metadata"]["name"]
        parts = self._parts(name, dict.fromkeys(self._known_parts(name), ""))
        await write_graph_status(self._client, body, graph_status(body, parts, failed))

    async def _apply(self, desired: Desired, *, is_full: bool) -> dict[str, str]:
        """Apply roles and objects; returns the autoscaler of each role, empty for none."""
        replicas: dict[str, int] = {}
        scaled_by: dict[str, str] = {}
        for role, spec in desired.roles.items():
            scaled_by[role.value] = self._autoscaler(desired.name, role)
            replicas[role.value] = await self._keep_role(desired, role, spec, scaled_by[role.value])
        for role in desired.roles:
            workload = self._cache.workload(desired.name, role.value)
            if workload is not None and self._cache.autoscaler_of(
                workload["kind"], workload["metadata"]["name"]
            ):
                replicas[role.value] = workload["spec"]["replicas"]  # it is the pods' own, not the role's
        for role, spec in desired.roles.items():
            if (most := pods_max(spec)) is not None:
                replicas[role.value] = min(replicas[role.value], most)
        await self._mark_leaving(desired.name)
        objects = desired.with_replicas(replicas)
        applied = self._applied.setdefault(desired.name, _Applied())
        digest = digest_of(objects)
        if digest == applied.digest and not is_full and not self._has_drifted(applied):
            return scaled_by
        applied.digest, applied.is_clean = "", False
        applied.generations.clear()
        applied.names.clear()
        for each in objects:
            made = await self._apply_object(each)
            name = each["metadata"]["name"]
            if (known := self._cache.names.get(each["kind"])) is not None:
                applied.names.add((each["kind"], name))
                known.put(made)  # the watch is behind
            if each["kind"] in WORKLOADS:
                applied.generations[each["kind"], name] = made["metadata"].get("generation", 0)
                self._copy_of(each["kind"]).objects[name] = made  # the watch is behind
        await self._remove(desired, objects, keep=("ConfigMap",))
        applied.digest = digest
        _log.info("graph_applied", graph=desired.name, objects=len(objects), **replicas)
        return scaled_by

    async def _apply_object(self, body: Object) -> Object:
        """Apply an object; says of a LeaderWorkerSet what a cluster without the kind lacks."""
        try:
            return await self._client.apply(_KINDS[body["kind"]], body, manager=MANAGER)
        except KubernetesError as error:
            if error.status != 404 or body["kind"] != LEADER_WORKER_SETS.kind:
                raise
            raise KubernetesError(
                f"{body['metadata']['name']}: the cluster has no LeaderWorkerSets, which roles with nodes need; install them"
                " (https://lws.sigs.k8s.io)",
                status=error.status,
                reason=error.reason,
            ) from error

    async def _mark_leaving(self, name: str) -> None:
        """Have the pods that the planner chose end first where there are fewer; others lose the mark."""
        for role, body in self._cache.roles_of(name).items():
            leaving = set(body["spec"].get("leaving") or ())
            for pod in self._cache.pods_of(name, role):
                metadata = pod["metadata"]
                cost = (metadata.get("annotations") or {}).get(DELETION_COST)
                wanted = FIRST_TO_END if metadata["name"] in leaving else None
                if "deletionTimestamp" in metadata or cost == wanted or cost not in {None, FIRST_TO_END}:
                    continue
                mark = {"metadata": {"annotations": {DELETION_COST: wanted}}}
                try:
                    await self._client.patch(PODS, metadata["name"], mark)
                except KubernetesError as error:
                    if error.status != 404:  # gone meanwhile
                        raise

    async def _keep_role(self, desired: Desired, role: Role, spec: RoleSpec, autoscaler: str) -> int:
        """Make a role's object; returns its number of pods.

        The graph's number counts when it changes. Otherwise it is whoever scales that says how many, and an autoscaler always.
        """
        wanted, number = pods_of(spec), str(pods_of(spec))
        body = self._cache.roles_of(desired.name).get(role.value)
        if body is None:
            name = f"{desired.name}-{role}"
            metadata: Object = {
                "name": name,
                "labels": {GRAPH_LABEL: desired.name},
                "annotations": {NUMBER: number},
                "ownerReferences": [desired.owner],
            }
            made: Object = {"apiVersion": ROLES.api_version, "kind": ROLES.kind, "metadata": metadata}
            made["spec"] = {"graph": desired.name, "role": role.value, "replicas": wanted}
            try:
                await self._client.create(ROLES, made)
            except KubernetesError as error:
                if error.status != 409:
                    raise
                live = await self._client.get(ROLES, name)  # the watch is behind
                return int(live["spec"]["replicas"])
            return wanted
        if (body["metadata"].get("annotations") or {}).get(NUMBER) == number:
            return int(body["spec"]["replicas"])
        change: Object = {"metadata": {"annotations": {NUMBER: number}}}
        if not autoscaler:
            change["spec"] = {"replicas": wanted}
            change["metadata"]["resourceVersion"] = body["metadata"]["resourceVersion"]
        changed = await self._client.patch(ROLES, body["metadata"]["name"], change)
        return int(changed["spec"]["replicas"])

    async def _tidy(self, desired: Desired, parts: list[Part]) -> None:
        """Delete what earlier revisions left, once no pod uses it."""
        applied = self._applied[desired.name]
        if applied.is_clean or not all(part.is_current and not part.ending for part in parts):
            return
        await self._remove(desired, desired.objects, keep=())
        applied.is_clean = True

    async def _remove(self, desired: Desired, objects: list[Object], *, keep: tuple[str, ...]) -> None:
        """Delete objects of this graph that are not among `objects`, but no kind of `keep`."""
        wanted = {(each["kind"], each["metadata"]["name"]) for each in objects}
        names = {f"{desired.name}-{role}" for role in desired.roles}
        for role in self._cache.roles_of(desired.name).values():
            if role["metadata"]["name"] not in names:
                await self._client.delete(ROLES, role["metadata"]["name"])
        for kind, resource in _KINDS.items():
            if kind in keep:
                continue
            try:
                listing = await self._client.list(resource, f"{GRAPH_LABEL}={desired.name}")
            except KubernetesError as error:
                if error.status == 404:  # a kind that this cluster does not have
                    continue
                raise
            for found in listing.objects:
                metadata = found["metadata"]
                uids = {owner["uid"] for owner in metadata.get("ownerReferences") or ()}
                if desired.owner["uid"] in uids and (kind, metadata["name"]) not in wanted:
                    await self._client.delete(resource, metadata["name"], uid=metadata["uid"])
                    _log.info("object_removed", graph=desired.name, kind=kind, name=metadata["name"])

    def _has_drifted(self, applied: _Applied) -> bool:
        """Whether somebody changed or deleted a workload since it was applied, or deleted another object."""
        if any(name not in self._cache.names[kind].found for kind, name in applied.names):
            return True
        for (kind, name), generation in applied.generations.items():
            live = self._copy_of(kind).objects.get(name)
            if live is None or live["metadata"].get("generation", 0) > generation:
                return True
        return False

    def _copy_of(self, kind: str) -> Copy:
        copies = (self._cache.deployments, self._cache.stateful_sets, self._cache.leader_worker_sets)
        return next(copy for copy in copies if copy.resource.kind == kind)

    def _autoscaler(self, graph: str, role: Role) -> str:
        name = f"{graph}-{role}"
        kinds = (ROLES.kind, *WORKLOADS)
        return next((found for kind in kinds if (found := self._cache.autoscaler_of(kind, name))), "")

    def _parts(self, name: str, scaled_by: Mapping[str, str]) -> list[Part]:
        parts = []
        for part_name, autoscaler in scaled_by.items():
            workload = self._cache.workload(name, part_name)
            part = part_of(part_name, workload, self._cache.pods_of(name, part_name))
            part.scaled_by = autoscaler
            parts.append(part)
        return parts

    def _known_parts(self, name: str) -> list[str]:
        """Give the parts that run, of a graph that cannot be read."""
        return [
            part
            for part in (FRONTEND, *Role, PLANNER, PICKER)
            if self._cache.workload(name, part) is not None
        ]
