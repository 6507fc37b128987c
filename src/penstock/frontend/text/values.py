"""Values that models write as plain text, made JSON: by the schema of a tool's argument, or as Python literals."""

import ast
import json
from collections.abc import Iterator, Mapping
from types import NoneType
from typing import Any
from urllib.parse import unquote

_PYTHON_CHARACTERS_MAX = 64 << 10
_DEPTH_MAX = 32
_NAMES = {"true": True, "false": False, "null": None, "none": None}
_OTHERS_THAN_TEXT: tuple[Any, ...] = (None, True, 0, 0.5, [], {})
_TYPES: dict[str, tuple[type, ...]] = {
    "null": (NoneType,),
    "boolean": (bool,),
    "integer": (int,),
    "number": (int, float),
    "string": (str,),
    "array": (list,),
    "object": (dict,),
}
_COMBINED = ("allOf", "anyOf", "oneOf")


def typed_json(text: str, key: str, schema: Any) -> str:
    """Give the value of argument `key` of a tool with this JSON schema as JSON: what the schema says that the text is."""
    allowed = {"anyOf": list(_schemas_of(key, schema, schema, 0))}
    kinds = [_admits(allowed, value, schema) for value in (*_OTHERS_THAN_TEXT, "")]
    if all(kinds):
        return _dumped(next(_json_readings(text), text))
    readings = [value for value in _readings(text) if not isinstance(value, str)] if any(kinds[:-1]) else []
    readings.append(text)
    for exact in (True, False):
        for value in readings:
            if _admits(allowed, value, schema, exact=exact):
                return _dumped(value)
    return _dumped(readings[0])


def python_value(node: ast.expr) -> Any:
    """Evaluate a literal, in which `true`, `false` and `null` are what they are in JSON.

    Raises:
        ValueError: it is none.
    """
    if isinstance(node, ast.Name) and node.id in _NAMES:
        return _NAMES[node.id]
    if isinstance(node, ast.List | ast.Tuple):
        return [python_value(each) for each in node.elts]
    if isinstance(node, ast.Dict) and None not in node.keys:
        keys = [python_value(key) for key in node.keys if key is not None]
        return dict(zip(keys, map(python_value, node.values), strict=True))
    return ast.literal_eval(node)


def _dumped(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, allow_nan=False)


def _readings(text: str) -> Iterator[Any]:
    """Give what a text may stand for."""
    yield from _json_readings(text)
    if (name := text.strip().lower()) in _NAMES:
        yield _NAMES[name]
    if text.lstrip()[:1] in {"[", "{", "("}:
        yield from _python_readings(text)


def _json_readings(text: str) -> Iterator[Any]:
    """Give the value that a text is in JSON, if it is one that JSON can hold."""
    try:
        value = json.loads(text)
        _dumped(value)
    except (ValueError, RecursionError):  # no JSON, or a number that JSON has not
        return
    yield value


def _python_readings(text: str) -> Iterator[Any]:
    if len(text) > _PYTHON_CHARACTERS_MAX:
        return
    try:
        value = python_value(ast.parse(text.strip(), mode="eval").body)
        _dumped(value)
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        return
    yield value


def _schemas_of(key: str, schema: Any, root: Any, depth: int) -> Iterator[Any]:
    """Give the schemas that a schema of objects has for one key."""
    if not isinstance(schema, Mapping) or depth > _DEPTH_MAX:
        return
    properties, others = schema.get("properties"), schema.get("additionalProperties")
    if isinstance(properties, Mapping) and key in properties:
        yield properties[key]
    elif isinstance(others, Mapping):
        yield others
    if "$ref" in schema:
        yield from _schemas_of(key, _referenced(schema["$ref"], root), root, depth + 1)
    for combined in _COMBINED:
        for each in _list(schema.get(combined)):
            yield from _schemas_of(key, each, root, depth + 1)


def _admits(schema: Any, value: Any, root: Any, *, exact: bool = False, depth: int = 0) -> bool:
    """Tell whether a schema admits a value; unless `exact` the kind of the value has to be right, and not the value."""
    if not isinstance(schema, Mapping) or depth > _DEPTH_MAX:
        return schema is not False
    if value is None and schema.get("nullable") is True:
        return True
    kinds = schema.get("type")
    if kinds is not None and not any(
        _is_a(kind, value) for kind in (kinds if isinstance(kinds, list) else [kinds])
    ):
        return False
    choices = [schema["const"]] if "const" in schema else schema.get("enum")
    if isinstance(choices, list) and not any(_is_like(each, value, exact=exact) for each in choices):
        return False

    def admits(each: Any) -> bool:
        return _admits(each, value, root, exact=exact, depth=depth + 1)

    if "$ref" in schema and not admits(_referenced(schema["$ref"], root)):
        return False
    return all(map(admits, _list(schema.get("allOf")))) and all(
        any(map(admits, alternatives))
        for name in ("anyOf", "oneOf")
        if (alternatives := _list(schema.get(name)))
    )


def _is_like(one: Any, value: Any, *, exact: bool) -> bool:
    """Tell whether two values are equal in JSON; without `exact` whether they have the same type."""
    return (
        (one == value and isinstance(one, bool) == isinstance(value, bool))
        if exact
        else type(one) is type(value)
    )


def _is_a(kind: Any, value: Any) -> bool:
    """Tell whether a value is of a JSON type; every value is of a type that JSON Schema does not know."""
    if kind == "integer" and isinstance(value, float):
        return value.is_integer()
    types = _TYPES.get(kind) if isinstance(kind, str) else None
    return types is None or (isinstance(value, types) and (kind == "boolean" or not isinstance(value, bool)))


def _list(schemas: Any) -> list[Any]:
    return schemas if isinstance(schemas, list) else []


def _referenced(reference: Any, root: Any) -> Any:
    """Give what a reference within a schema refers to; a schema of anything for one that leads elsewhere."""
    if not isinstance(reference, str) or not reference.startswith("#"):
        return {}
    found = root
    for part in unquote(reference[1:]).split("/")[1:]:
        name = part.replace("~1", "/").replace("~0", "~")
        if isinstance(found, list) and name.isdecimal() and int(name) < len(found):
            found = found[int(name)]
        elif isinstance(found, Mapping) and name in found:
            found = found[name]
        else:
            return {}
    return found
