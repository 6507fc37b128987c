"""JSON that comes piece by piece: one value, a tool call's arguments, or a tool call written as an object."""

import json
import re
from collections.abc import Callable, Collection, Generator

from penstock.frontend.parsing.json_object import JsonObject, mended
from penstock.frontend.parsing.source import Output, Repair, Source

_ARGUMENTS = ("arguments", "parameters")
_CALL_KEYS = frozenset({"name", "type", "id", *_ARGUMENTS})
_END_OF_SCALAR = re.compile(r"[^\w.+-]")
_MARK = re.compile(r'\\(?:.|\Z)|["{}\[\]]', re.DOTALL)


def value(source: Source, emit: Callable[[str], None]) -> Generator[None, None, bool]:
    """Read one JSON value, its text given to `emit` as it comes; False if it does not end."""
    if not (yield from source.peek(1)):
        return False
    if source.text[0] in '{["':
        return (yield from _closed(source, emit))
    while True:
        if (end := _END_OF_SCALAR.search(source.text)) is not None:
            emit(source.take(end.start()))
            return True
        emit(source.take(len(source.text)))
        if source.ended:
            return False
        yield


def _closed(source: Source, emit: Callable[[str], None]) -> Generator[None, None, bool]:
    """Read a string, object or array; False if it does not end."""
    depth, in_string = 0, False
    while True:
        mark = ""
        for found in _MARK.finditer(source.text):
            mark = found[0]
            if mark == '"':
                in_string = not in_string
            elif in_string or mark.startswith("\\"):
                continue
            else:
                depth += 1 if mark in "{[" else -1
            if not depth and not in_string:
                emit(source.take(found.end()))
                return True
        if source.ended:
            emit(source.take(len(source.text)))
            return False
        emit(source.take(len(source.text) - (mark == "\\")))  # what it escapes is to come
        yield


def arguments(source: Source, out: Output) -> Generator[None, None, bool]:
    """Read the arguments of the call begun last, given out as they come; False if they do not end.

    Arguments that are empty, null, or anything else than an object are `{}`.
    """
    yield from source.skip_space()
    if (yield from source.peek(1)) == "{":
        reader = JsonObject(source, out.arguments)
        is_whole = yield from reader.read()
        if reader.is_mended:
            out.repair(Repair.ARGUMENTS)
        if reader.is_closed:
            out.repair(Repair.TAG)
        if not is_whole:
            return False
    else:
        text: list[str] = []
        is_whole = yield from value(source, text.append)
        if not is_whole and source.breaks_off():
            return False
        out.arguments(_object(out, "".join(text)))
    out.end_call()
    return True


def call(
    source: Source, out: Output, *, names: Collection[str] | None = None, announced: bool = True
) -> Generator[None, None, bool]:
    """Read a tool call `{"name": ..., "arguments": {...}}`, whatever the order of its keys; False if it is none.

    Arguments are given out as they come, once the name is known. Text that is no such object is given out as text.

    Args:
        source: begins with the object.
        out: gets the call.
        names: it is a call only with one of these names, and without keys that calls do not have. None: a mark has announced it.
        announced: of an object that was cut before its name nothing is given out, as it is not the user's text.
    """
    is_call, text = yield from _Call(source, out, names).read()
    if not (announced and source.breaks_off()):
        out.text(text)
    return is_call


class _Call:
    """An object that may be a tool call, while it is read."""

    def __init__(self, source: Source, out: Output, names: Collection[str] | None) -> None:
        self._source = source
        self._out = out
        self._names = names
        self._raw: list[str] = []
        self._name: str | None = None
        self._held = ""  # arguments before the name
        self._is_begun = self._has_arguments = False

    def read(self) -> Generator[None, None, tuple[bool, str]]:
        """Tell whether it is a call, and give its text if it is none."""
        if (yield from self._source.peek(1)) != "{":
            return False, ""
        self._raw.append(self._source.take(1))
        while (following := (yield from self._next())) == '"':
            key = yield from self._key()
            if key is None or not (yield from self._field(key)):
                break
        if following == "}" and self._name is not None:
            self._begin()
        if not self._is_begun:
            return False, "".join(self._raw)
        if not self._has_arguments and (following == "}" or not self._source.breaks_off()):
            self._out.end_call()
        return True, ""

    def _next(self) -> Generator[None, None, str]:
        """Skip to what follows a field: the quote of a key, which is not read, or the brace at the end."""
        while True:
            self._raw.append((yield from self._source.skip_space()))
            following = yield from self._source.peek(1)
            if following in {",", "}"}:
                self._raw.append(self._source.take(1))
            if following != ",":
                return following

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
        """Read the value of a key; False where it does not end, or is of no call."""
        if self._names is not None and key not in _CALL_KEYS:
            return self._is_begun
        is_arguments = key in _ARGUMENTS and not self._has_arguments
        if is_arguments:
            self._has_arguments = True
            if self._name is not None:
                self._begin()
                return (yield from arguments(self._source, self._out))
        text: list[str] = []
        is_whole = yield from value(self._source, text.append)
        self._raw += text
        if is_arguments:
            self._held = "".join(text)
        elif is_whole and key == "name" and self._name is None:
            return self._take_name("".join(text))
        return is_whole

    def _take_name(self, text: str) -> bool:
        """Take the name, of which the call begins if nothing else can follow that makes it none; False if it is no call's."""
        try:
            name = json.loads(text)
        except (ValueError, RecursionError):
            return self._names is None
        if self._names is not None and (not isinstance(name, str) or name not in self._names):
            return False
        if isinstance(name, str) and name:
            self._name = name
            if self._names is None or self._has_arguments:
                self._begin()
        return True

    def _begin(self) -> None:
        if self._is_begun:
            return
        assert self._name is not None, "it has come"
        self._is_begun = True
        self._out.begin_call(self._name)
        if self._held:
            self._out.arguments(_object(self._out, self._held))
            self._out.end_call()


def _object(out: Output, text: str) -> str:
    """Give whole arguments as the text of a JSON object, also where they are one within a JSON string."""
    try:
        decoded = json.loads(text)
    except (ValueError, RecursionError):
        decoded = text
    if isinstance(decoded, str):
        text = decoded
    found = mended(text)
    if found is None:
        if decoded and text.strip() != "null":
            out.repair(Repair.ARGUMENTS)
        return "{}"
    if found[1]:
        out.repair(Repair.ARGUMENTS)
    return found[0]
