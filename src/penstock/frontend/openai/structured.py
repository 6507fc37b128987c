"""What an answer's text must be: OpenAI's `response_format`, vLLM's `structured_outputs` and its older `guided_json` and the like."""

from typing import Any

import msgspec

from penstock.core.errors import RequestError
from penstock.frontend.openai.bodies import ChatRequest, GenerationRequest
from penstock.frontend.openai.lenient import name_once
from penstock.frontend.openai.tools import DATA_KEYS, NAMING_KEYS, required_calls

_KINDS = ("json", "json_object", "regex", "choice", "grammar", "structural_tag")
_GUIDED = ("json", "regex", "choice", "grammar")
STRUCTURED_BYTES_MAX = 1 << 20
_TYPES = ("text", "json_object", "json_schema")
_SHAPES = frozenset({"type", "$ref", "anyOf", "oneOf", "allOf", "enum", "const"})
"""Keys by which a schema may say itself that the answer is an object."""
_FORMATS = frozenset(
    {"date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uri", "uuid"}
)
"""Values of a string's `format` that engines' grammars keep to; any other is an annotation, as JSON Schema has it."""


def structured_of(request: GenerationRequest) -> bytes | None:
    """Give `SamplingParams.structured`; None where any text will do.

    Raises:
        RequestError: a field is malformed or too large, or two contradict each other.
    """
    try:
        constraint = _constraint_of(request)
        if constraint is not None and (schema := _decoded(constraint.get("json"))) is not None:
            constraint = constraint | {"json": _without_annotations(schema)}
        structured = None if constraint is None else msgspec.json.encode(constraint)
    except RecursionError as error:
        raise RequestError(
            "response_format: the schema is nested too deeply; make it flatter", param="response_format"
        ) from error
    if structured is not None and len(structured) > STRUCTURED_BYTES_MAX:
        raise RequestError(
            f"response_format: the schema has {len(structured)} bytes, at most {STRUCTURED_BYTES_MAX} are allowed; make it smaller",
            param="response_format",
        )
    return structured


def _constraint_of(request: GenerationRequest) -> dict[str, Any] | None:
    by_format = _of_response_format(request.response_format)
    outputs = _outputs_of(request)
    calls = required_calls(request) if isinstance(request, ChatRequest) else None
    if calls is not None:
        if by_format is not None or outputs is not None:
            raise RequestError(
                "tool_choice: required calls contradict response_format and structured_outputs; send one of them",
                param="tool_choice",
            )
        return calls
    if outputs is None:
        return by_format
    if by_format is not None:
        raise RequestError(
            "structured_outputs: contradicts response_format; send one of them", param="structured_outputs"
        )
    given = [kind for kind in _KINDS if outputs.get(kind) is not None]
    if len(given) != 1:
        raise RequestError(
            f"structured_outputs: must be an object with exactly one of {', '.join(_KINDS)}, got"
            f" {', '.join(given) or 'none of them'}",
            param="structured_outputs",
        )
    return outputs


def _outputs_of(request: GenerationRequest) -> dict[str, Any] | None:
    """Give `structured_outputs`, or the same made of the `guided_*` field that is there; `json_object: false` asks for nothing."""
    outputs: dict[str, Any] | None = request.structured_outputs
    if outputs is not None and not isinstance(outputs, dict):
        raise RequestError(
            f"structured_outputs: must be an object, got {str(outputs)[:40]!r}", param="structured_outputs"
        )
    if outputs is not None and "json_object" in outputs:
        wanted = outputs["json_object"]
        if wanted is not None and not isinstance(wanted, bool):
            raise RequestError(
                f"structured_outputs.json_object: must be true or false, got {str(wanted)[:40]!r}",
                param="structured_outputs",
            )
        if not wanted:
            outputs = {key: value for key, value in outputs.items() if key != "json_object"}
            if wanted is False and all(outputs.get(kind) is None for kind in _KINDS):
                outputs = None
    for kind in _GUIDED:
        value = getattr(request, f"guided_{kind}")
        if value is None:
            continue
        if outputs is not None:
            raise RequestError(
                f"guided_{kind}: contradicts another guided field or structured_outputs; send one of them",
                param=f"guided_{kind}",
            )
        outputs = {kind: value}
    return outputs


def _of_response_format(response_format: Any) -> dict[str, Any] | None:
    if response_format is None:
        return None
    kind = response_format.get("type") if isinstance(response_format, dict) else None
    if kind not in _TYPES:
        raise RequestError(
            f"response_format.type: must be one of {', '.join(_TYPES)}, got {kind!r}",
            param="response_format",
        )
    if kind == "text":
        return None
    if kind == "json_object" and response_format.get("schema") is None:
        return {"json_object": True}
    named, place = response_format, "schema"
    if kind == "json_schema":
        named, place = response_format.get("json_schema"), "json_schema.schema"
    schema = named.get("schema") if isinstance(named, dict) else None
    if not isinstance(schema, dict):
        raise RequestError(
            f"response_format.{place}: must be an object, the JSON schema of the answer",
            param="response_format",
        )
    if kind == "json_object" and not _SHAPES & schema.keys():
        schema = {"type": "object"} | schema
    return {"json": schema}


def _decoded(schema: Any) -> dict[str, Any] | None:
    """Give a schema that is an object, or the JSON text of one with a `format`; None for any other."""
    if isinstance(schema, str) and '"format"' in schema:
        try:
            schema = msgspec.json.decode(schema)
        except ValueError:  # the engine refuses it
            return None
    return schema if isinstance(schema, dict) else None


def _without_annotations(schema: Any) -> Any:
    """Copy a schema without each `format` that only annotates."""
    if isinstance(schema, list):
        return [_without_annotations(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    kept: dict[str, Any] = {}
    for key, value in schema.items():
        if key == "format" and isinstance(value, str) and value not in _FORMATS:
            name_once(f"format: {value}")
        elif key in NAMING_KEYS and isinstance(value, dict):
            kept[key] = {name: _without_annotations(each) for name, each in value.items()}
        else:
            kept[key] = value if key in DATA_KEYS else _without_annotations(value)
    return kept
