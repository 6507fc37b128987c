"""Tool calls of Hermes and Qwen: `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, and Qwen3-Coder's tags inside."""

import json
from collections.abc import Generator, Mapping
from typing import Any

from penstock.frontend.parsing import json_value
from penstock.frontend.parsing.source import Output, Repair, Source, Steps
from penstock.frontend.parsing.values import typed_json

BEGIN, END = "<tool_call>", "</tool_call>"
FUNCTION = "<function="
_FUNCTION_END = "</function>"
_PARAMETER, _PARAMETER_END = "<parameter=", "</parameter>"
_AFTER_PARAMETERS = (_FUNCTION_END, END, FUNCTION, BEGIN)
_AFTER_VALUE = (_PARAMETER_END, _PARAMETER, *_AFTER_PARAMETERS)
_AFTER_NAME = (">", "\n")


def read(source: Source, out: Output, schemas: Mapping[str, Any]) -> Steps:
    """Read an answer; `schemas` are the JSON schemas of tools' arguments, by name."""
    yield from _read(source, out, schemas, (BEGIN,))


def read_tagged(source: Source, out: Output, schemas: Mapping[str, Any]) -> Steps:
    """Read an answer of Qwen3-Coder, in which a call may lack its first tag."""
    yield from _read(source, out, schemas, (BEGIN, FUNCTION))


def _read(source: Source, out: Output, schemas: Mapping[str, Any], begins: tuple[str, ...]) -> Steps:
    while found := (yield from source.prose(out, begins)):
        space = "" if found == FUNCTION else (yield from source.skip_space())
        if found == FUNCTION:
            out.repair(Repair.TAG)
        if found == FUNCTION or (yield from source.begins_with(FUNCTION)):
            yield from _tagged(source, out, schemas)
        elif (yield from source.peek(1)) == "{":
            while (yield from source.peek(1)) == "{" and (yield from json_value.call(source, out)):
                yield from source.skip_space()
        elif not (yield from source.begins_with(END)):
            if not any(mark.startswith(source.text) for mark in (FUNCTION, END)):
                out.text(found + space)  # it speaks of the mark
                continue
            source.text = ""  # the answer ends in a mark
        yield from source.skip_space()
        yield from source.begins_with(END)


def _tagged(source: Source, out: Output, schemas: Mapping[str, Any]) -> Steps:
    """Read `NAME>`, then `<parameter=KEY>VALUE</parameter>` as often as it comes, then `</function>`; any of the ends may lack."""
    space = yield from source.skip_space()
    name, found = yield from _text(source, _AFTER_NAME)
    name = name.strip()
    if source.breaks_off():
        return
    if not name:
        out.text(f"{FUNCTION}{space}{found}" if found else "")
        return
    out.begin_call(name)
    yield from source.skip_space()
    if (yield from source.peek(1)) == "{":
        if (yield from json_value.arguments(source, out)):
            yield from source.skip_space()
            yield from source.begins_with(_FUNCTION_END)
        return
    separator = "{"
    found = (yield from _text(source, (_PARAMETER, *_AFTER_PARAMETERS)))[1]
    while found == _PARAMETER:
        key = (yield from _text(source, _AFTER_NAME))[0].strip()
        text, found = yield from _text(source, _AFTER_VALUE)
        if source.is_cut and not found:
            return
        value = typed_json(text.removeprefix("\n").removesuffix("\n"), key, schemas.get(name))
        out.arguments(f"{separator}{json.dumps(key)}: {value}")
        separator = ", "
        if found == _PARAMETER_END:
            found = (yield from _text(source, (_PARAMETER, *_AFTER_PARAMETERS)))[1]
        else:
            out.repair(Repair.TAG)
    if source.is_cut and not found:
        return
    out.arguments("{}" if separator == "{" else "}")
    out.end_call()
    if found != _FUNCTION_END:
        source.text = found + source.text


def _text(source: Source, ends: tuple[str, ...]) -> Generator[None, None, tuple[str, str]]:
    """Read up to one of some marks, and read that; gives both."""
    pieces: list[str] = []
    found = yield from source.until(ends, pieces.append)
    return "".join(pieces), found
