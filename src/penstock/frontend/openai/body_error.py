"""Error texts for invalid request bodies: the field, the expected value, the given value."""

import codecs
import enum
import json
import re
from typing import Any

import msgspec
import numpy as np

from penstock.core.config import nearest
from penstock.core.errors import RequestError
from penstock.frontend.openai.lenient import served_values

_SHOWN_MAX = 40
LEVELS_MAX = 500
"""Levels of a body's JSON. Python 3.11 may recurse 1,000 times, and half of that is left to a body."""
_STRING = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+(?:"|\Z)', re.DOTALL)
"""A string of JSON, or the rest of a body from a quote that nothing closes: each byte is looked at once."""
_ESCAPE = re.compile(
    rb"\\(?:u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}|(u[dD][89a-fA-F][0-9a-fA-F]{2})|.)",
    re.DOTALL,
)
"""An escape of JSON, of a whole surrogate pair both; the group is half of one."""
_NO_BRACKETS = bytes(byte for byte in range(256) if byte not in b"[]{}")
_JSON_NAMES = {"str": "string", "int": "integer", "float": "number", "bool": "boolean"}


def body_error(error: Exception, body: bytes, kind: type[msgspec.Struct]) -> RequestError:
    """Explain why `body` could not be decoded as a `kind`.

    Args:
        error: what msgspec's decoder raised: a ValueError or a RecursionError.
        body: the bytes given to the decoder.
        kind: the expected struct.
    """
    if isinstance(error, msgspec.ValidationError):
        return _content_error(str(error), body, kind)
    if isinstance(error, RecursionError):
        return nested_too_deeply()
    fault, fix = _fault(error, body)
    return RequestError(f"the body {fault}; {fix}")


def _fault(error: Exception, body: bytes) -> tuple[str, str]:
    """Give why bytes are no JSON, and the fix: the decoder's own error does not tell one fault from another in all versions of msgspec."""
    if not body:
        return "is empty", "expected a JSON object"
    try:
        body.decode()
    except UnicodeDecodeError as undecodable:
        return f"is not valid UTF-8: {undecodable.reason}", "send JSON encoded as UTF-8"
    if body.startswith(codecs.BOM_UTF8):
        return "begins with a byte order mark", "send UTF-8 without one"
    if without_half_pairs(body) != body:
        return "has half of a surrogate pair, such as \\ud83d without what follows", "send whole characters"
    return f"is not valid JSON: {error}", "send a JSON object"


def without_half_pairs(body: bytes) -> bytes:
    """Replace escapes of half a surrogate pair by U+FFFD: clients that cut texts by UTF-16 units send them."""
    return _ESCAPE.sub(lambda found: rb"\ufffd" if found[1] else found[0], body) if rb"\u" in body else body


def check_levels(body: bytes) -> None:
    """Check how deeply a body of JSON is nested, before it is decoded.

    From Python 3.12 on the decoder follows more levels than Python's own functions, which read the values after it.

    Raises:
        RecursionError: more than `LEVELS_MAX` levels.
    """
    if body.count(b"[") + body.count(b"{") <= LEVELS_MAX:
        return
    brackets = np.frombuffer(_STRING.sub(b"", body).translate(None, _NO_BRACKETS), np.uint8)
    opens = (brackets == ord("[")) | (brackets == ord("{"))
    if int(np.cumsum(np.where(opens, 1, -1), dtype=np.int32).max(initial=0)) > LEVELS_MAX:
        raise RecursionError


def nested_too_deeply() -> RequestError:
    """Make the error for a body of more than `LEVELS_MAX` levels."""
    return RequestError(f"the body is nested too deeply; expected at most {LEVELS_MAX} levels")


def _content_error(problem: str, body: bytes, kind: type[msgspec.Struct]) -> RequestError:
    problem, _, path = problem.replace("`", "").partition(" - at $")
    path = path.removeprefix(".")
    if unknown := re.fullmatch("Object contains unknown field (.*)", problem):
        param = f"{path}.{unknown[1]}".removeprefix(".")
        served = None if path else served_values(unknown[1])
        if served == "":
            return RequestError(f"{param}: not supported by this server; leave it out", param=param)
        if served:
            given = _given(body, param)
            return RequestError(f"{param}: only {served} is served here{given}; leave it out", param=param)
        hint = "" if path else nearest(unknown[1], list(kind.__struct_fields__))
        field = param if unknown[1] else f"{param}''"
        return RequestError(f"{field}: unknown field{hint if 'did you mean' in hint else ''}", param=param)
    if missing := re.fullmatch("Object missing required field (.*)", problem):
        param = f"{path}.{missing[1]}".removeprefix(".")
        return RequestError(f"{param}: required, but missing", param=param)
    if word := re.fullmatch("Invalid enum value (.*)", problem):
        return RequestError(f"{path}: must be one of {_words(kind, path)}, got {word[1]}", param=path)
    if re.fullmatch(r"Expected int( \| null)?, got float", problem):
        problem = f"must be a whole number{_given(body, path)}"
    elif problem.startswith("Expected "):
        problem += _shown(body, path)
        problem = re.sub(r"\b(str|int|float|bool)\b", lambda name: _JSON_NAMES[name[0]], problem, count=4)
    problem = problem[:1].lower() + problem[1:].replace(" | ", " or ")
    return RequestError(f"{path or 'the body'}: {problem}", param=path or None)


def _shown(body: bytes, path: str) -> str:
    """Show the value at `path`, shortened; empty where it is an object or a list, or cannot be found."""
    value = _value(body, path)
    return f" {repr(value)[:_SHOWN_MAX]}" if isinstance(value, str | int | float) else ""


def _given(body: bytes, path: str) -> str:
    """Say which value stands at `path`, shortened; empty if it cannot be found."""
    value = _value(body, path)
    if isinstance(value, dict | list):
        return f", got an {'object' if isinstance(value, dict) else 'array'}"
    return "" if value is None else f", got {json.dumps(value)[:_SHOWN_MAX]}"


def _value(body: bytes, path: str) -> Any:
    """Give the value at `path`; None if it cannot be found."""
    try:
        value = msgspec.json.decode(body)
        for part in re.findall(r"[^.\[\]]+", path):
            value = value[int(part) if isinstance(value, list) else part]
    except (LookupError, ValueError, TypeError, RecursionError):  # a key with a dot, or nested too deeply
        return None
    return value


def _words(kind: type[msgspec.Struct], name: str) -> str:
    """List the values of a field that is an enum."""
    (allowed,) = (field.type for field in msgspec.structs.fields(kind) if field.encode_name == name)
    assert isinstance(allowed, enum.EnumMeta), f"{kind.__name__}.{name}: enums are fields of the body itself"
    members: list[enum.Enum] = list(allowed)
    return ", ".join(repr(member.value) for member in members)
