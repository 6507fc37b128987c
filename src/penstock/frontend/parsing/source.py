"""Text that grammars read as it comes, and the pieces that they make of it."""

from collections.abc import Callable, Generator
from dataclasses import dataclass

Steps = Generator[None, None, None]
"""A grammar: yields when it needs more text."""
_SPACE = " \t\r\n"


@dataclass(slots=True)
class CallDelta:
    """Part of one tool call: its first part has the name, all parts together the arguments' JSON."""

    index: int
    name: str | None = None
    arguments: str = ""


@dataclass(slots=True)
class Parsed:
    """What was read from one piece of text."""

    content: str = ""
    reasoning: str = ""
    calls: tuple[CallDelta, ...] = ()


class Output:
    """Collects what a grammar has read."""

    def __init__(self) -> None:
        self.num_calls = 0
        self.is_reasoning = False
        self._content = ""
        self._reasoning = ""
        self._calls: list[CallDelta] = []
        self._space = ""  # after content: dropped before and after a tool call
        self._follows_call = False

    def content(self, text: str) -> None:
        """Take text for the user; white space before a tool call is held back, and after one dropped."""
        body = text.rstrip(_SPACE)
        self.is_reasoning = self.is_reasoning and not body
        if not body:
            self._space += text
            return
        self._content += body.lstrip(_SPACE) if self._follows_call else self._space + body
        self._space = text[len(body) :]
        self._follows_call = False

    def reasoning(self, text: str) -> None:
        self._reasoning += text
        self.is_reasoning = True

    def begin_call(self, name: str) -> None:
        self._space = ""
        self.is_reasoning, self._follows_call = False, True
        self._calls.append(CallDelta(self.num_calls, _writable(name)))
        self.num_calls += 1

    def arguments(self, text: str) -> None:
        """Take more of the arguments of the call begun last."""
        if not text:
            return
        text = _writable(text)
        index = self.num_calls - 1
        if self._calls and self._calls[-1].index == index:
            self._calls[-1].arguments += text
        else:
            self._calls.append(CallDelta(index, None, text))

    def call(self, name: str, arguments: str) -> None:
        """Take a whole call."""
        self.begin_call(name)
        self.arguments(arguments)

    def end(self) -> None:
        """Give out white space held back at the end of an answer without tool calls."""
        if not self.num_calls:
            self._content += self._space
        self._space = ""

    def take(self) -> Parsed:
        """Give what was read since the last time."""
        parsed = Parsed(self._content, self._reasoning, tuple(self._calls))
        self._content = self._reasoning = ""
        self._calls = []
        return parsed


def _writable(text: str) -> str:
    """Write lone surrogates as JSON's escapes: a model can name them by escapes too, and UTF-8 has none."""
    return text if text.isascii() else text.encode("utf-8", "backslashreplace").decode()


class Source:
    """The text not read yet."""

    def __init__(self) -> None:
        self.text = ""
        self.ended = False
        self.is_cut = False
        """Whether the answer ended before the model had finished it: at its limit of tokens, or at a stop string."""

    def breaks_off(self) -> bool:
        """Tell whether the answer was cut in what was read last."""
        return self.is_cut and not self.text

    def peek(self, size: int) -> Generator[None, None, str]:
        """Give the next characters, fewer only at the end."""
        while len(self.text) < size and not self.ended:
            yield
        return self.text[:size]

    def take(self, size: int) -> str:
        """Read characters that are there."""
        taken, self.text = self.text[:size], self.text[size:]
        return taken

    def skip_space(self) -> Generator[None, None, str]:
        """Read white space; gives it."""
        skipped = ""
        while True:
            rest = self.text.lstrip(_SPACE)
            skipped += self.text[: len(self.text) - len(rest)]
            self.text = rest
            if rest or self.ended:
                return skipped
            yield

    def begins_with(self, marker: str) -> Generator[None, None, bool]:
        """Tell whether a marker comes next; reads it if so."""
        while not self.ended and len(self.text) < len(marker) and marker.startswith(self.text):
            yield
        if not self.text.startswith(marker):
            return False
        self.take(len(marker))
        return True

    def until(self, markers: tuple[str, ...], emit: Callable[[str], None]) -> Generator[None, None, str]:
        """Read up to the first of some markers, and read that; gives it, or "" at the end of the text.

        `emit` gets the text before it as it comes.
        """
        while True:
            found = [(at, -len(marker), marker) for marker in markers if (at := self.text.find(marker)) >= 0]
            keep = min((held_from(self.text, marker) for marker in markers), default=len(self.text))
            if found and (self.ended or min(found)[0] <= keep):
                at, _, marker = min(found)
                emit(self.take(at))
                self.take(len(marker))
                return marker
            if self.ended:
                emit(self.take(len(self.text)))
                return ""
            if keep:
                emit(self.take(keep))
            yield

    def rest(self, emit: Callable[[str], None]) -> Steps:
        """Read all that follows."""
        while True:
            if self.text:
                emit(self.take(len(self.text)))
            if self.ended:
                return
            yield


def held_from(text: str, marker: str) -> int:
    """Give where the longest end of `text` that begins `marker` begins; len(text) if there is none."""
    at = text.find(marker[0], max(0, len(text) - len(marker) + 1))
    while at >= 0:
        if marker.startswith(text[at:]):
            return at
        at = text.find(marker[0], at + 1)
    return len(text)
