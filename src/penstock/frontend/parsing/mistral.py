"""Tool calls of Mistral: `[TOOL_CALLS][{"name": ..., "arguments": {...}}]`, and `[TOOL_CALLS]NAME[ARGS]{...}` of newer ones."""

import re
from collections.abc import Mapping
from typing import Any

from penstock.frontend.parsing import json_value
from penstock.frontend.parsing.source import Output, Source, Steps

CALLS, ARGS, CALL_ID = "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"
_NAME = re.compile(r"[\w.:-]+")
MARKERS = (CALLS, ARGS, CALL_ID, "[THINK]", "[/THINK]")


def read(source: Source, out: Output, _: Mapping[str, Any]) -> Steps:
    """Read an answer."""
    while (yield from source.prose(out, (CALLS,))):
        space = yield from source.skip_space()
        if (yield from source.peek(1)) == "[":
            yield from _array(source, out)
        elif (yield from source.peek(1)) == "{":
            yield from json_value.call(source, out)
        else:
            yield from _named(source, out, space)


def _array(source: Source, out: Output) -> Steps:
    source.take(1)
    while True:
        yield from source.skip_space()
        following = yield from source.peek(1)
        if following == ",":
            source.take(1)
        elif following == "{":
            yield from json_value.call(source, out)
        else:
            if following == "]":
                source.take(1)
            return


def _named(source: Source, out: Output, space: str) -> Steps:
    head: list[str] = []
    found = yield from source.until((ARGS, CALL_ID, CALLS, "{"), head.append)
    if found == CALL_ID:
        found = yield from source.until((ARGS, "{"), lambda _: None)
    name = "".join(head).strip()
    if not name or (source.is_cut and not found):
        return
    if not _NAME.fullmatch(name):  # it speaks of the mark
        out.text(CALLS + space + "".join(head))
        source.text = found + source.text
        return
    if found == "{":
        source.text = found + source.text
    out.begin_call(name)
    yield from source.skip_space()
    if found == CALLS or (
        yield from source.begins_with(CALLS)
    ):  # without arguments, and another call follows
        out.end_call()
        source.text = CALLS + source.text
    else:
        yield from json_value.arguments(source, out)
