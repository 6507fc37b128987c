"""Copies of the objects that the operator looks at, kept by watches; each change wakes the graphs that it is about."""

import asyncio
import random
from collections.abc import Callable

from penstock.core.errors import Unavailable
from penstock.core.log import get_logger
from penstock.deploy.hosts.kubernetes_connector import ROLES
from penstock.deploy.manifests.workloads import KIND as LEADER_WORKER_SET
from penstock.deploy.operator.definitions import GRAPHS
from penstock.runtime.kubernetes import KubernetesClient, KubernetesError, Object, Pace, Reflector, Resource

DEPLOYMENTS = Resource("apps", "v1", "deployments", "Deployment")
STATEFUL_SETS = Resource("apps", "v1", "statefulsets", "StatefulSet")
LEADER_WORKER_SETS = Resource("leaderworkerset.x-k8s.io", "v1", "leaderworkersets", LEADER_WORKER_SET)
"""Of clusters that have it: a role whose workers span nodes needs it."""
PODS = Resource("", "v1", "pods", "Pod")
AUTOSCALERS = Resource("autoscaling", "v2", "horizontalpodautoscalers", "HorizontalPodAutoscaler")
_RBAC = "rbac.authorization.k8s.io"
KEPT = (
    Resource("", "v1", "serviceaccounts", "ServiceAccount"),
    Resource("", "v1", "configmaps", "ConfigMap"),
    Resource("", "v1", "services", "Service"),
    Resource(_RBAC, "v1", "roles", "Role"),
    Resource(_RBAC, "v1", "rolebindings", "RoleBinding"),
    Resource("policy", "v1", "poddisruptionbudgets", "PodDisruptionBudget"),
    Resource("networking.k8s.io", "v1", "networkpolicies", "NetworkPolicy"),
)
"""Of these it is known which are there, so that one that somebody deletes comes back at once."""
GRAPH_LABEL = "penstock.dev/graph"
OURS = "app.kubernetes.io/name=penstock"
INSTANCE, COMPONENT = "app.kubernetes.io/instance", "app.kubernetes.io/component"
_log = get_logger()


class ClusterCache:
    """What is in the operator's namespace. One event loop owns it."""

    def __init__(
        self, client: KubernetesClient, wake: Callable[[str], None], *, pace: Pace, rng: random.Random
    ) -> None:
        """Know nothing yet; `wake` is called with the name of each graph that a change is about."""
        self._client = client
        self._wake = wake
        self._pace = pace
        self._rng = rng
        self.graphs = Copy(GRAPHS, self._about)
        self.roles = Copy(ROLES, self._about)
        self.deployments = Copy(DEPLOYMENTS, self._about)
        self.stateful_sets = Copy(STATEFUL_SETS, self._about)
        self.leader_worker_sets = Copy(LEADER_WORKER_SETS, self._about, is_optional=True)
        self.pods = Copy(PODS, self._about)
        self.autoscalers = Copy(AUTOSCALERS, self._about)
        self.names = {resource.kind: Names(resource, wake) for resource in KEPT}

    async def run(self) -> None:
        """Keep the copies until cancelled."""
        async with asyncio.TaskGroup() as group:
            for copy in self._copies:
                is_own_kind = copy in {self.graphs, self.roles, self.autoscalers}
                labels = "" if is_own_kind else OURS
                reflector = Reflector(
                    self._client, copy.resource, labels, copy, pace=self._pace, rng=self._rng
                )
                group.create_task(reflector.run())
            for names in self.names.values():
                reflector = Reflector(
                    self._client, names.resource, GRAPH_LABEL, names, pace=self._pace, rng=self._rng
                )
                group.create_task(reflector.run())

    async def synced(self) -> None:
        """Wait until everything has been listed once."""
        for copy in self._copies:
            await copy.is_listed.wait()
        for names in self.names.values():
            await names.is_listed.wait()

    def workloads(self, graph: str) -> list[Object]:
        """Give a graph's Deployments, StatefulSets and LeaderWorkerSets; a part has two while one takes the place of the other."""
        return [
            body
            for copy in (self.deployments, self.stateful_sets, self.leader_worker_sets)
            for body in copy.objects.values()
            if _labels(body).get(INSTANCE) == graph
        ]

    def pods_of(self, graph: str, part: str) -> list[Object]:
        return [
            body
            for body in self.pods.objects.values()
            if _labels(body).get(INSTANCE) == graph and _labels(body).get(COMPONENT) == part
        ]

    def roles_of(self, graph: str) -> dict[str, Object]:
        """Give a graph's PenstockRoles by role; one of another name is nobody's."""
        return {
            role: body
            for body in self.roles.objects.values()
            if (spec := body.get("spec") or {}).get("graph") == graph
            and body["metadata"]["name"] == f"{graph}-{(role := str(spec.get('role')))}"
        }

    def autoscaler_of(self, kind: str, name: str) -> str:
        """Give the autoscaler that owns the number of an object, also KEDA's; empty for none."""
        for body in self.autoscalers.objects.values():
            target = (body.get("spec") or {}).get("scaleTargetRef") or {}
            if target.get("kind") == kind and target.get("name") == name:
                return str(body["metadata"]["name"])
        return ""

    @property
    def _copies(self) -> tuple["Copy", ...]:
        return (
            self.graphs, self.roles, self.deployments, self.stateful_sets, self.leader_worker_sets, self.pods,
            self.autoscalers,
        )  # fmt: skip

    def _about(self, body: Object) -> None:
        """Wake the graphs that an object is about."""
        spec = body.get("spec") or {}
        if body.get("kind") == GRAPHS.kind:
            self._wake(body["metadata"]["name"])
        elif body.get("kind") == ROLES.kind:
            self._wake(str(spec.get("graph")))
        elif "scaleTargetRef" in spec:
            for graph in self.graphs.objects:
                self._wake(graph)
        elif graph_name := _labels(body).get(INSTANCE):
            self._wake(graph_name)


class Copy:
    """A follower that keeps the objects of one kind by name; of one that is optional there are none where the cluster has no such kind."""

    def __init__(
        self, resource: Resource, changed: Callable[[Object], None], *, is_optional: bool = False
    ) -> None:
        self.resource = resource
        self.is_optional = is_optional
        self.objects: dict[str, Object] = {}
        self.is_listed = asyncio.Event()
        self._changed = changed

    def listed(self, objects: list[Object]) -> None:
        before = self.objects
        self.objects = {body["metadata"]["name"]: body | {"kind": self.resource.kind} for body in objects}
        self.is_listed.set()
        for body in {**before, **self.objects}.values():
            self._changed(body)

    def put(self, body: Object) -> None:
        known = self.objects.get(body["metadata"]["name"])
        self.objects[body["metadata"]["name"]] = body
        if known is None or known["metadata"]["resourceVersion"] != body["metadata"]["resourceVersion"]:
            self._changed(body)

    def wrote(self, body: Object) -> None:
        """Take what the operator itself wrote: the watch is behind, and its news of that wake no graph."""
        self.objects[body["metadata"]["name"]] = body

    def deleted(self, body: Object) -> None:
        self.objects.pop(body["metadata"]["name"], None)
        self._changed(body)

    def connected(self) -> None:
        pass

    def lost(self, error: Unavailable) -> None:
        if self.is_optional and isinstance(error, KubernetesError) and error.status == 404:
            self.is_listed.set()
            return
        _say_lost(self.resource, error)


class Names:
    """A follower that keeps which objects of one kind there are, and wakes the graph of each that goes."""

    def __init__(self, resource: Resource, wake: Callable[[str], None]) -> None:
        self.resource = resource
        self.found: dict[str, str] = {}
        """Graphs of objects, by the objects' names."""
        self.is_listed = asyncio.Event()
        self._wake = wake

    def listed(self, objects: list[Object]) -> None:
        gone = self.found
        self.found = {}
        for body in objects:
            self.put(body)
            gone.pop(body["metadata"]["name"], None)
        self.is_listed.set()
        for graph in gone.values():
            self._wake(graph)

    def put(self, body: Object) -> None:
        self.found[body["metadata"]["name"]] = _labels(body).get(GRAPH_LABEL, "")

    def deleted(self, body: Object) -> None:
        self.found.pop(body["metadata"]["name"], None)
        self._wake(_labels(body).get(GRAPH_LABEL, ""))

    def connected(self) -> None:
        pass

    def lost(self, error: Unavailable) -> None:
        _say_lost(self.resource, error)


def _say_lost(resource: Resource, error: Unavailable) -> None:
    if isinstance(error, KubernetesError) and error.status in {403, 404}:
        _log.error(
            "objects_not_readable",
            kind=resource.kind,
            error=error.message,
            fix="apply deploy/kubernetes/crd.yaml and operator.yaml of this release",
        )
    else:
        _log.warning("api_server_unreachable", kind=resource.kind, error=error.message)


def part_name(body: Object) -> str:
    """Give the part of a graph that an object is of, such as `decode`; empty for none."""
    return _labels(body).get(COMPONENT, "")


def _labels(body: Object) -> dict[str, str]:
    return body["metadata"].get("labels") or {}
