"""Makes what a PenstockGraph wants from what there is. Each call looks at everything again; nothing is remembered but to save calls."""

import contextlib
import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from penstock.core.errors import ConfigError, Unavailable
from penstock.core.log import get_logger
from penstock.core.types.instances import Role
from penstock.deploy.hosts.kubernetes_connector import ROLES
from penstock.deploy.manifests.deployed import FRONTEND, HARDWARE_LABEL
from penstock.deploy.manifests.kubernetes import WORKLOADS, kubernetes_objects, pod_templates
from penstock.deploy.manifests.options import RenderOptions
from penstock.deploy.manifests.pod_graph import PLANNER_PORT, pods_max, pods_of
from penstock.deploy.manifests.workloads import CONTAINER, INDEX_LABEL
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
    part_name,
)
from penstock.deploy.operator.definitions import GRAPHS
from penstock.deploy.operator.health import (
    Conditions,
    PartHealth,
    graph_status,
    part_of,
    serves,
    write_graph_status,
    write_role_status,
)
from penstock.deploy.supervisor.local_part import PLANNER
from penstock.graph import Graph, RoleSpec
from penstock.runtime.kubernetes import KubernetesClient, KubernetesError, Object, Resource


@dataclass(frozen=True, slots=True)
class Desired:
    """A checked PenstockGraph.

    Attributes:
        owner: the ownerReference of all its objects.
        objects: what runs it, with the graph's own numbers of workers.
    """

    name: str
    owner: Object
    roles: Mapping[Role, RoleSpec]
    objects: list[Object]

    @classmethod
    def of(cls, body: Object, images: Mapping[str, str] | None = None) -> "Desired":
        """Check a PenstockGraph.

        Args:
            body: the PenstockGraph.
            images: that run now, by field of the options: a graph without this field keeps them, so that another release of the operator
                rolls no pods.

        Raises:
            ConfigError: no pods could run it; one line for each mistake.
        """
        name = body["metadata"]["name"]
        wanted = body.get("spec") or {}
        if not isinstance(wanted.get("options") or {}, dict):
            raise ConfigError(f"spec.options: must be a mapping, got {wanted['options']!r}")
        graph = Graph.parse(_named(wanted.get("graph"), name), source="spec.graph")
        options = RenderOptions.parse(
            {**(images or {}), **(wanted.get("options") or {}), "namespace": body["metadata"]["namespace"]},
            source="spec.options",
        )
        if problems := [
            f"spec.graph.roles.{role}.profile: {spec.profile}: would be a file of the operator's disk, not of yours; leave it out, or"
            " apply what penstock render makes of the graph, which has the profile in its ConfigMap"
            for role, spec in graph.roles.present().items()
            if spec.profile is not None
        ]:
            raise ConfigError("\n".join(problems))
        owner = owner_of(body)
        objects = [_owned(each, name, owner) for each in kubernetes_objects(graph, options)]
        return cls(name, owner, graph.roles.present(), objects)

    @property
    def parts(self) -> list[str]:
        """Name what runs as pods: frontends, roles, and the planner and the endpoint picker where there are any."""
        return [part_name(each) for each in self.workloads]

    @property
    def workloads(self) -> list[Object]:
        return [each for each in self.objects if each["kind"] in WORKLOADS]

    def with_replicas(self, replicas: Mapping[str, int]) -> list[Object]:
        """Give the objects, with this number of pods for each part that is named."""
        made = []
        for each in self.objects:
            part = part_name(each)
            if each["kind"] in WORKLOADS and part in replicas:
                made.append({**each, "spec": {**each["spec"], "replicas": replicas[part]}})
            else:
                made.append(each)
        return made


def owner_of(body: Object) -> Object:
    """Give the reference by which the garbage collector deletes with a PenstockGraph what runs it."""
    return {
        "apiVersion": GRAPHS.api_version, "kind": GRAPHS.kind, "name": body["metadata"]["name"],
        "uid": body["metadata"]["uid"], "controller": True, "blockOwnerDeletion": True,
    }  # fmt: skip


def digest_of(objects: list[Object]) -> str:
    return hashlib.sha256(json.dumps(objects, sort_keys=True).encode()).hexdigest()


def _named(graph: Any, name: str) -> dict[str, Any]:
    """Name a graph after its object, and let it find its workers by Kubernetes unless it says otherwise; its planner scales pods."""
    if not isinstance(graph, dict):
        raise ConfigError(f"spec.graph: must be a mapping, as a graph file has it, got {graph!r}")
    runtime = graph.get("runtime") or {}
    if isinstance(runtime, dict):
        runtime = {"discovery": "kubernetes", **runtime}
    planner = graph.get("planner")
    if isinstance(planner, dict):
        address = f"tcp://{name}-{PLANNER}:{PLANNER_PORT}"
        graph = {**graph, "planner": {**planner, "scales": "pods", "address": address}}
    return {**graph, "name": name, "runtime": runtime}


def _owned(body: Object, name: str, owner: Object) -> Object:
    metadata = body["metadata"]
    labels = (metadata.get("labels") or {}) | {GRAPH_LABEL: name}
    return {**body, "metadata": {**metadata, "labels": labels, "ownerReferences": [owner]}}


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
_OF_ALL = {429, 503}
"""Answers that say something of the server where a second object has one too: the others are not tried then."""
_AT_ONCE = {"Service", "ServiceMonitor", "InferencePool", "HTTPRoute"}
"""Kinds by which others reach pods: an object that the graph lost ends at once, and one that pods need once no pod has it."""
_NEEDED = {"ServiceAccount", "Role", "RoleBinding", "ConfigMap", "PersistentVolumeClaim"}
"""Kinds without which pods do not start, or find nobody."""
_log = get_logger()


@dataclass(slots=True)
class _Applied:
    """What was applied last for one graph, so that pods that come and go cause no calls.

    Attributes:
        digest: of all objects.
        left: kind and name of those that were refused, or not tried.
        generations: of workloads, as they were applied.
        names: of other objects that were applied.
        is_clean: whether nothing is left of earlier revisions.
    """

    digest: str = ""
    left: set[tuple[str, str]] = field(default_factory=set)
    generations: dict[tuple[str, str], int] = field(default_factory=dict)
    names: set[tuple[str, str]] = field(default_factory=set)
    is_clean: bool = False


class _Refusals:
    """What the API server refused of one graph in one pass; the rest of the graph is applied."""

    def __init__(self) -> None:
        self.errors: list[KubernetesError] = []

    @contextlib.contextmanager
    def of(self, what: str) -> Iterator[None]:
        """Keep a refusal of `what`, such as `Service chat-frontend`, and go on."""
        try:
            yield
        except KubernetesError as error:
            is_second = error.status in _OF_ALL and any(each.status in _OF_ALL for each in self.errors)
            if error.status == 401 or is_second:  # the operator is not known, or the server is overloaded
                raise
            text = f"{what}: {error.message}"
            self.errors.append(
                KubernetesError(
                    text, status=error.status, reason=error.reason, retry_after_s=error.retry_after_s
                )
            )

    def error(self) -> KubernetesError:
        """Give the refusals that no later try cures as one error, or all where each passes."""
        told = [each for each in self.errors if not _is_passing(each)] or self.errors
        text = "; ".join(each.message for each in told)
        retry_after_s = max((each.retry_after_s or 0.0 for each in self.errors), default=0.0)
        return KubernetesError(
            text, status=told[0].status, reason=told[0].reason, retry_after_s=retry_after_s
        )


def _is_passing(error: KubernetesError) -> bool:
    return error.status in _PASSING or error.status >= 500


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
            desired = Desired.of(body, self._images(name))
        except ConfigError as error:
            text = f"what runs is left as it is: {error.message}"
            await self._write_failed(body, {"Degraded": (True, "InvalidGraph", text)})
            return
        refusals = _Refusals()
        scaled_by = {part: self._autoscaler(name, part) for part in desired.parts}
        objects = desired.with_replicas(await self._count_pods(desired, scaled_by, refusals))
        await self._mark_leaving(name, refusals)
        await self._apply(desired, objects, refusals, is_full=is_full)
        numbers = {
            part_name(each): int(each["spec"]["replicas"]) for each in objects if each["kind"] in WORKLOADS
        }
        await self._end_replaced(desired, numbers, refusals)
        parts = self._parts(name, scaled_by, numbers)
        if not refusals.errors:
            await self._tidy(desired, parts, refusals)
        for part in parts:
            role = self._cache.roles_of(name).get(part.name)
            spec = desired.roles.get(Role(part.name)) if role is not None else None
            if role is not None and spec is not None:
                selector = f"app.kubernetes.io/name=penstock,{INSTANCE}={name},{COMPONENT}={part.name}"
                if spec.nodes > 1:
                    selector += f",{INDEX_LABEL}=0"  # a worker is counted by its leader
                with refusals.of(f"status of PenstockRole {name}-{part.name}"):
                    await write_role_status(self._client, self._cache.roles, role, part, selector)
        if not refusals.errors:
            await write_graph_status(self._client, self._cache.graphs, body, graph_status(body, parts))
            return
        refused = refusals.error()
        if not _is_passing(refused):
            failed = {"Degraded": (True, "ApplyFailed", refused.message)}
            await write_graph_status(
                self._client, self._cache.graphs, body, graph_status(body, parts, failed)
            )
        raise refused

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
        parts = self._parts(body["metadata"]["name"], {}, None)
        await write_graph_status(self._client, self._cache.graphs, body, graph_status(body, parts, failed))

    async def _count_pods(
        self, desired: Desired, scaled_by: Mapping[str, str], refusals: _Refusals
    ) -> dict[str, int]:
        """Make the roles' objects; returns the pods of each role that are wanted now."""
        replicas: dict[str, int] = {}
        for role, spec in desired.roles.items():
            known = self._cache.roles_of(desired.name).get(role.value)
            replicas[role.value] = pods_of(spec) if known is None else int(known["spec"]["replicas"])
            with refusals.of(f"PenstockRole {desired.name}-{role}"):
                replicas[role.value] = await self._keep_role(desired, role, spec, scaled_by[role.value])
        for each in desired.workloads:
            workload = self._copy_of(each["kind"]).objects.get(each["metadata"]["name"])
            if workload is not None and self._cache.autoscaler_of(each["kind"], each["metadata"]["name"]):
                # The autoscaler is the pods' own, not the role's.
                replicas[part_name(each)] = workload["spec"]["replicas"]
        for role, spec in desired.roles.items():
            if (most := pods_max(spec)) is not None:
                replicas[role.value] = min(replicas[role.value], most)
        return replicas

    async def _apply(
        self, desired: Desired, objects: list[Object], refusals: _Refusals, *, is_full: bool
    ) -> None:
        """Apply all objects, the pods last; those whose needs were refused are left as they are."""
        applied = self._applied.setdefault(desired.name, _Applied())
        digest = digest_of(objects)
        if digest != applied.digest or is_full or self._has_drifted(applied):
            names = {(each["kind"], each["metadata"]["name"]) for each in objects}
            self._applied[desired.name] = applied = _Applied(digest, left=names)
        if not applied.left:
            return
        absent: set[tuple[str, str]] = set()
        for each in sorted(objects, key=lambda each: each["kind"] in WORKLOADS):
            kind, name = each["kind"], each["metadata"]["name"]
            if (kind, name) not in applied.left:
                continue
            with refusals.of(f"{kind} {name}"):
                if lacking := _needs(each) & absent:
                    texts = (" ".join(needed) for needed in sorted(lacking))
                    text = f"is left as it is, for the cluster lacks {', '.join(texts)}, which its pods need"
                    raise KubernetesError(text, status=refusals.error().status)
                self._note_applied(applied, await self._apply_object(each))
                applied.left.discard((kind, name))
            if (kind, name) not in applied.left:
                continue
            if kind in WORKLOADS:
                await self._scale_refused(each, refusals)
            elif kind in _NEEDED and await self._is_absent(desired.name, kind, name):
                absent.add((kind, name))
        await self._remove(desired, refusals, _AT_ONCE)
        if not applied.left:
            pods = {
                part_name(each): each["spec"]["replicas"] for each in objects if each["kind"] in WORKLOADS
            }
            _log.info("graph_applied", graph=desired.name, objects=len(objects), pods=pods)

    def _note_applied(self, applied: _Applied, made: Object) -> None:
        kind, name = made["kind"], made["metadata"]["name"]
        if (names := self._cache.names.get(kind)) is not None:
            applied.names.add((kind, name))
            names.put(made)  # the watch is behind
        if kind in WORKLOADS:
            applied.generations[kind, name] = made["metadata"].get("generation", 0)
            self._copy_of(kind).objects[name] = made  # the watch is behind

    async def _is_absent(self, graph: str, kind: str, name: str) -> bool:
        if (names := self._cache.names.get(kind)) is not None:
            return name not in names.found
        listing = await self._client.list(_KINDS[kind], f"{GRAPH_LABEL}={graph}")
        return name not in {each["metadata"]["name"] for each in listing.objects}

    async def _apply_object(self, body: Object) -> Object:
        """Apply an object; says of a workload that this cluster cannot have what to do."""
        kind, name = body["kind"], body["metadata"]["name"]
        pair = {STATEFUL_SETS.kind: LEADER_WORKER_SETS, LEADER_WORKER_SETS.kind: STATEFUL_SETS}
        other = pair.get(kind)
        if other is not None and name in self._copy_of(other.kind).objects:
            raise KubernetesError(
                f"a {other.kind} of this name is there, and pods of both would have the same names; delete the {other.kind}"
                f" (kubectl delete {other.plural} {name}) and the operator makes the {kind}",
                status=409
                if "deletionTimestamp" in self._copy_of(other.kind).objects[name]["metadata"]
                else 422,
            )
        try:
            return await self._client.apply(_KINDS[kind], body, manager=MANAGER)
        except KubernetesError as error:
            if error.status == 404 and kind == LEADER_WORKER_SETS.kind:
                raise KubernetesError(
                    "the cluster has no LeaderWorkerSets, which roles with nodes need; install them (https://lws.sigs.k8s.io)",
                    status=error.status,
                    reason=error.reason,
                ) from error
            if error.status == 422 and "updates to statefulset spec" in error.message:
                raise KubernetesError(
                    f"{error.message}: its pods stay as they are, and a volume of kv.disk keeps its size; set the former size, or delete the"
                    f" StatefulSet (kubectl delete statefulset {name}) and the operator makes it with the new one",
                    status=error.status,
                    reason=error.reason,
                ) from error
            raise

    async def _scale_refused(self, body: Object, refusals: _Refusals) -> None:
        """Give a workload whose new template was refused its number of pods all the same."""
        kind, name, number = body["kind"], body["metadata"]["name"], body["spec"]["replicas"]
        live = self._copy_of(kind).objects.get(name)
        if live is not None and live["spec"].get("replicas") != number:
            with refusals.of(f"{kind} {name}"):
                await self._client.patch(_KINDS[kind], name, {"spec": {"replicas": number}})

    async def _end_replaced(self, desired: Desired, numbers: Mapping[str, int], refusals: _Refusals) -> None:
        """End workloads that the graph no longer has, pod by pod as those that take their place are ready."""
        wanted = {(each["kind"], each["metadata"]["name"]) for each in desired.workloads}
        for live in self._cache.workloads(desired.name):
            kind, name, metadata = live["kind"], live["metadata"]["name"], live["metadata"]
            if (
                (kind, name) in wanted
                or "deletionTimestamp" in metadata
                or not _is_owned(live, desired.owner)
            ):
                continue
            keep = self._kept_pods(desired, live, numbers)
            with refusals.of(f"{kind} {name}"):
                if keep == 0:
                    await self._client.delete(_KINDS[kind], name, uid=metadata["uid"])
                    self._copy_of(kind).objects.pop(name, None)  # the watch is behind
                    _log.info("object_removed", graph=desired.name, kind=kind, name=name)
                elif keep != live["spec"].get("replicas", 1):
                    await self._client.patch(_KINDS[kind], name, {"spec": {"replicas": keep}})

    def _kept_pods(self, desired: Desired, live: Object, numbers: Mapping[str, int]) -> int:
        """Give the number of pods that a workload which the graph no longer has keeps for now.

        Its place take the same part's new workload, or all roles where the part is gone. Each new pod that is ready ends an old one; on
        GPUs one old pod ends before, since a free GPU is seldom, but never the last one that answers.
        """
        part = part_name(live)
        if part not in set(Role):
            return 0
        is_same = part in numbers
        wanted = [each for each in desired.workloads if not is_same or part_name(each) == part]
        found = [self._copy_of(each["kind"]).objects.get(each["metadata"]["name"]) for each in wanted]
        new = [
            part_of(part_name(each), [] if body is None else [body], (), wanted=numbers[part_name(each)])
            for each, body in zip(wanted, found, strict=True)
        ]
        roles = [each for each in new if each.is_role]
        if all(each.ready >= each.wanted for each in roles) and (is_same or serves(new)):
            return 0
        role = self._cache.roles_of(desired.name).get(part)
        base = numbers[part] if is_same else int((role or live)["spec"]["replicas"])
        ready = sum(each.ready for each in roles)
        on_gpus = any(
            HARDWARE_LABEL in (template["metadata"].get("labels") or {}) for template in pod_templates(live)
        )
        if None in found:  # one was refused
            return base
        least = 0 if (ready if is_same else serves(new)) else min(1, base)
        return min(max(base - ready - on_gpus, least), int(live["spec"]["replicas"]))

    async def _mark_leaving(self, name: str, refusals: _Refusals) -> None:
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
                with refusals.of(f"Pod {metadata['name']}"):
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

    async def _tidy(self, desired: Desired, parts: list[PartHealth], refusals: _Refusals) -> None:
        """Delete what earlier revisions left, once no pod uses it."""
        applied = self._applied[desired.name]
        if applied.is_clean or not all(part.is_current and not part.ending for part in parts):
            return
        names = {f"{desired.name}-{role}" for role in desired.roles}
        for role in self._cache.roles_of(desired.name).values():
            if role["metadata"]["name"] not in names:
                with refusals.of(f"PenstockRole {role['metadata']['name']}"):
                    await self._client.delete(ROLES, role["metadata"]["name"])
        await self._remove(desired, refusals, [kind for kind in _KINDS if kind not in WORKLOADS])
        applied.is_clean = not refusals.errors

    async def _remove(self, desired: Desired, refusals: _Refusals, kinds: Iterable[str]) -> None:
        """Delete objects of this graph, of some kinds, that the graph no longer has."""
        wanted = {(each["kind"], each["metadata"]["name"]) for each in desired.objects}
        for kind in kinds:
            with refusals.of(f"{kind} of {desired.name}"):
                try:
                    listing = await self._client.list(_KINDS[kind], f"{GRAPH_LABEL}={desired.name}")
                except KubernetesError as error:
                    if error.status == 404:  # a kind that this cluster does not have
                        continue
                    raise
                for found in listing.objects:
                    metadata = found["metadata"]
                    if _is_owned(found, desired.owner) and (kind, metadata["name"]) not in wanted:
                        await self._client.delete(_KINDS[kind], metadata["name"], uid=metadata["uid"])
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

    def _autoscaler(self, graph: str, part: str) -> str:
        name = f"{graph}-{part}"
        kinds = (ROLES.kind, *WORKLOADS)
        return next((found for kind in kinds if (found := self._cache.autoscaler_of(kind, name))), "")

    def _parts(
        self, name: str, scaled_by: Mapping[str, str], numbers: Mapping[str, int] | None
    ) -> list[PartHealth]:
        """Read the state of all parts that are wanted, and of those that run.

        Args:
            name: of the graph.
            scaled_by: autoscalers of parts.
            numbers: pods of each part that is wanted; None where the graph cannot be read, and all that runs is left as it is.
        """
        workloads: dict[str, list[Object]] = {part: [] for part in numbers or ()}
        for live in self._cache.workloads(name):
            workloads.setdefault(part_name(live), []).append(live)
        parts = []
        for part, found in workloads.items():
            wanted = None if numbers is None else numbers.get(part, 0)
            made = part_of(part, found, self._cache.pods_of(name, part), wanted=wanted)
            made.scaled_by = scaled_by.get(part, "")
            parts.append(made)
        return parts

    def _images(self, name: str) -> dict[str, str]:
        """Give the images that a graph's pods have now, by the field of the options that says them."""
        images = {}
        for live in sorted(self._cache.workloads(name), key=lambda live: part_name(live) == FRONTEND):
            for template in pod_templates(live):
                option = "gpu_image" if _is_on_gpus(template) else "image"
                for container in template["spec"]["containers"]:
                    if container["name"] == CONTAINER:
                        images[option] = container["image"]
        return images


def _needs(body: Object) -> set[tuple[str, str]]:
    """Name the objects without which a workload's pods do not start, by kind and name."""
    found: set[tuple[str, str]] = set()
    for template in pod_templates(body) if body["kind"] in WORKLOADS else ():
        spec = template["spec"]
        found |= {(kind, spec["serviceAccountName"]) for kind in ("ServiceAccount", "Role", "RoleBinding")}
        for volume in spec["volumes"]:
            if "configMap" in volume:
                found.add(("ConfigMap", volume["configMap"]["name"]))
            if "persistentVolumeClaim" in volume:
                found.add(("PersistentVolumeClaim", volume["persistentVolumeClaim"]["claimName"]))
    return found


def _is_on_gpus(template: Object) -> bool:
    return HARDWARE_LABEL in (template["metadata"].get("labels") or {})


def _is_owned(body: Object, owner: Object) -> bool:
    return any(each["uid"] == owner["uid"] for each in body["metadata"].get("ownerReferences") or ())
