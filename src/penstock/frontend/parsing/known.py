"""Whether a grammar reads the tool calls that a chat template writes: the sign by which a grammar is told says not enough."""

import json
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

from penstock.frontend.parsing.families import FORMATS, THINK, OutputFormat
from penstock.frontend.parsing.parser import OutputParser, ParserPlan
from penstock.frontend.parsing.source import Output, Source, Steps

UNKNOWN = "unknown"
_AMBIGUOUS = frozenset({"json", "hermes", "qwen3-coder"})
"""Grammars whose sign other models' templates have too, or that have none."""
_NAME, _ARGUMENTS = "probe_call", {"probe_key": "probe value"}
_USER = {"role": "user", "content": "probe"}
_ANSWER = {"role": "assistant", "content": "probe"}
_CALL = {"id": "probe0123", "type": "function", "function": {"name": _NAME, "arguments": _ARGUMENTS}}
_CALLS = {"role": "assistant", "content": "", "tool_calls": [_CALL]}
_NAMES_CALLS = re.compile(r"(tool|function)[_▁]?calls?", re.IGNORECASE)

Render = Callable[[Sequence[dict[str, Any]]], str]


def known_format(told: OutputFormat, render: Render, special: Collection[str]) -> OutputFormat:
    """Give the format whose grammar reads what a model writes.

    Args:
        told: by the template's signs.
        render: renders a conversation without a generation prompt; "" where the template does not take it.
        special: the tokenizer's special tokens.

    Returns:
        `told`, another format, or one named `UNKNOWN`: no grammar reads its calls, so that their text stays whole, with the special
        tokens in it.
    """
    if told.family not in _AMBIGUOUS:
        return told
    written, plain = _turn(render, _CALLS), _turn(render, _ANSWER)
    is_written = _NAME in written
    if is_written:
        readers = [
            form for form in (told, *FORMATS) if _reads(form, written, plain, all_of_it=form is not told)
        ]
        if readers:
            return replace(readers[0], reasoning=told.reasoning) if told.family == "json" else told
    marks = [mark for mark in special if mark not in plain and (mark in written or _NAMES_CALLS.search(mark))]
    if is_written or (told.family == "json" and any(map(_NAMES_CALLS.search, marks))):
        return OutputFormat(UNKNOWN, _read, told.reasoning, markers=(*told.markers, *marks))
    return told


def _turn(render: Render, said: dict[str, Any]) -> str:
    """Render what an assistant says, with what begins and ends its turn."""
    before, whole = render([_USER]), render([_USER, said])
    return whole[_shared(before, whole) :]


def _shared(one: str, other: str) -> int:
    """Count the characters at the start of both texts."""
    shorter = min(len(one), len(other))
    return next((at for at in range(shorter) if one[at] != other[at]), shorter)


def _reads(form: OutputFormat, written: str, plain: str, *, all_of_it: bool) -> bool:
    """Tell whether a grammar reads a turn with a call as it was.

    Args:
        form: of the grammar.
        written: the turn.
        plain: a turn without a call, with the same head.
        all_of_it: no text is left over but what ends a turn.
    """
    start = _shared(written, plain)
    plan = ParserPlan(format=replace(form, reasoning=form.reasoning or THINK), tools={_NAME: {}})
    parser = OutputParser(plan)
    parts = parser.feed(written[start:]), parser.finish()
    calls = [call for part in parts for call in part.calls]
    left = "".join(part.content for part in parts).strip()
    if parser.num_calls != 1 or calls[0].name != _NAME or (all_of_it and not plain.rstrip().endswith(left)):
        return False
    try:
        return bool(json.loads("".join(call.arguments for call in calls)) == _ARGUMENTS)
    except ValueError:
        return False


def _read(source: Source, out: Output, _: Mapping[str, Any]) -> Steps:
    """Leave the text whole."""
    yield from source.prose(out)
