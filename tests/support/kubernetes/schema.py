"""Structural schemas of CustomResourceDefinitions: refused where they are none, used to check and to prune objects."""

import functools
import json
from typing import Any

import jsonschema

from tests.support.kubernetes.problems import invalid
from tests.support.kubernetes.resources import Object

_KEYWORDS = {
    "type", "properties", "items", "required", "enum", "description", "title", "default", "nullable", "format", "pattern",
    "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf", "minLength", "maxLength", "minItems",
    "maxItems", "uniqueItems", "minProperties", "maxProperties", "additionalProperties", "oneOf", "anyOf", "allOf", "not",
    "example", "externalDocs", "x-kubernetes-preserve-unknown-fields", "x-kubernetes-int-or-string",
    "x-kubernetes-embedded-resource", "x-kubernetes-list-type", "x-kubernetes-list-map-keys", "x-kubernetes-map-type",
    "x-kubernetes-validations",
}  # fmt: skip
_OPEN, _INT_OR_STRING = "x-kubernetes-preserve-unknown-fields", "x-kubernetes-int-or-string"


def check_definition(definition: Object) -> None:
    """Refuse a definition whose schemas are not structural, as apiextensions/v1 does; raises Refused (422)."""
    causes: list[str] = []
    for index, version in enumerate(definition["spec"]["versions"]):
        place = f"spec.versions[{index}].schema.openAPIV3Schema"
        schema = version.get("schema", {}).get("openAPIV3Schema")
        if schema is None:
            causes.append(f"{place}: Required value")
        else:
            _structural(schema, place, causes)
    wanted = f"{definition['spec']['names']['plural']}.{definition['spec']['group']}"
    if definition["metadata"]["name"] != wanted:
        causes.append(f"metadata.name: must be {wanted}")
    if causes:
        raise invalid("CustomResourceDefinition", definition["metadata"]["name"], causes)


def _structural(schema: Object, place: str, causes: list[str]) -> None:
    _check_node(schema, place, causes)
    extra = schema.get("additionalProperties")
    for name, part in schema.get("properties", {}).items():
        _structural(part, f"{place}.properties[{name}]", causes)
    if isinstance(extra, dict):
        _structural(extra, f"{place}.additionalProperties", causes)
    if "items" in schema:
        _structural(schema["items"], f"{place}.items", causes)


def _check_node(schema: Object, place: str, causes: list[str]) -> None:
    unknown = schema.keys() - _KEYWORDS
    if unknown:
        causes.append(f"{place}: unknown keywords {sorted(unknown)}")
    if "type" not in schema and not schema.get(_OPEN) and not schema.get(_INT_OR_STRING):
        causes.append(f"{place}.type: Required value: must not be empty for specified object fields")
    if isinstance(schema.get("type"), list):
        causes.append(f"{place}.type: must be one type")
    causes += [
        f"{place}.{limit}: must be a boolean"
        for limit in ("exclusiveMinimum", "exclusiveMaximum")
        if not isinstance(schema.get(limit, True), bool)
    ]
    extra = schema.get("additionalProperties")
    if extra is False:
        causes.append(f"{place}.additionalProperties: Forbidden: must not be false")
    if extra is not None and "properties" in schema:
        causes.append(f"{place}.additionalProperties: Forbidden: and properties are mutually exclusive")
    if schema.get("uniqueItems"):
        causes.append(f"{place}.uniqueItems: Forbidden: cannot be set to true")
    for junctor in ("anyOf", "oneOf", "allOf"):
        for number, branch in enumerate(schema.get(junctor, ())):
            taken = branch.keys() & {
                "type",
                "default",
                "nullable",
                "additionalProperties",
                "description",
                "title",
            }
            if taken and not schema.get(_INT_OR_STRING):
                causes.append(f"{place}.{junctor}[{number}]: Forbidden: {sorted(taken)}")


def check(schema: Object, body: Object) -> None:
    """Refuse an object that does not fit its schema; raises Refused (422)."""
    errors = _validator(json.dumps(schema, sort_keys=True)).iter_errors(body)
    causes = [f"{'.'.join(map(str, error.absolute_path)) or '<root>'}: {error.message}" for error in errors]
    if causes:
        raise invalid(body.get("kind", ""), body["metadata"]["name"], causes)


def prune(schema: Object, value: Any, *, is_root: bool = True) -> Any:
    """Drop the fields that the schema does not name, and fill in its defaults."""
    if isinstance(value, list) and "items" in schema:
        return [prune(schema["items"], each, is_root=False) for each in value]
    if not isinstance(value, dict):
        return value
    properties = schema.get("properties", {})
    extra = schema.get("additionalProperties")
    kept: Object = {}
    for name, part in value.items():
        if is_root and name in {"apiVersion", "kind", "metadata"}:
            kept[name] = part
        elif name in properties:
            if part is not None or properties[name].get("nullable"):
                kept[name] = prune(properties[name], part, is_root=False)
        elif isinstance(extra, dict):
            kept[name] = prune(extra, part, is_root=False)
        elif extra is True or schema.get(_OPEN):
            kept[name] = part
    for name, part in properties.items():
        if name not in kept and "default" in part:
            kept[name] = part["default"]
    return kept


@functools.lru_cache(maxsize=32)
def _validator(text: str) -> jsonschema.Draft4Validator:
    return jsonschema.Draft4Validator(_translate(json.loads(text)))


def _translate(schema: Object) -> Object:
    """Say `nullable` and `int-or-string` in JSON schema's words; draft 4 has exclusive limits as booleans, too."""
    result = {key: value for key, value in schema.items() if not key.startswith("x-")}
    if schema.get(_INT_OR_STRING):
        result["type"] = ["integer", "string"]
    if "properties" in result:
        result["properties"] = {name: _translate(part) for name, part in result["properties"].items()}
    for key in ("items", "additionalProperties"):
        if isinstance(result.get(key), dict):
            result[key] = _translate(result[key])
    if result.pop("nullable", False):
        if "type" in result:
            kinds = result["type"] if isinstance(result["type"], list) else [result["type"]]
            result["type"] = [*kinds, "null"]
        if "enum" in result:
            result["enum"] = [*result["enum"], None]
    return result
