"""Which grammar a model's answers follow, told by its chat template."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from penstock.frontend.parsing import deepseek, harmony, hermes, llama, mistral
from penstock.frontend.parsing.source import Output, Source, Steps, Tags

THINK, MISTRAL_THINK = Tags("<think>", "</think>"), Tags("[THINK]", "[/THINK]")
_THINK = (THINK.begin, THINK.end)
Calls = Callable[[Source, Output, Mapping[str, Any]], Steps]


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
    reasoning: Tags | None = None
    has_channels: bool = False
    markers: tuple[str, ...] = ()


def format_of(template: str) -> OutputFormat:
    """Tell a model's format from the source of its chat template; without a sign of another, calls are bare JSON objects."""
    think = THINK if THINK.begin in template or THINK.end in template else None
    if harmony.CHANNEL in template and harmony.START in template:
        return OutputFormat("harmony", harmony.read, has_channels=True, markers=harmony.MARKERS)
    if deepseek.CALL in template:
        return OutputFormat("deepseek", deepseek.read, THINK, markers=(*deepseek.MARKERS, *_THINK))
    if mistral.CALLS in template:
        tags = MISTRAL_THINK if MISTRAL_THINK.begin in template else think
        return OutputFormat("mistral", mistral.read, tags, markers=mistral.MARKERS)
    if hermes.BEGIN in template:
        family, read = (
            ("qwen3-coder", hermes.read_tagged) if hermes.FUNCTION in template else ("hermes", hermes.read)
        )
        return OutputFormat(family, read, think, markers=(hermes.BEGIN, hermes.END, *_THINK))
    if llama.PYTHON_START in template or "func_name" in template:
        return OutputFormat("pythonic", llama.read_pythonic, think, markers=llama.PYTHON_MARKERS)
    return OutputFormat("json", llama.read_json, think, markers=(llama.PYTHON_TAG, *_THINK))


_SIGNS = (deepseek.CALL, mistral.CALLS, hermes.BEGIN, hermes.BEGIN + hermes.FUNCTION, llama.PYTHON_START, "")
FORMATS = tuple(map(format_of, _SIGNS))
"""Formats whose grammars are tried where a template has none's sign."""
