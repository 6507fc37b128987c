"""Checks of a decoded request's values; every error names the field, the value and the allowed values.

Values are never clamped or dropped: a value that cannot be honoured is an error.
"""

from collections.abc import Sized
from typing import Any

import msgspec

from penstock.core.errors import RequestError
from penstock.frontend.apis.bodies import (
    PRIORITY_MAX,
    STOP_CHARACTERS_MAX,
    STOPS_MAX,
    ChatRequest,
    CompletionRequest,
    GenerationRequest,
    Message,
    agent_options,
    check_part,
)
from penstock.frontend.apis.decoding import name_once
from penstock.frontend.text.template import RESERVED

TOOLS_MAX = 512
NAME_CHARACTERS_MAX = 256
_CHOICES = ("none", "auto", "required")
_NO_PARAMETERS = {"type": "object", "properties": {}, "additionalProperties": False}
_OF_NO_PARAMETERS = frozenset({"type", "properties", "required", "$schema", "title", "description"})
"""Keys that a schema of no parameters may have."""
_EXPECT_CALLS = frozenset({"function", "parameters", "custom"})
"""Keys of tools that the client runs."""
_DEFINED = "#/$defs/"
DATA_KEYS = frozenset({"const", "enum", "default", "examples"})
"""Keys of a schema whose values are no schemas."""
NAMING_KEYS = frozenset({"properties", "patternProperties", "$defs", "definitions", "dependentSchemas"})
"""Keys whose values are schemas by names of any kind."""


def check_tools(request: ChatRequest) -> None:
    """Raises: RequestError: a tool or `tool_choice` is malformed, or names no tool."""
    tools = request.tools or []
    if len(tools) > TOOLS_MAX:
        raise RequestError(f"at most {TOOLS_MAX} are allowed, got {len(tools)}", field="tools")
    for index, tool in enumerate(tools):
        check_tool(tool, f"tools[{index}]")
    choice = request.tool_choice
    if choice is None or choice == "none":
        return
    if isinstance(choice, str) and choice not in _CHOICES:
        raise RequestError(
            f"must be one of {', '.join(_CHOICES)}, or name a tool, got {choice[:40]!r}",
            field="tool_choice",
        )
    functions = [tool["function"]["name"] for tool in tools if _is_function(tool)]
    if (name := named_tool(request)) is not None and name not in functions:
        raise _unknown(name, functions, "tool_choice.function.name")
    for number, name in enumerate(allowed_names(request) or ()):
        if name not in functions:
            raise _unknown(name, functions, f"tool_choice.allowed_tools.tools[{number}].function.name")
    if demands_calls(request) and not offered_tools(request):
        raise RequestError("'required' needs tools of type 'function'; add some", field="tool_choice")


def _unknown(name: str, functions: list[str], where: str) -> RequestError:
    return RequestError(
        f"must be one of {', '.join(map(repr, functions[:16])) or 'tools, of which there are none'},"
        f" got {name[:40]!r}",
        field=where,
        param="tool_choice",
    )


def offered_tools(request: ChatRequest) -> list[dict[str, Any]]:
    """Give the tools that the model is told of: functions, and where `tool_choice` allows some of them these alone."""
    if request.tool_choice == "none":
        return []
    allowed = allowed_names(request)
    return [
        tool
        for tool in request.tools or ()
        if _is_function(tool) and (allowed is None or tool["function"]["name"] in allowed)
    ]


def demands_calls(request: ChatRequest) -> bool:
    """Tell whether the answer must have calls, of any offered tool."""
    return request.tool_choice == "required" or _mode(request) == "required"


def allowed_names(request: ChatRequest) -> list[str] | None:
    """Give the functions that `tool_choice` allows; None where it allows all.

    Raises:
        RequestError: `allowed_tools` is malformed.
    """
    if _mode(request) is None:
        return None
    assert isinstance(request.tool_choice, dict)
    names = []
    for number, tool in enumerate(request.tool_choice["allowed_tools"].get("tools") or ()):
        if isinstance(tool, dict) and tool.get("type") != "function":
            continue  # of a type that the server would run
        function = tool.get("function") if isinstance(tool, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            where = f"tool_choice.allowed_tools.tools[{number}].function.name"
            raise RequestError("must be a tool's name", field=where, param="tool_choice")
        names.append(function["name"])
    return names


def _mode(request: ChatRequest) -> str | None:
    """Give the mode of `allowed_tools`; None where `tool_choice` is another."""
    choice = request.tool_choice
    if not isinstance(choice, dict) or choice.get("type") != "allowed_tools":
        return None
    allowed = choice.get("allowed_tools")
    if not isinstance(allowed, dict):
        allowed = {}
    mode = allowed.get("mode")
    is_mode = isinstance(mode, str) and mode in {"auto", "required"}
    if not is_mode or not isinstance(allowed.get("tools"), list):
        raise RequestError(
            "must be an object with mode 'auto' or 'required', and a list of tools",
            field="tool_choice.allowed_tools",
            param="tool_choice",
        )
    return str(mode)


def _is_function(tool: dict[str, Any]) -> bool:
    return tool.get("type") == "function"


def tool_schemas(request: ChatRequest) -> dict[str, Any] | None:
    """Give the JSON schema of each offered tool's arguments by its name; None without tools."""
    tools = offered_tools(request)
    return {tool["function"]["name"]: _schema(tool) for tool in tools} if tools else None


def named_tool(request: ChatRequest) -> str | None:
    """Give the tool that `tool_choice` names; None if it names none.

    Raises:
        RequestError: it is an object of another form.
    """
    choice = request.tool_choice
    if not isinstance(choice, dict) or choice.get("type") == "allowed_tools":
        return None
    kind, function = choice.get("type"), choice.get("function")
    if kind != "function":
        raise RequestError(
            f"must be 'function' or 'allowed_tools', as this server runs no tools itself, got {str(kind)[:40]!r}",
            field="tool_choice.type",
            param="tool_choice",
        )
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(name, str):
        raise RequestError(
            'must be {"type": "function", "function": {"name": NAME}} where it names a tool',
            field="tool_choice",
        )
    return name


def required_calls(request: ChatRequest) -> dict[str, Any] | None:
    """Give the constraint of required tool calls, as `structured_outputs` has it; None if the model may write text instead."""
    schemas = tool_schemas(request)
    if schemas is None:
        return None
    if (name := named_tool(request)) is not None:
        return {"json": schemas[name]}
    if not demands_calls(request):
        return None
    options = [
        {
            "type": "object",
            "properties": {"name": {"const": name}, "parameters": {"$ref": f"{_DEFINED}{number}"}},
            "required": ["name", "parameters"],
            "additionalProperties": False,
        }
        for number, name in enumerate(schemas)
    ]
    calls: dict[str, Any] = {"type": "array", "minItems": 1, "items": {"anyOf": options}}
    if request.parallel_tool_calls is False:
        calls["maxItems"] = 1
    calls["$defs"] = {str(number): _moved(schema, number) for number, schema in enumerate(schemas.values())}
    return {"json": calls}


def _moved(schema: Any, number: int) -> Any:
    """Give a schema whose references to itself are right where it is a definition of another one."""
    if isinstance(schema, list):
        return [_moved(each, number) for each in schema]
    if not isinstance(schema, dict):
        return schema
    moved: dict[str, Any] = {}
    for key, value in schema.items():
        if key == "$ref" and (value == "#" or str(value).startswith("#/")):
            moved[key] = f"{_DEFINED}{number}{value[1:]}"
        elif key in NAMING_KEYS and isinstance(value, dict):
            moved[key] = {name: _moved(each, number) for name, each in value.items()}
        else:
            moved[key] = value if key in DATA_KEYS else _moved(value, number)
    return moved


def check_tool(tool: dict[str, Any], where: str) -> None:
    """Check a tool. One of a type that a server would run is not offered, and named once in the log.

    Raises:
        RequestError: it is malformed, or expects calls and is no function.
    """
    kind, function = tool.get("type"), tool.get("function")
    if not _is_function(tool):
        if not isinstance(kind, str) or _EXPECT_CALLS & tool.keys():
            expected = "'function', as this server runs no tools itself (/v1/responses takes 'custom' too)"
            raise wrong(f"{where}.type", kind, expected)
        name_once(f"tools of type {kind[:40]}")
        return
    if not isinstance(function, dict):
        raise wrong(f"{where}.function", function, "an object with the function's name and parameters")
    name, parameters = function.get("name"), function.get("parameters") or {}
    if not isinstance(name, str) or not 1 <= len(name) <= NAME_CHARACTERS_MAX:
        raise wrong(f"{where}.function.name", name, f"a string of 1 to {NAME_CHARACTERS_MAX} characters")
    if not isinstance(parameters, dict):
        expected = "an object, the JSON schema of the arguments"
        raise wrong(f"{where}.function.parameters", parameters, expected)


def wrong(param: str, value: Any, expected: str) -> RequestError:
    """Make the error for a field that is missing, or has a wrong value."""
    if value is None:
        return RequestError(f"required, but missing; it must be {expected}", field=param)
    return RequestError(f"must be {expected}, got {repr(value)[:40]}", field=param)


def _schema(tool: dict[str, Any]) -> dict[str, Any]:
    """Give the schema of a tool's arguments; a tool that names no parameters takes none, as OpenAI documents it."""
    schema: dict[str, Any] = tool["function"].get("parameters") or {"properties": {}}
    names_none = schema.get("properties") == {} and schema.keys() <= _OF_NO_PARAMETERS
    return _NO_PARAMETERS if names_none else schema


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
            "the schema is nested too deeply; make it flatter", field="response_format"
        ) from error
    if structured is not None and len(structured) > STRUCTURED_BYTES_MAX:
        raise RequestError(
            f"the schema has {len(structured)} bytes, at most {STRUCTURED_BYTES_MAX} are allowed; make it smaller",
            field="response_format",
        )
    return structured


def _constraint_of(request: GenerationRequest) -> dict[str, Any] | None:
    by_format = _of_response_format(request.response_format)
    outputs = _outputs_of(request)
    calls = required_calls(request) if isinstance(request, ChatRequest) else None
    if calls is not None:
        if by_format is not None or outputs is not None:
            raise RequestError(
                "required calls contradict response_format and structured_outputs; send one of them",
                field="tool_choice",
            )
        return calls
    if outputs is None:
        return by_format
    if by_format is not None:
        raise RequestError("contradicts response_format; send one of them", field="structured_outputs")
    given = [kind for kind in _KINDS if outputs.get(kind) is not None]
    if len(given) != 1:
        raise RequestError(
            f"must be an object with exactly one of {', '.join(_KINDS)}, got"
            f" {', '.join(given) or 'none of them'}",
            field="structured_outputs",
        )
    return outputs


def _outputs_of(request: GenerationRequest) -> dict[str, Any] | None:
    """Give `structured_outputs`, or make it of the `guided_*` field that the body has; `json_object: false` counts as absent."""
    outputs: dict[str, Any] | None = request.structured_outputs
    if outputs is not None and not isinstance(outputs, dict):
        raise RequestError(f"must be an object, got {str(outputs)[:40]!r}", field="structured_outputs")
    if outputs is not None and "json_object" in outputs:
        wanted = outputs["json_object"]
        if wanted is not None and not isinstance(wanted, bool):
            raise RequestError(
                f"must be true or false, got {str(wanted)[:40]!r}",
                field="structured_outputs.json_object",
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
                "contradicts another guided field or structured_outputs; send one of them",
                field=f"guided_{kind}",
            )
        outputs = {kind: value}
    return outputs


def _of_response_format(response_format: Any) -> dict[str, Any] | None:
    if response_format is None:
        return None
    kind = response_format.get("type") if isinstance(response_format, dict) else None
    if kind not in _TYPES:
        raise RequestError(
            f"must be one of {', '.join(_TYPES)}, got {kind!r}",
            field="response_format.type",
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
            "must be an object, the JSON schema of the answer",
            field=f"response_format.{place}",
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


ROLES = ("system", "developer", "user", "assistant", "tool")
LOGPROBS_MAX = 20
STOP_IDS_MAX = 64
BIASES_MAX = 1024
BIAS_MAX = 100
ALLOWED_MAX = 65_536
BAD_WORDS_MAX = 128
BAD_WORD_CHARACTERS_MAX = 128
CACHE_SALT_CHARACTERS_MAX = 256
_SEED_BITS = 63
_ID_DIGITS_MAX = 10
_TOP_K_MAX = (1 << 31) - 1

_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "functions": ([],),
    "function_call": ("none", "auto"),
    "modalities": (["text"],),
    "audio": (),
    "web_search_options": (),
    "suffix": ("",),
}
"""Unsupported fields, each with the values that have no effect."""
_HINTS = ("prediction", "verbosity")
"""Fields of a chat that ask models of OpenAI's for the same answer, sooner or shorter; other models have no such setting."""
_VERBOSITIES = ("low", "medium", "high")
_RANGES: dict[str, tuple[float, float | None]] = {
    "max_tokens": (0, None),  # of completions
    "temperature": (0, 2),
    "top_p": (0, 1),
    "presence_penalty": (-2, 2),
    "frequency_penalty": (-2, 2),
    "repetition_penalty": (0, 10),
    "min_p": (0, 1),
    "top_k": (-1, _TOP_K_MAX),  # -1 and 0 turn it off, as in vLLM
    "min_tokens": (0, None),
    "prompt_logprobs": (0, LOGPROBS_MAX),
    "priority": (-PRIORITY_MAX, PRIORITY_MAX),
    "seed": (-(1 << _SEED_BITS), (1 << _SEED_BITS) - 1),
}
"""Bounds of each field's values; None: no upper one."""
_ABOVE_LOW = frozenset({"repetition_penalty"})
"""Fields that must be above their lower bound."""


def check_request(request: ChatRequest | CompletionRequest, choices_max: int) -> None:
    """Raises: RequestError: a value is out of its range, or asks for what is not served."""
    if isinstance(request, ChatRequest):
        check_chat(request, choices_max)
    else:
        check_completion(request, choices_max)


def check_chat(request: ChatRequest, choices_max: int) -> None:
    """Raises: RequestError: a value is out of its range, or asks for what is not served."""
    _check_range(request, "max_tokens", 1, None)
    _check_generation(request, choices_max)
    _check_range(request, "max_completion_tokens", 1, None)
    if None not in (request.max_tokens, request.max_completion_tokens) and (
        request.max_tokens != request.max_completion_tokens
    ):
        raise RequestError(
            f"{request.max_tokens} contradicts max_completion_tokens: "
            f"{request.max_completion_tokens}; send one of them",
            field="max_tokens",
        )
    _check_range(request, "thinking_token_budget", 0, None)
    _check_range(request, "top_logprobs", 0, LOGPROBS_MAX)
    if request.top_logprobs and not request.logprobs:
        raise RequestError(
            f"got {request.top_logprobs} without logprobs; set logprobs to true",
            field="top_logprobs",
        )
    for name in request.chat_template_kwargs or ():
        if name in RESERVED:
            raise RequestError(
                "is not the request's to set; leave it out",
                field=f"chat_template_kwargs.{name}",
            )
    if request.verbosity is not None and request.verbosity not in _VERBOSITIES:
        raise RequestError(
            f"must be one of {', '.join(_VERBOSITIES)}, got {str(request.verbosity)[:40]!r}",
            field="verbosity",
        )
    for name in _HINTS:
        if getattr(request, name) is not None:
            name_once(name)
    _check_final_message(request)
    check_tools(request)
    if not request.messages:
        raise RequestError("must hold at least one message, got none", field="messages")
    for index, message in enumerate(request.messages):
        _check_message(message, f"messages[{index}]")


def _check_final_message(request: ChatRequest) -> None:
    if not request.continue_final_message:
        return
    if request.add_generation_prompt:
        raise RequestError(
            "contradicts add_generation_prompt: true; send one of them",
            field="continue_final_message",
        )
    if not request.messages or request.messages[-1].role != "assistant" or not request.messages[-1].content:
        raise RequestError(
            "expected a last message of role 'assistant' with content; add it, or leave this out",
            field="continue_final_message",
        )


def check_completion(request: CompletionRequest, choices_max: int) -> None:
    """Raises: RequestError: a value is out of its range, or asks for what is not served."""
    _check_generation(request, choices_max)
    _check_range(request, "logprobs", 0, LOGPROBS_MAX)
    _check_range(request, "best_of", request.n or 1, choices_max)
    if request.stream and request.answers_per_prompt > (request.n or 1):
        raise RequestError(
            f"got {request.best_of} with n = {request.n or 1} and stream: true; the best answers are known at the end;"
            " leave out stream or best_of",
            field="best_of",
        )
    prompt = request.prompt
    _check_continuation(request, choices_max)
    if isinstance(prompt, str):
        return
    if not prompt:
        raise RequestError("must not be an empty list", field="prompt")
    kinds = {type(item) for item in prompt}
    if len(kinds) > 1:
        names = " and ".join(
            sorted({str: "strings", int: "token ids", list: "lists"}[kind] for kind in kinds)
        )
        raise RequestError(
            f"mixes {names}; expected a string, strings, token ids or lists of token ids",
            field="prompt",
        )
    each = request.answers_per_prompt
    choices = each * (1 if kinds == {int} else len(prompt))
    if choices > choices_max:
        raise RequestError(
            f"{len(prompt)} prompts times {'best_of' if each > (request.n or 1) else 'n'} = {each} are {choices} choices, "
            f"at most {choices_max} are allowed; send several requests",
            field="prompt",
        )


def _check_continuation(request: CompletionRequest, choices_max: int) -> None:
    said, prompt = request.continuation, request.prompt
    if said is None:
        return
    if (
        isinstance(prompt, str)
        or not prompt
        or not isinstance(prompt[0], int)
        or request.answers_per_prompt > 1
    ):
        raise RequestError("needs a prompt of token ids, and one choice", field="continuation")
    for name in ("echo", "prompt_logprobs", "stop"):
        if getattr(request, name):
            raise RequestError(
                "not together with continuation, which has no text before it; leave one of them out",
                field=name,
            )
    if not 0 <= said.num_emitted < len(prompt):
        raise RequestError(
            f"must be >= 0 and < {len(prompt)}, the prompt's tokens, got {said.num_emitted}",
            field="continuation.num_emitted",
        )
    if not 0 <= said.choice < choices_max:
        raise RequestError(
            f"must be >= 0 and < {choices_max}, got {said.choice}",
            field="continuation.choice",
        )


def _check_generation(request: GenerationRequest, choices_max: int) -> None:
    for name, neutral in _NEUTRAL.items():
        value = getattr(request, name, None)
        if value is None or value in neutral or _is_ruled_out(request, name):
            continue
        raise RequestError("not supported by this server; leave it out", field=name)
    _check_range(request, "n", 1, choices_max)
    for name, (low, high) in _RANGES.items():
        if getattr(request, name) is not None:
            _check_range(request, name, low, high, above_low=name in _ABOVE_LOW)
    if request.stop is not None:
        _check_stops(request)
    if request.stop_token_ids:
        _check_length("stop_token_ids", request.stop_token_ids, STOP_IDS_MAX, "ids")
    if request.prompt_logprobs is not None and request.stream:
        raise RequestError(
            f"got {request.prompt_logprobs} with stream: true; a stream has none; leave out stream, or ask for them"
            " by echo and logprobs of /v1/completions",
            field="prompt_logprobs",
        )
    _check_limits(request)
    if request.cache_salt is not None:
        if not request.cache_salt:
            raise RequestError("must not be empty; leave it out", field="cache_salt")
        _check_length("cache_salt", request.cache_salt, CACHE_SALT_CHARACTERS_MAX, "characters")
    agent_options(request)


def _check_limits(request: GenerationRequest) -> None:
    if not (request.logit_bias or request.bad_words) and request.allowed_token_ids is None:
        return
    _check_length("logit_bias", request.logit_bias or (), BIASES_MAX, "token ids")
    for key, bias in (request.logit_bias or {}).items():
        if not (key.isascii() and key.isdecimal() and len(key) < _ID_DIGITS_MAX):
            raise RequestError(f"expected token ids as keys, got {key[:40]!r}", field="logit_bias")
        if not -BIAS_MAX <= bias <= BIAS_MAX:
            raise RequestError(
                f"must be >= {-BIAS_MAX} and <= {BIAS_MAX}, got {bias} for token {key}",
                field="logit_bias",
            )
    if request.allowed_token_ids == []:
        raise RequestError("must not be empty; leave it out", field="allowed_token_ids")
    _check_length("allowed_token_ids", request.allowed_token_ids or (), ALLOWED_MAX, "ids")
    _check_length("bad_words", request.bad_words or (), BAD_WORDS_MAX, "words")
    for index, word in enumerate(request.bad_words or ()):
        if not word.strip() or len(word) > BAD_WORD_CHARACTERS_MAX:
            raise RequestError(
                f"word {index} has {len(word)} characters, expected 1 to {BAD_WORD_CHARACTERS_MAX}, not only spaces",
                field="bad_words",
            )


def _is_ruled_out(request: GenerationRequest, name: str) -> bool:
    """Tell whether the request disables the field itself: with `function_call` "none", `functions` has no effect."""
    return name == "functions" and getattr(request, "function_call", None) == "none"


def _check_range(
    request: GenerationRequest, name: str, low: float, high: float | None, *, above_low: bool = False
) -> None:
    value = getattr(request, name)
    if value is None:
        return
    if (value > low or (value == low and not above_low)) and (high is None or value <= high):
        return
    bounds = f"{'>' if above_low else '>='} {low}" + ("" if high is None else f" and <= {high}")
    raise RequestError(f"must be {bounds}, got {value}", field=name)


def _check_stops(request: GenerationRequest) -> None:
    stops = stop_strings(request)
    _check_length("stop", stops, STOPS_MAX, "strings")
    for index, stop in enumerate(stops):
        if not 1 <= len(stop) <= STOP_CHARACTERS_MAX:
            raise RequestError(
                f"string {index} has {len(stop)} characters, expected 1 to {STOP_CHARACTERS_MAX}",
                field="stop",
            )


def _check_length(name: str, value: Sized, most: int, unit: str) -> None:
    if len(value) > most:
        raise RequestError(f"at most {most} {unit} are allowed, got {len(value)}", field=name)


def stop_strings(request: GenerationRequest) -> tuple[str, ...]:
    if request.stop is None:
        return ()
    return (request.stop,) if isinstance(request.stop, str) else tuple(request.stop)


def _check_message(message: Message, path: str) -> None:
    if message.role not in ROLES:
        raise RequestError(f"must be one of {', '.join(ROLES)}, got {message.role!r}", field=f"{path}.role")
    if message.content is None and message.role != "assistant":
        raise RequestError("required, but missing", field=f"{path}.content")
    if message.tool_calls and message.role != "assistant":
        raise RequestError(
            f"only messages of role 'assistant' have calls, this one is of {message.role!r}; leave them out",
            field=f"{path}.tool_calls",
        )
    for index, call in enumerate(message.tool_calls or ()):
        function = call.get("function")
        name = function.get("name") if isinstance(function, dict) else None
        if not isinstance(name, str):
            where = f"{path}.tool_calls[{index}].function.name"
            raise wrong(where, name, "the name of the function that was called")
    if not isinstance(message.content, list):
        return
    for index, part in enumerate(message.content):
        check_part(part, f"{path}.content[{index}]")
