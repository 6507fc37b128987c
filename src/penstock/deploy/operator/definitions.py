"""The operator's kinds: a PenstockGraph is a deployment, a PenstockRole the number of one role's workers.

A definition has one subresource `scale`, and a graph several roles; so each role is an object of its own, which an autoscaler may own.
"""

import warnings
from collections.abc import Iterator, Mapping
from typing import Any, get_args

import pydantic
from pydantic.json_schema import PydanticJsonSchemaWarning

from penstock.core.config import Config, field_docs
from penstock.deploy.hosts.kubernetes_connector import GROUP, ROLES, VERSION
from penstock.deploy.manifests.options import RenderOptions
from penstock.graph import Graph
from penstock.runtime.kubernetes import Object, Resource

Schema = dict[str, Any]
OPEN: Schema = {"x-kubernetes-preserve-unknown-fields": True}
_KEPT = (
    "type", "description", "minimum", "maximum", "minLength", "maxLength", "minItems", "maxItems", "pattern", "enum",
    "multipleOf",
)  # fmt: skip
_SHORT_FORMS = {
    "engine",
    "disk",
    "object",
    "host",
    "replicas_max",
    "weight_dtype",
    "expert_dtype",
    "kv_dtype",
}
"""Fields that take more than their type says, such as `engine: {name: vllm}` or `disk: /var/cache:10GiB`."""
_COMPARED = {"exclusiveMinimum": "minimum", "exclusiveMaximum": "maximum"}


def structural_schema(model: type[Config], *, without: tuple[str, ...] = ()) -> Schema:
    """Give the schema of a model: without references, defaults and unions; `without` are fields left out."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", PydanticJsonSchemaWarning)  # defaults are left out anyway
        document = model.model_json_schema()
    _describe(model, document, document.get("$defs", {}))
    made = _convert(document, document.get("$defs", {}))
    for field in without:
        made["properties"].pop(field)
    made.pop("description", None)
    return made


def _describe(model: type[pydantic.BaseModel], schema: Schema, definitions: Mapping[str, Any]) -> None:
    """Put the docstrings of fields into a schema, and into those that it refers to."""
    docs = field_docs(model)
    for name, field in model.model_fields.items():
        part = schema["properties"].get(name)
        if part is None or "description" in part:
            continue  # it has been here
        if name in docs:
            part["description"] = docs[name]
        for inner in _models_in(field.annotation):
            if (target := definitions.get(inner.__name__)) is not None:
                _describe(inner, target, definitions)


def _models_in(annotation: Any) -> Iterator[type[pydantic.BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, pydantic.BaseModel):
        yield annotation
    for argument in get_args(annotation):
        yield from _models_in(argument)


def _convert(schema: Mapping[str, Any], definitions: Mapping[str, Any]) -> Schema:
    if "$ref" in schema:
        target = definitions[schema["$ref"].rpartition("/")[2]]
        return _convert({**target, **{key: schema[key] for key in schema if key != "$ref"}}, definitions)
    if "anyOf" in schema:
        branches = [branch for branch in schema["anyOf"] if branch.get("type") != "null"]
        about = {key: schema[key] for key in ("description",) if key in schema}
        if len(branches) != 1:
            return {**OPEN, **about}
        is_nullable = len(branches) < len(schema["anyOf"])
        made = _convert({**branches[0], **about}, definitions)
        return made | {"nullable": True} if is_nullable and "type" in made else made
    if "const" in schema:
        return {"type": "string", "enum": [schema["const"]]}
    if "type" not in schema:
        return {**OPEN, **{key: schema[key] for key in ("description",) if key in schema}}
    made = {key: schema[key] for key in _KEPT if key in schema}
    for limit, bound in _COMPARED.items():
        if limit in schema:
            made |= {bound: schema[limit], limit: True}
    if schema["type"] == "array":
        items = schema.get("items")
        made["items"] = _convert(items, definitions) if items else dict(OPEN)
    if schema["type"] == "object":
        made |= _object(schema, definitions)
    return made


def _object(schema: Mapping[str, Any], definitions: Mapping[str, Any]) -> Schema:
    if "properties" in schema:
        properties = {name: _field(name, part, definitions) for name, part in schema["properties"].items()}
        made: Schema = {"properties": properties}
        required = [name for name in schema.get("required", ()) if name not in _SHORT_FORMS]
        return made | {"required": required} if required else made
    values = schema.get("additionalProperties")
    return {"additionalProperties": _convert(values, definitions)} if isinstance(values, dict) else dict(OPEN)


def _field(name: str, part: Mapping[str, Any], definitions: Mapping[str, Any]) -> Schema:
    made = _convert(part, definitions)
    if name in _SHORT_FORMS:
        return {**OPEN, **{key: made[key] for key in ("description",) if key in made}}
    return made


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
