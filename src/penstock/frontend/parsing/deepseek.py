"""Tool calls of DeepSeek V3, R1 and V3.1, between marks of full-width bars."""

from collections.abc import Mapping
from typing import Any

from penstock.frontend.parsing import json_value
from penstock.frontend.parsing.source import Output, Source, Steps

CALLS, CALLS_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"  # noqa: RUF001 - as the model writes them
CALL, CALL_END = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"  # noqa: RUF001
SEPARATOR = "<｜tool▁sep｜>"  # noqa: RUF001
MARKERS = (CALLS, CALLS_END, CALL, CALL_END, SEPARATOR)
_AROUND_CALLS = (CALLS, CALLS_END, CALL, CALL_END)
_FENCE = "```"


def read(source: Source, out: Output, _: Mapping[str, Any]) -> Steps:
    """Read an answer."""
    while found := (yield from source.prose(out, _AROUND_CALLS)):
        if found == CALL:
            yield from _call(source, out)


def _call(source: Source, out: Output) -> Steps:
    """Read `function SEP NAME ```json ARGUMENTS ``` ` of V3, or `NAME SEP ARGUMENTS` of V3.1."""
    head: list[str] = []
    found = yield from source.until((SEPARATOR, *_AROUND_CALLS), head.append)
    name = "".join(head).strip()
    if found != SEPARATOR and (found or not source.is_cut):  # it names no function
        out.text("".join(head))
        source.text = found + source.text
        return
    if name == "function":
        line: list[str] = []
        found = yield from source.until(("\n",), line.append)
        name = "".join(line).strip()
    if not name or (source.is_cut and not found):
        return
    out.begin_call(name)
    yield from source.skip_space()
    is_fenced = yield from source.begins_with(f"{_FENCE}json")
    if (yield from json_value.arguments(source, out)) and is_fenced:
        yield from source.skip_space()
        yield from source.begins_with(_FENCE)
