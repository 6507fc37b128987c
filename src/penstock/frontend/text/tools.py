"""Tools spelled out for chat templates that refuse them as clients send them."""

from typing import Any

_LEVELS_MAX = 32


def spelled_out(tool: dict[str, Any]) -> dict[str, Any]:
    """Give a function with all that a template may read of it.

    Descriptions and parameters that are missing or null are empty, a type that is a list is an `anyOf`, and a schema that is
    `true` is an object.
    """
    function = tool["function"]
    parameters = function.get("parameters")
    schema = _schema(parameters if isinstance(parameters, dict) else {}, 0)
    if not isinstance(schema.get("properties"), dict):
        schema["properties"] = {}
    said = {"description": function.get("description") or "", "parameters": {"type": "object"} | schema}
    return {**tool, "function": {**function, **said}}


def _schema(schema: Any, level: int) -> dict[str, Any]:
    given = schema if isinstance(schema, dict) else {}
    if level > _LEVELS_MAX:
        return given
    whole = {**given, "description": given.get("description") or ""}
    if isinstance(kinds := given.get("type"), list):
        del whole["type"]
        whole.setdefault("anyOf", [{"type": kind} for kind in kinds])
    if isinstance(properties := given.get("properties"), dict):
        whole["properties"] = {name: _schema(each, level + 1) for name, each in properties.items()}
    if "items" in given:
        whole["items"] = _schema(given["items"], level + 1)
    return whole
