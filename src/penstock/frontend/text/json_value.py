"""JSON that comes piece by piece: one value, a tool call's arguments, or a tool call written as an object."""

import json
import re
from collections.abc import Callable, Collection, Generator

from penstock.frontend.text.source import GrammarSource, ParsedOutput, Repair

_CLOSES = {"{": "}", "[": "]"}
_AFTER_KEY, _AFTER_SCALAR = re.compile(r"[:,}\]<\s]"), re.compile(r'[,}\]<"\r\n]')
_OTHER_SPACE = re.compile(r"[^ \t\r\n]")
_PYTHON = {"True": "true", "False": "false", "None": "null"}
_SCALAR = re.compile(r"true|false|null|-?(?:0|[1-9]\d*)(?:\.\d+)?(?:[eE][+-]?\d+)?", re.ASCII)
_BODY = {quote: re.compile(rf"(?:[^{quote}\\]|\\.)*", re.DOTALL) for quote in "\"'"}
_PART_OF_ESCAPE = re.compile(r"(?<!\\)(?:\\\\)*(\\u[0-9a-fA-F]{0,3})\Z")
_IN_STRING = re.compile(r"\\(?:u[0-9a-fA-F]{0,4}|[^u])|[\"'\x00-\x1f]", re.DOTALL)
_ESCAPE = re.compile(r"\\(?:u[0-9a-fA-F]{4}|[\"\\/bfnrt])")


class JsonObject:
    """Reads one object. Valid JSON is given out as it comes, and as it is.

    Single quotes, bare keys and values, Python's names, commas too many or too few, raw control characters, white space and
    escapes that JSON has not become what they stand for.
    """

    def __init__(self, source: GrammarSource, emit: Callable[[str], None]) -> None:
        """Take a source that begins with a brace, and what gets the text."""
        self._source = source
        self._emit = emit
        self._missing = ""  # brackets that close what is open, the innermost first
        self._expected = "value"  # or "key", "colon", or "end" of a value
        self._comma = ""  # held back until something follows it
        self.is_mended = False
        """Whether the text was no valid JSON, but for brackets at its end."""
        self.is_closed = False
        """Whether brackets at its end were missing."""

    def read(self) -> Generator[None, None, bool]:
        """Read up to the brace that closes it, or a `<` outside of its strings; False if the answer ends within it."""
        while True:
            space = yield from self._source.skip_space()
            following = yield from self._source.peek(1)
            while following.isspace():  # of a kind that JSON does not have
                space += self._spaces(self._source.take(1)) + (yield from self._source.skip_space())
                following = yield from self._source.peek(1)
            if following in {"", "<"}:
                return self._finish(is_marked=following == "<")
            if following in {"}", "]"}:
                self._close(self._source.take(1), space)
                if not self._missing:
                    return True
            elif following in {",", ":"}:
                self._mark(self._source.take(1), space)
            elif not (yield from self._item(following, space)):
                return False

    def _close(self, bracket: str, space: str) -> None:
        self._complete()
        self.is_mended = self.is_mended or bool(self._comma) or bracket != self._missing[0]
        self._comma = ""
        self._emit(space + self._missing[0])
        self._missing, self._expected = self._missing[1:], "end"

    def _complete(self) -> None:
        """Give a key that has none a value."""
        lacks_colon = self._expected == "colon"
        if lacks_colon or (self._expected == "value" and self._missing.startswith("}")):
            self._emit(": null" if lacks_colon else "null")
            self._expected, self.is_mended = "end", True

    def _mark(self, mark: str, space: str) -> None:
        """Take a comma or a colon, or leave out one that says nothing."""
        if mark == ",":
            self._complete()
        if mark == "," and self._expected == "end":
            self._comma, self._expected = space + mark, self._next()
        elif mark == ":" and self._expected == "colon":
            self._emit(space + mark)
            self._expected = "value"
        else:
            self.is_mended = True

    def _next(self) -> str:
        return "key" if self._missing.startswith("}") else "value"

    def _item(self, following: str, space: str) -> Generator[None, None, bool]:
        """Read a key or a value, of a bracket only the bracket; False if the answer ends within it."""
        source = self._source
        if self._expected == "end":
            self._comma, self._expected, self.is_mended = ",", self._next(), True
        elif self._expected == "colon":
            self._comma, self._expected, self.is_mended = ":", "value", True
        self._emit(self._comma + space)
        is_key, self._comma = self._expected == "key", ""
        self._expected = "colon" if is_key else "end"
        if following in {'"', "'"}:
            return (yield from self._string(following))
        if following in _CLOSES and not is_key:
            self._emit(source.take(1))
            self._missing = _CLOSES[following] + self._missing
            self._expected = self._next()
            return True
        text = ""
        while (end := (_AFTER_KEY if is_key else _AFTER_SCALAR).search(source.text)) is None:
            text += source.take(len(source.text))
            if source.ended:
                break
            yield
        text += source.take(end.start()) if end is not None else ""
        if source.breaks_off():
            return False
        word = text.rstrip()
        self._emit(self._word(word, is_key=is_key) + self._spaces(text[len(word) :]))
        return True

    def _spaces(self, space: str) -> str:
        """Give white space as JSON has it."""
        written = _OTHER_SPACE.sub(" ", space)
        self.is_mended = self.is_mended or written != space
        return written

    def _word(self, word: str, *, is_key: bool) -> str:
        if not is_key and _SCALAR.fullmatch(word):
            return word
        self.is_mended = True
        quoted = json.dumps(word, ensure_ascii=False)
        return quoted if is_key else _PYTHON.get(word, quoted)

    def _string(self, quote: str) -> Generator[None, None, bool]:
        source = self._source
        source.take(1)
        self._emit('"')
        self.is_mended = self.is_mended or quote == "'"
        while True:
            text = source.text
            body = _BODY[quote].match(text)
            size = 0 if body is None else body.end()
            is_over = text.startswith(quote, size)
            if not is_over and (part := _PART_OF_ESCAPE.search(text, 0, size)) is not None:
                size = part.start(1)
            self._emit(_IN_STRING.sub(self._in_string, text[:size]))
            source.take(size + is_over)
            if is_over:
                self._emit('"')
            if is_over:
                return True
            if source.ended:
                source.text = ""  # the beginning of an escape is no text of the user's
                return False
            yield

    def _in_string(self, found: re.Match[str]) -> str:
        mark = found[0]
        if mark == "'" or _ESCAPE.fullmatch(mark):
            return mark
        self.is_mended = True
        if mark == "\\'":
            return "'"
        return json.dumps(mark, ensure_ascii=False)[1:-1]

    def _finish(self, *, is_marked: bool) -> bool:
        """Close what is open at the end of the text, or where a mark of the model's grammar says that it is over."""
        if not is_marked and (self._source.is_cut or self._expected != "end"):
            return False
        self._complete()
        self._emit(self._missing)
        self.is_closed = True
        return True


def mended(text: str) -> tuple[str, bool] | None:
    """Give a text that is an object as valid JSON, and whether it was none; None if it is no whole object."""
    source, pieces = GrammarSource(), list[str]()
    source.text, source.ended = text.strip(), True
    if not source.text.startswith("{"):
        return None
    reader = JsonObject(source, pieces.append)
    try:
        next(reader.read())
    except StopIteration as end:
        return ("".join(pieces), reader.is_mended or reader.is_closed) if end.value else None
    return None


_ARGUMENTS = ("arguments", "parameters")
_CALL_KEYS = frozenset({"name", "type", "id", *_ARGUMENTS})
_END_OF_SCALAR = re.compile(r"[^\w.+-]")
_MARK = re.compile(r'\\(?:.|\Z)|["{}\[\]]', re.DOTALL)


def value(source: GrammarSource, emit: Callable[[str], None]) -> Generator[None, None, bool]:
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


def _closed(source: GrammarSource, emit: Callable[[str], None]) -> Generator[None, None, bool]:
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


def arguments(source: GrammarSource, out: ParsedOutput) -> Generator[None, None, bool]:
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
    source: GrammarSource, out: ParsedOutput, *, names: Collection[str] | None = None, announced: bool = True
) -> Generator[None, None, bool]:
    """Read a tool call `{"name": ..., "arguments": {...}}` with its keys in any order; False where the object is no tool call.

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

    def __init__(self, source: GrammarSource, out: ParsedOutput, names: Collection[str] | None) -> None:
        self._source = source
        self._out = out
        self._names = names
        self._raw: list[str] = []
        self._name: str | None = None
        self._held = ""  # arguments before the name
        self._is_begun = self._has_arguments = False

    def read(self) -> Generator[None, None, tuple[bool, str]]:
        """Tell whether the object is a tool call; the text of the object where it is not."""
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


def _object(out: ParsedOutput, text: str) -> str:
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
