"""Text that grammars read as it comes, and the pieces that they make of it."""

from collections.abc import Callable, Generator
from dataclasses import dataclass
from enum import StrEnum

Steps = Generator[None, None, None]
"""A grammar: yields when it needs more text."""
_SPACE = " \t\r\n"
_REASONING, _CONTENT, _CALLS = range(3)  # the order within one part


class Repair(StrEnum):
    """What was mended in a tool call that a model wrote out of its grammar."""

    REASONING = "reasoning"
    """It began before the end of the reasoning, which it ends."""
    ARGUMENTS = "arguments"
    """Its arguments were no valid JSON object; they are made one, `{}` where they were another value."""
    TAG = "tag"
    """A mark around it, or a bracket at its end, was missing."""
    CUT = "cut"
    """The answer ended within it; a whole answer leaves it out."""


@dataclass(slots=True)
class CallDelta:
    """Part of one tool call: its first part has the name, all parts together the arguments' JSON."""

    index: int
    name: str | None = None
    arguments: str = ""


@dataclass(slots=True)
class Parsed:
    """What was read from one piece of text.

    Attributes:
        content: text for the user.
        reasoning: text of the reasoning.
        calls: parts of tool calls.
        parts: the same in the order in which the model wrote it, where that is not: reasoning, content, calls.
    """

    content: str = ""
    reasoning: str = ""
    calls: tuple[CallDelta, ...] = ()
    parts: tuple["Parsed", ...] = ()


@dataclass(frozen=True, slots=True)
class ReasoningTags:
    """What begins and ends reasoning."""

    begin: str
    end: str

    def is_open(self, prompt: str) -> bool:
        """Tell whether a prompt ends within reasoning, as where the template begins it."""
        return prompt.rstrip().endswith(self.begin)


class ParsedOutput:
    """Collects what a grammar has read.

    Attributes:
        num_calls: tool calls begun so far.
        in_reasoning: the text that comes is reasoning.
        is_reasoning: the text read last was reasoning, and nothing else has followed.
        has_content: there was text for the user, other than white space.
        cuts_call: the last tool call is not whole.
        repairs: what was mended in tool calls.
    """

    def __init__(self, reasoning: ReasoningTags | None = None, *, in_reasoning: bool = False) -> None:
        """Begin an answer; `reasoning`: what encloses it, `in_reasoning`: the prompt has begun it."""
        self.tags = reasoning
        self.num_calls = 0
        self.in_reasoning = in_reasoning
        self.is_reasoning = False
        self.has_content = False
        self.cuts_call = False
        self.repairs: list[Repair] = []
        self._parts = [Parsed()]
        self._latest = _REASONING
        self._space = ""  # held back, as a tool call may follow
        self._space_before_gap = ""
        self._follows_gap = False
        self._has_arguments = False

    def text(self, text: str) -> None:
        """Take text outside of tool calls."""
        if self.in_reasoning:
            self.reasoning(text)
        else:
            self.content(text)

    def reasoning(self, text: str) -> None:
        if text:
            self._part(_REASONING).reasoning += text
            self.is_reasoning = True

    def content(self, text: str) -> None:
        """Take text for the user.

        White space at its start and end is left out beside a tool call or reasoning; text on both sides of these is kept apart by
        white space.
        """
        body = text.rstrip(_SPACE)
        self.is_reasoning = self.is_reasoning and not body
        if not body:
            self._space += text
            return
        if self._follows_gap:
            own = body.lstrip(_SPACE)
            after = self._space + body[: len(body) - len(own)]
            self._space = (self._space_before_gap or after or "\n") if self.has_content else ""
            self._space_before_gap, self._follows_gap = "", False
        else:
            own = body
        self._part(_CONTENT).content += self._space + own
        self._space = text[len(body) :]
        self.has_content = True

    def gap(self) -> None:
        """Say that something else stands between the text before and the text that may follow."""
        if not self._follows_gap:
            self._space_before_gap, self._follows_gap = self._space, True
        self._space = ""

    def begin_call(self, name: str) -> None:
        if self.in_reasoning:
            self.in_reasoning = False
            self.repair(Repair.REASONING)
        self.gap()
        self.is_reasoning = self._has_arguments = False
        self._part(_CALLS).calls += (CallDelta(self.num_calls, _writable(name)),)
        self.num_calls += 1
        self.cuts_call = True

    def arguments(self, text: str) -> None:
        """Take more of the arguments of the call begun last."""
        if not text:
            return
        self._has_arguments = True
        text = _writable(text)
        index = self.num_calls - 1
        part = self._part(_CALLS)
        if part.calls and part.calls[-1].index == index:
            part.calls[-1].arguments += text
        else:
            part.calls += (CallDelta(index, None, text),)

    def end_call(self) -> None:
        """Say that the call begun last is whole; without arguments it has `{}`."""
        if not self._has_arguments:
            self.arguments("{}")
        self.cuts_call = False

    def call(self, name: str, arguments: str) -> None:
        """Take a whole call."""
        self.begin_call(name)
        self.arguments(arguments)
        self.end_call()

    def repair(self, what: Repair) -> None:
        """Say that a tool call was mended."""
        self.repairs.append(what)

    def end(self) -> None:
        """Give out white space held back at the end of text for the user."""
        if self.cuts_call:
            self.repair(Repair.CUT)
        if self._space and not self._follows_gap and not self.num_calls:
            self._part(_CONTENT).content += self._space
        self._space = ""

    def take(self) -> Parsed:
        """Give what was read since the last time."""
        parts, self._parts, self._latest = self._parts, [Parsed()], _REASONING
        if len(parts) == 1:
            return parts[0]
        return Parsed(
            content="".join(part.content for part in parts),
            reasoning="".join(part.reasoning for part in parts),
            calls=tuple(call for part in parts for call in part.calls),
            parts=tuple(parts),
        )

    def _part(self, kind: int) -> Parsed:
        """Give the part that takes more of a kind: another one where the latest has a kind that would go behind it."""
        if kind < self._latest:
            self._parts.append(Parsed())
        self._latest = kind
        return self._parts[-1]


def _writable(text: str) -> str:
    """Write lone surrogates as JSON's escapes: a model can name them by escapes too, and UTF-8 has none."""
    return text if text.isascii() else text.encode("utf-8", "backslashreplace").decode()


class GrammarSource:
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

    def prose(self, out: ParsedOutput, ends: tuple[str, ...] = ()) -> Generator[None, None, str]:
        """Read text outside of tool calls up to the first of `ends`, and read that; gives it, or "" at the end of the text.

        Marks of reasoning, wherever they are, part reasoning from the user's text.
        """
        tags = out.tags
        marks = ends if tags is None else (*ends, tags.begin, tags.end)
        while True:
            found = yield from self.until(marks, out.text)
            if tags is None or found not in {tags.begin, tags.end}:
                return found
            out.gap()
            out.in_reasoning = found == tags.begin
            if out.in_reasoning:
                yield from self.skip_space()

    def lead(self, out: ParsedOutput, ends: tuple[str, ...]) -> Generator[None, None, str]:
        """Read reasoning at the start of an answer, and one of `ends` that ends it or comes next; gives that, or ""."""
        tags = out.tags
        space = yield from self.skip_space()
        while tags is not None:
            if not out.in_reasoning and not (yield from self.begins_with(tags.begin)):
                if not (yield from self.begins_with(tags.end)):
                    break
            else:
                out.in_reasoning = True
                yield from self.skip_space()
                found = yield from self.until((tags.begin, tags.end, *ends), out.text)
                if found in ends:
                    return found
                out.in_reasoning = found == tags.begin
            out.gap()
            space = yield from self.skip_space()
        for end in ends:
            if (yield from self.begins_with(end)):
                return end
        out.content(space)
        return ""

    def rest(self, emit: Callable[[str], None]) -> Steps:
        """Read all that follows."""
        while True:
            if self.text:
                emit(self.take(len(self.text)))
            if self.ended:
                return
            yield


def held_from(text: str, marker: str) -> int:
    """Give the index from which the rest of `text` may begin `marker`; len(text) where no rest does."""
    at = text.find(marker[0], max(0, len(text) - len(marker) + 1))
    while at >= 0:
        if marker.startswith(text[at:]):
            return at
        at = text.find(marker[0], at + 1)
    return len(text)
