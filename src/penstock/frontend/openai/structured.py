"""What an answer's text must be: OpenAI's `response_format`, vLLM's `structured_outputs` and its older `guided_json` and the like."""

from typing import Any

import msgspec

from penstock.core.errors import RequestError
from penstock.frontend.openai.bodies import ChatRequest, GenerationRequest
from penstock.frontend.openai.tools import required_calls

_KINDS = ("json", "json_object", "regex", "choice", "grammar", "structural_tag")
_GUIDED = ("json", "regex", "choice", "grammar")
STRUCTURED_BYTES_MAX = 1 << 20
_FORMATS = ("text", "json_object", "json_schema")


def structured_of(request: GenerationRequest) -> bytes | None:
    """Give `SamplingParams.structured`; None where any text will do.

    Raises:
        RequestError: a field is malformed or too large, or two contradict each other.
    """
    try:
        structured = _structured_of(request)
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


def _structured_of(request: GenerationRequest) -> bytes | None:
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
    given = [kind for kind in _KINDS if outputs.get(kind) is not None] if isinstance(outputs, dict) else []
    if len(given) != 1:
        raise RequestError(
            f"structured_outputs: must be an object with exactly one of {', '.join(_KINDS)}, got"
            f" {', '.join(given) or 'none of them'}",
            param="structured_outputs",
        )
    return msgspec.json.encode(outputs)


def _outputs_of(request: GenerationRequest) -> Any:
    """Give `structured_outputs`, or the same made of the `guided_*` field that is there."""
    outputs = request.structured_outputs
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


def _of_response_format(response_format: Any) -> bytes | None:
    if response_format is None:
        return None
    kind = response_format.get("type") if isinstance(response_format, dict) else None
    if kind not in _FORMATS:
        raise RequestError(
            f"response_format.type: must be one of {', '.join(_FORMATS)}, got {kind!r}",
            param="response_format",
        )
    if kind == "text":
        return None
    if kind == "json_object":
        return msgspec.json.encode({"json_object": True})
    named = response_format.get("json_schema")
    schema = named.get("schema") if isinstance(named, dict) else None
    if not isinstance(schema, dict):
        raise RequestError(
            "response_format.json_schema.schema: must be an object, the JSON schema of the answer",
            param="response_format",
        )
    return msgspec.json.encode({"json": schema})
