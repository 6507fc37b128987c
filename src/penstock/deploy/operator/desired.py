"""What a PenstockGraph wants: its graph, and the objects that run it."""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from penstock.core.errors import ConfigError
from penstock.core.types.instances import Role
from penstock.deploy.manifests.kubernetes import kubernetes_objects
from penstock.deploy.manifests.kubernetes.objects import WORKLOADS
from penstock.deploy.manifests.options import RenderOptions
from penstock.deploy.manifests.pod_graph import PLANNER_PORT
from penstock.deploy.operator.cache import GRAPH_LABEL, part_name
from penstock.deploy.operator.definitions import GRAPHS
from penstock.deploy.supervisor.local_part import PLANNER
from penstock.graph import Graph, RoleSpec
from penstock.runtime.kubernetes import Object


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
