"""The operator's kinds: a PenstockGraph is a deployment, a PenstockRole the number of one role's workers.

A definition has one subresource `scale`, and a graph several roles; so each role is an object of its own, which an autoscaler may own.
"""

from typing import Any

from penstock.deploy.hosts.roles import GROUP, ROLES, VERSION
from penstock.deploy.manifests.options import RenderOptions
from penstock.deploy.operator.schema import Schema, structural_schema
from penstock.graph import Graph
from penstock.runtime.kubernetes import Object, Resource

GRAPHS = Resource(GROUP, VERSION, "penstockgraphs", "PenstockGraph")
_TEXT: Schema = {"type": "string"}
_COUNT: Schema = {"type": "integer", "minimum": 0}
_OF_SLURM = ("nodes", "gpus_per_node")


def definitions() -> list[Object]:
    """Give both CustomResourceDefinitions."""
    return [_graph_definition(), _role_definition()]


def _graph_definition() -> Object:
    options = structural_schema(RenderOptions, without=("namespace", *_OF_SLURM))
    graph = structural_schema(Graph, without=("name",))
    spec = {
        "type": "object",
        "required": ["graph"],
        "properties": {
            "graph": graph
            | {"description": "The deployment, as in a graph file; its name is this object's."},
            "options": options | {"description": "Images, Secret, mounts and cache, as for penstock render."},
        },
    }
    part = {
        "type": "object",
        "properties": {"name": _TEXT, "replicas": _COUNT, "ready": _COUNT, "scaledBy": _TEXT},
    }
    status = {
        "type": "object",
        "properties": {
            "observedGeneration": {"type": "integer"},
            "workers": _TEXT | {"description": "Ready and wanted workers, as 3/4."},
            "summary": _TEXT | {"description": "Why it is not ready, or what it does."},
            "parts": {"type": "array", "items": part},
            "conditions": {"type": "array", "items": _condition(), "x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["type"]},
        },
    }  # fmt: skip
    columns = [
        ("Model", "string", ".spec.graph.model"),
        ("Ready", "string", '.status.conditions[?(@.type=="Ready")].status'),
        ("Workers", "string", ".status.workers"),
        ("Status", "string", ".status.summary"),
        ("Age", "date", ".metadata.creationTimestamp"),
    ]
    return _definition(GRAPHS, "psg", spec=spec, status=status, columns=columns, subresources={})


def _role_definition() -> Object:
    spec = {
        "type": "object",
        "required": ["graph", "role", "replicas"],
        "properties": {
            "graph": _TEXT | {"description": "The PenstockGraph that it is a role of."},
            "role": {"type": "string", "enum": ["aggregated", "prefill", "decode"]},
            "replicas": _COUNT | {"description": "Workers; set by scale."},
            "leaving": {
                "type": "array",
                "items": _TEXT,
                "description": "Pods that end first when there are fewer workers; set by the planner.",
            },
        },
    }
    status = {
        "type": "object",
        "properties": {
            "replicas": _COUNT,
            "readyReplicas": _COUNT,
            "selector": _TEXT | {"description": "Selects the role's pods, for autoscalers."},
            "scaledBy": _TEXT
            | {"description": "The autoscaler that owns the number, to which the planner yields."},
        },
    }
    columns = [
        ("Graph", "string", ".spec.graph"),
        ("Role", "string", ".spec.role"),
        ("Wanted", "integer", ".spec.replicas"),
        ("Ready", "integer", ".status.readyReplicas"),
    ]
    scale = {
        "specReplicasPath": ".spec.replicas",
        "statusReplicasPath": ".status.replicas",
        "labelSelectorPath": ".status.selector",
    }
    return _definition(ROLES, "psr", spec=spec, status=status, columns=columns, subresources={"scale": scale})


def _condition() -> Schema:
    return {
        "type": "object",
        "required": ["type", "status", "reason", "message", "lastTransitionTime"],
        "properties": {
            "type": _TEXT,
            "status": {"type": "string", "enum": ["True", "False", "Unknown"]},
            "reason": _TEXT,
            "message": _TEXT,
            "lastTransitionTime": {"type": "string", "format": "date-time"},
            "observedGeneration": {"type": "integer"},
        },
    }


def _definition(
    resource: Resource,
    short: str,
    *,
    spec: Schema,
    status: Schema,
    columns: list[tuple[str, str, str]],
    subresources: dict[str, Any],
) -> Object:
    schema = {"type": "object", "required": ["spec"], "properties": {"spec": spec, "status": status}}
    version = {
        "name": resource.version,
        "served": True,
        "storage": True,
        "schema": {"openAPIV3Schema": schema},
        "subresources": {"status": {}, **subresources},
        "additionalPrinterColumns": [
            {"name": name, "type": kind, "jsonPath": path} for name, kind, path in columns
        ],
    }
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": f"{resource.plural}.{resource.group}"},
        "spec": {
            "group": resource.group,
            "scope": "Namespaced",
            "names": {
                "plural": resource.plural,
                "singular": resource.kind.lower(),
                "kind": resource.kind,
                "shortNames": [short],
                "categories": ["penstock"],
            },
            "versions": [version],
        },
    }
