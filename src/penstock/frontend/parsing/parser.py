"""The parser of one answer: text in, pieces out."""

from collections.abc import Mapping
from typing import Any

import msgspec

from penstock.frontend.parsing import forced
from penstock.frontend.parsing.families import OutputFormat
from penstock.frontend.parsing.source import Output, Parsed, Repair, Source, Steps


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
        self._source = Source()
        self._output = Output(plan.format.reasoning, in_reasoning=plan.in_reasoning)
        self._steps = self._read()

    @property
    def num_calls(self) -> int:
        """Tool calls begun so far, of those given out."""
        most = self._plan.calls_max
        return self._output.num_calls if most is None else min(self._output.num_calls, most)

    @property
    def cuts_call(self) -> bool:
        """Whether the last of these calls is not whole."""
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
            yield from forced.read_named(source, out, plan.named)
        elif plan.required:
            yield from forced.read_required(source, out, {})
        else:
            if plan.in_reasoning:
                yield from source.skip_space()
            if plan.tools is not None or plan.format.has_channels:
                yield from plan.format.calls(source, out, plan.tools or {})
            yield from source.prose(out)
