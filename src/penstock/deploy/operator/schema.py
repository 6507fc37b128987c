"""Structural schemas, as CustomResourceDefinitions need them, of the models that read graphs.

They are looser than the models: where a field has a short form, any value passes, and the operator's check has the last word.
"""

import warnings
from collections.abc import Iterator, Mapping
from typing import Any, get_args

import pydantic
from pydantic.json_schema import PydanticJsonSchemaWarning

from penstock.core.config import Config, field_docs

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
