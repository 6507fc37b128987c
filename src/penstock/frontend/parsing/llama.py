"""Tool calls of Llama 3 as JSON, and those of Llama 3.2 and 4 as Python calls in a list."""

import ast
import json
import re
from collections.abc import Generator, Mapping
from typing import Any

from penstock.frontend.parsing import json_value
from penstock.frontend.parsing.source import Output, Source, Steps
from penstock.frontend.parsing.values import python_value

PYTHON_TAG = "<|python_tag|>"
PYTHON_START, PYTHON_END = "<|python_start|>", "<|python_end|>"
PYTHON_MARKERS = (PYTHON_START, PYTHON_END)
_CALL = re.compile(r"\s{0,256}([A-Za-z_][\w.-]{0,255})\s{0,256}\(")
_BEGUN_CALL = re.compile(r"\s{0,256}([A-Za-z_][\w.-]{0,255}\s{0,256})?")
"""What may become one: bounded, as it is matched again with each piece of text."""
_CALL_CHARACTERS_MAX = 64 << 10


def read_json(source: Source, out: Output, schemas: Mapping[str, Any]) -> Steps:
    """Read an answer: `{"name": ..., "parameters": {...}}`, several with `;` between them, or text.

    Without a mark before it an object is a call only with a name of `schemas`, as it may be the answer that was asked for.
    """
    found = yield from source.lead(out, (PYTHON_TAG,))
    while True:
        names = None if found else schemas
        announced = bool(found)
        yield from source.skip_space() if found else ()
        while (yield from source.peek(1)) == "{":
            if not (yield from json_value.call(source, out, names=names, announced=announced)):
                break
            announced = True
            yield from source.skip_space()
            if (yield from source.peek(1)) in {";", ","}:
                source.take(1)
                yield from source.skip_space()
        found = yield from source.prose(out, (PYTHON_TAG,))
        if not found:
            return


def read_pythonic(source: Source, out: Output, schemas: Mapping[str, Any]) -> Steps:
    """Read an answer: `[f(a=1), g(b='x')]`, or text; without a mark before it only names of `schemas` are called."""
    found = yield from source.lead(out, (PYTHON_START,))
    while True:
        yield from source.skip_space() if found else ()
        if (yield from source.peek(1)) == "[":
            yield from _list(source, out, schemas, is_marked=bool(found))
        found = yield from source.prose(out, (PYTHON_START,))
        if not found:
            return


def _list(source: Source, out: Output, schemas: Mapping[str, Any], *, is_marked: bool) -> Steps:
    raw = source.take(1)
    while (yield from _begins_call(source)):
        text = yield from _call_text(source)
        parsed = _parsed(text)
        if parsed is None or not (is_marked or parsed[0] in schemas):
            if source.breaks_off() and _name(text) in schemas:
                return
            source.text = text + source.text
            break
        raw = ""
        out.call(*parsed)
        yield from source.skip_space()
        if (yield from source.peek(1)) != ",":
            break
        source.take(1)
    out.text(raw)
    if not raw:
        yield from source.skip_space()
        yield from source.begins_with("]")
        yield from source.skip_space()
        yield from source.begins_with(PYTHON_END)


def _name(text: str) -> str:
    found = _CALL.match(text)
    return "" if found is None else found[1]


def _begins_call(source: Source) -> Generator[None, None, bool]:
    while not _CALL.match(source.text):
        if source.ended or _BEGUN_CALL.fullmatch(source.text) is None:
            return False
        yield
    return True


def _call_text(source: Source) -> Generator[None, None, str]:
    """Read up to the parenthesis that closes a call, or the end."""
    text, depth, quote, escaped = "", 0, "", False
    while True:
        for at, character in enumerate(source.text):
            if quote:
                if escaped:
                    escaped = False
                elif character == "\\":
                    escaped = True
                elif character == quote:
                    quote = ""
            elif character in "'\"":
                quote = character
            elif character in "([{":
                depth += 1
            elif character in ")]}":
                depth -= 1
                if not depth:
                    return text + source.take(at + 1)
        text += source.take(len(source.text))
        if source.ended or len(text) > _CALL_CHARACTERS_MAX:
            return text
        yield


def _parsed(text: str) -> tuple[str, str] | None:
    """Give a call's name, and its arguments as JSON; None if it is no call of literals."""
    try:
        node = ast.parse(text.strip(), mode="eval").body
        if not isinstance(node, ast.Call) or node.args:
            return None
        arguments = {keyword.arg: python_value(keyword.value) for keyword in node.keywords}
        return ast.unparse(node.func), json.dumps(arguments, ensure_ascii=False, allow_nan=False)
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        return None
