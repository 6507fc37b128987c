"""The parser of one answer: text in, reasoning, tool calls and text for the user out, by the grammar that the chat template tells."""

import json
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from penstock.frontend.text import grammars
from penstock.frontend.text.source import GrammarSource, Parsed, ParsedOutput, ReasoningTags, Repair, Steps

THINK, MISTRAL_THINK = ReasoningTags("<think>", "</think>"), ReasoningTags("[THINK]", "[/THINK]")
_THINK = (THINK.begin, THINK.end)
Calls = Callable[[GrammarSource, ParsedOutput, Mapping[str, Any]], Steps]


@dataclass(frozen=True, slots=True)
class OutputFormat:
    """How a model writes reasoning and tool calls.

    Attributes:
        family: name of the grammar of tool calls.
        calls: reads an answer after its reasoning.
        reasoning: what encloses reasoning; None: nothing does.
        has_channels: every answer has the grammar's marks, with or without tools.
        markers: special tokens that the grammar reads; detokenizing has to show them.
    """

    family: str
    calls: Calls
    reasoning: ReasoningTags | None = None
    has_channels: bool = False
    markers: tuple[str, ...] = ()


def format_of(template: str) -> OutputFormat:
    """Tell a model's format from the source of its chat template; without a sign of another, calls are bare JSON objects."""
    think = THINK if THINK.begin in template or THINK.end in template else None
    if grammars.HARMONY_CHANNEL in template and grammars.HARMONY_START in template:
        return OutputFormat(
            "harmony", grammars.read_harmony, has_channels=True, markers=grammars.HARMONY_MARKERS
        )
    if grammars.DEEPSEEK_CALL in template:
        return OutputFormat(
            "deepseek", grammars.read_deepseek, THINK, markers=(*grammars.DEEPSEEK_MARKERS, *_THINK)
        )
    if grammars.MISTRAL_CALLS in template:
        tags = MISTRAL_THINK if MISTRAL_THINK.begin in template else think
        return OutputFormat("mistral", grammars.read_mistral, tags, markers=grammars.MISTRAL_MARKERS)
    if grammars.HERMES_BEGIN in template:
        family, read = (
            ("qwen3-coder", grammars.read_qwen_coder)
            if grammars.HERMES_FUNCTION in template
            else ("hermes", grammars.read_hermes)
        )
        return OutputFormat(
            family, read, think, markers=(grammars.HERMES_BEGIN, grammars.HERMES_END, *_THINK)
        )
    if grammars.PYTHON_START in template or "func_name" in template:
        return OutputFormat("pythonic", grammars.read_pythonic, think, markers=grammars.PYTHON_MARKERS)
    return OutputFormat("json", grammars.read_json, think, markers=(grammars.PYTHON_TAG, *_THINK))


_SIGNS = (
    grammars.DEEPSEEK_CALL,
    grammars.MISTRAL_CALLS,
    grammars.HERMES_BEGIN,
    grammars.HERMES_BEGIN + grammars.HERMES_FUNCTION,
    grammars.PYTHON_START,
    "",
)
FORMATS = tuple(map(format_of, _SIGNS))
"""Formats whose grammars are tried where a template has none's sign."""


class ParserPlan(msgspec.Struct, frozen=True):
    """What one request's answers are parsed for.

    Attributes:
        format: of the model.
        tools: JSON schemas of the arguments by the tool's name; None: calls are not looked for.
        required: the engine is made to write an array of calls.
        named: the engine is made to write the arguments of this tool.
        in_reasoning: the prompt has begun the reasoning.
        shows_reasoning: whether reasoning is given out.
        calls_max: further calls are dropped; None: no limit.
    """

    format: OutputFormat
    tools: Mapping[str, Any] | None = None
    required: bool = False
    named: str | None = None
    in_reasoning: bool = False
    shows_reasoning: bool = True
    calls_max: int | None = None

    @property
    def is_needed(self) -> bool:
        """Whether anything but plain text is to be expected."""
        return self.tools is not None or self.format.has_channels or self.format.reasoning is not None


class OutputParser:
    """Parses one answer's text as it comes. Not thread-safe; however the text is split, the pieces add up to the same."""

    def __init__(self, plan: ParserPlan) -> None:
        self._plan = plan
        self._source = GrammarSource()
        self._output = ParsedOutput(plan.format.reasoning, in_reasoning=plan.in_reasoning)
        self._steps = self._read()

    @property
    def num_calls(self) -> int:
        """Tool calls begun so far, of those given out."""
        most = self._plan.calls_max
        return self._output.num_calls if most is None else min(self._output.num_calls, most)

    @property
    def cuts_call(self) -> bool:
        """Whether the answer ended within the last tool call."""
        return self._output.cuts_call and self._output.num_calls == self.num_calls

    @property
    def repairs(self) -> list[Repair]:
        """What was mended in tool calls so far."""
        return self._output.repairs

    @property
    def is_reasoning(self) -> bool:
        """Whether the text read last was reasoning, and nothing else has followed."""
        return self._output.is_reasoning

    def feed(self, text: str) -> Parsed:
        """Parse the next text; gives what is certain by now."""
        self._source.text += text
        next(self._steps, None)
        return self._take()

    def finish(self, *, is_cut: bool = False) -> Parsed:
        """Parse what is left at the end of the answer.

        Where the answer was cut, a call whose name is not whole is dropped, and other calls are left as they are.
        """
        self._source.ended, self._source.is_cut = True, is_cut
        for _ in self._steps:
            pass
        self._output.end()
        return self._take()

    def _take(self) -> Parsed:
        parsed = self._output.take()
        for part in (parsed, *parsed.parts):
            if not self._plan.shows_reasoning:
                part.reasoning = ""
            if (most := self._plan.calls_max) is not None:
                part.calls = tuple(call for call in part.calls if call.index < most)
        return parsed

    def _read(self) -> Steps:
        plan, source, out = self._plan, self._source, self._output
        if plan.named is not None:
            yield from grammars.read_named(source, out, plan.named)
        elif plan.required:
            yield from grammars.read_required(source, out, {})
        else:
            if plan.in_reasoning:
                yield from source.skip_space()
            if plan.tools is not None or plan.format.has_channels:
                yield from plan.format.calls(source, out, plan.tools or {})
            yield from source.prose(out)


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


def _read(source: GrammarSource, out: ParsedOutput, _: Mapping[str, Any]) -> Steps:
    """Leave the text whole."""
    yield from source.prose(out)
