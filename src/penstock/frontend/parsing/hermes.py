"""Tool calls of Hermes and Qwen: `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, and Qwen3-Coder's tags inside."""

import json
from collections.abc import Generator, Mapping
from contextlib import suppress
from typing import Any

from penstock.frontend.parsing import json_value
from penstock.frontend.parsing.source import Output, Source, Steps

BEGIN, END = "<tool_call>", "</tool_call>"
_FUNCTION, _FUNCTION_END = "<function=", "</function>"
_PARAMETER, _PARAMETER_END = "<parameter=", "</parameter>"


def read(source: Source, out: Output, schemas: Mapping[str, Any]) -> Steps:
    """Read an answer; `schemas` are the JSON schemas of tools' arguments, by name."""
    while (yield from source.until((BEGIN,), out.content)):
        yield from source.skip_space()
        if (yield from source.begins_with(_FUNCTION)):
            yield from _tagged(source, out, schemas)
        else:
            yield from json_value.call(source, out)
        yield from source.skip_space()
        yield from source.begins_with(END)


def _tagged(source: Source, out: Output, schemas: Mapping[str, Any]) -> Steps:
    """Read `NAME>`, then `<parameter=KEY>VALUE</parameter>` as often as it comes, then `</function>`."""
    name = yield from _text(source, (">",))
    if source.breaks_off():
        return
    out.begin_call(name)
    properties = _properties(schemas.get(name))
    separator = "{"
    while (yield from source.until((_PARAMETER, _FUNCTION_END), _nowhere)) == _PARAMETER:
        key = yield from _text(source, (">",))
        text = yield from _text(source, (_PARAMETER_END,))
        if source.breaks_off():
            return
        value = _typed(text.removeprefix("\n").removesuffix("\n"), properties.get(key))
        out.arguments(f"{separator}{json.dumps(key)}: {value}")
        separator = ", "
    if not source.breaks_off():
        out.arguments("{}" if separator == "{" else "}")


def _text(source: Source, ends: tuple[str, ...]) -> Generator[None, None, str]:
    pieces: list[str] = []
    yield from source.until(ends, pieces.append)
    return "".join(pieces)


def _nowhere(_: str) -> None:
    """Take the white space between tags."""


def _properties(schema: Any) -> Mapping[str, Any]:
    properties = schema.get("properties") if isinstance(schema, dict) else None
    return properties if isinstance(properties, dict) else {}


def _typed(text: str, schema: Any) -> str:
    """Give a parameter's value as JSON: text, unless its schema says that it is something else."""
    kind = schema.get("type") if isinstance(schema, dict) else None
    if kind != "string":
        with suppress(ValueError, RecursionError):  # no JSON, or a number that JSON has not
            return json.dumps(json.loads(text), ensure_ascii=False, allow_nan=False)
    return json.dumps(text, ensure_ascii=False)
