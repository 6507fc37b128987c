"""Tool calls that an engine was made to write: with `tool_choice` "required" an array of them, with a named one its arguments."""

from collections.abc import Mapping
from typing import Any

from penstock.frontend.parsing import json_value
from penstock.frontend.parsing.source import Output, Source, Steps


def read_required(source: Source, out: Output, _: Mapping[str, Any]) -> Steps:
    """Read `[{"name": ..., "parameters": {...}}, ...]`."""
    yield from source.skip_space()
    if not (yield from source.begins_with("[")):
        yield from source.rest(out.content)
        return
    while True:
        yield from source.skip_space()
        following = yield from source.peek(1)
        if following == ",":
            source.take(1)
        elif following != "{" or not (yield from json_value.call(source, out)):
            break
    yield from source.rest(lambda _: None)


def read_named(source: Source, out: Output, name: str) -> Steps:
    """Read the arguments of the tool `name`."""
    out.begin_call(name)
    yield from json_value.arguments(source, out)
    yield from source.rest(lambda _: None)
