"""A JSON object that a model writes piece by piece, given out as valid JSON whatever is wrong in it."""

import json
import re
from collections.abc import Callable, Generator

from penstock.frontend.parsing.source import Source

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

    def __init__(self, source: Source, emit: Callable[[str], None]) -> None:
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
    source, pieces = Source(), list[str]()
    source.text, source.ended = text.strip(), True
    if not source.text.startswith("{"):
        return None
    reader = JsonObject(source, pieces.append)
    try:
        next(reader.read())
    except StopIteration as end:
        return ("".join(pieces), reader.is_mended or reader.is_closed) if end.value else None
    return None
