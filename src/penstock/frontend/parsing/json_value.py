"""JSON that comes piece by piece: one value, or a tool call written as an object."""

import json
from collections.abc import Callable, Generator

from penstock.frontend.parsing.source import Output, Source

_ARGUMENTS = ("arguments", "parameters")
_END_OF_SCALAR = ",]} \t\r\n"


def value(source: Source, emit: Callable[[str], None]) -> Generator[None, None, bool]:
    """Read one JSON value, its text given to `emit` as it comes; False if it does not end."""
    if not (yield from source.peek(1)):
        return False
    if source.text[0] in '{["':
        return (yield from _closed(source, emit))
    while True:
        for at, character in enumerate(source.text):
            if character in _END_OF_SCALAR:
                emit(source.take(at))
                return True
        emit(source.take(len(source.text)))
        if source.ended:
            return False
        yield


def _closed(source: Source, emit: Callable[[str], None]) -> Generator[None, None, bool]:
    """Read a string, object or array."""
    depth, in_string, escaped = 0, False, False
    while True:
        text = source.text
        for at, character in enumerate(text):
            if in_string:
                if escaped:
                    escaped = False
                elif character == "\\":
                    escaped = True
                elif character == '"':
                    in_string = False
            elif character == '"':
                in_string = True
            elif character in "{[":
                depth += 1
            elif character in "}]":
                depth -= 1
            if not depth and not in_string:
                emit(source.take(at + 1))
                return True
        emit(source.take(len(text)))
        if source.ended:
            return False
        yield


def call(source: Source, out: Output) -> Generator[None, None, bool]:
    """Read a tool call `{"name": ..., "arguments": {...}}` that a mark or a grammar announces, whatever the order of its keys.

    Arguments are given out as they come, once the name is known. Text that is no such object becomes content, unless the answer
    was cut in it; False then.
    """
    is_call, text = yield from _Call(source, out).read()
    if not source.breaks_off():
        out.content(text)
    return is_call


def possible_call(source: Source, out: Output) -> Generator[None, None, bool]:
    """Read a tool call as `call` does where nothing announces it: an object that was cut before its name may be the user's text."""
    is_call, text = yield from _Call(source, out).read()
    out.content(text)
    return is_call


class _Call:
    """An object that may be a tool call, while it is read."""

    def __init__(self, source: Source, out: Output) -> None:
        self._source = source
        self._out = out
        self._raw: list[str] = []
        self._held: list[str] = []  # arguments before the name
        self._is_begun = self._has_arguments = self._is_closed = False

    def read(self) -> Generator[None, None, tuple[bool, str]]:
        """Tell whether it is a call, and give its text if it is none."""
        if (yield from self._source.peek(1)) != "{":
            return False, ""
        self._raw.append(self._source.take(1))
        while (yield from self._has_key()):
            key = yield from self._key()
            if key is None or not (yield from self._field(key)):
                break
        if not self._is_begun:
            return False, "".join(self._raw)
        if self._is_closed and not self._has_arguments:
            self._out.arguments("{}")
        return True, ""

    def _has_key(self) -> Generator[None, None, bool]:
        """Skip to the next key; False at the object's end, or where none follows."""
        while True:
            self._raw.append((yield from self._source.skip_space()))
            following = yield from self._source.peek(1)
            if following not in {",", "}"}:
                return following == '"'
            self._raw.append(self._source.take(1))
            if following == "}":
                self._is_closed = True
                return False

    def _key(self) -> Generator[None, None, str | None]:
        """Read a key and its colon; None where they are not whole."""
        key: list[str] = []
        is_whole = yield from value(self._source, key.append)
        self._raw += key
        self._raw.append((yield from self._source.skip_space()))
        if not is_whole or (yield from self._source.peek(1)) != ":":
            return None
        self._raw.append(self._source.take(1))
        self._raw.append((yield from self._source.skip_space()))
        return "".join(key)[1:-1]

    def _field(self, key: str) -> Generator[None, None, bool]:
        """Read the value of a key; False where it does not end."""
        if key in _ARGUMENTS and not self._has_arguments:
            self._has_arguments = True
            return (yield from self._arguments())
        text: list[str] = []
        is_whole = yield from value(self._source, text.append)
        self._raw += text
        if is_whole and key == "name" and not self._is_begun:
            self._begin("".join(text))
        return is_whole

    def _begin(self, text: str) -> None:
        try:
            name = json.loads(text)
        except (ValueError, RecursionError):
            return
        if isinstance(name, str) and name:
            self._is_begun = True
            self._out.begin_call(name)
            self._out.arguments("".join(self._held))

    def _arguments(self) -> Generator[None, None, bool]:
        is_text = (yield from self._source.peek(1)) == '"'
        if self._is_begun and not is_text:
            return (yield from value(self._source, self._out.arguments))
        text: list[str] = []
        is_whole = yield from value(self._source, text.append)
        self._raw += text
        self._held = [_inner(text)] if is_text and is_whole else text
        if self._is_begun:
            self._out.arguments("".join(self._held))
        return is_whole


def _inner(text: list[str]) -> str:
    """Give the JSON that is written inside a JSON string."""
    try:
        inner = json.loads("".join(text))
    except (ValueError, RecursionError):
        return "".join(text)
    return inner if isinstance(inner, str) else "".join(text)
