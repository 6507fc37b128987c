"""Harmony, the format of gpt-oss: channels of analysis, commentary with tool calls, and final text.

<|channel|>analysis<|message|>...<|end|><|start|>assistant<|channel|>final<|message|>...
<|channel|>commentary to=functions.NAME <|constrain|>json<|message|>{...}<|call|>
"""

import re
from collections.abc import Callable, Collection, Mapping
from typing import Any

from penstock.frontend.parsing import json_value
from penstock.frontend.parsing.source import Output, Source, Steps

START, CHANNEL, CONSTRAIN, MESSAGE = "<|start|>", "<|channel|>", "<|constrain|>", "<|message|>"
END, CALL, RETURN = "<|end|>", "<|call|>", "<|return|>"
MARKERS = (START, CHANNEL, CONSTRAIN, MESSAGE, END, CALL, RETURN)
_RECIPIENT = re.compile(r"to=(functions\.)?([\w.-]+)")
_CHANNEL_NAME = re.compile(r"<\|channel\|>\s*(\w+)")
_AUTHOR = re.compile(r"<\|start\|>\s*([\w.-]+)")
_ASSISTANT = "assistant"


def read(source: Source, out: Output, schemas: Mapping[str, Any]) -> Steps:
    """Read an answer, whose prompt ends with `<|start|>assistant`."""
    is_first = True
    while True:
        begins = yield from source.peek(1)
        if not begins:
            return
        head: list[str] = []
        if begins not in {"<", " "}:  # text without a channel
            head.append((yield from source.until((START, CHANNEL), out.content)))
        if not (yield from source.until((MESSAGE,), head.append)):
            text = "".join(head)
            is_head = CHANNEL in text or (source.is_cut and (START in text or _RECIPIENT.search(text)))
            out.content("" if is_head else text)
            return
        if not is_first and out.has_content:
            out.gap()
        is_first = False
        yield from _message(source, out, "".join(head), schemas)


def _message(source: Source, out: Output, head: str, declared: Collection[str]) -> Steps:
    """Read a message: a call of a function, reasoning, or text for the user, by its head."""
    author, channel = _AUTHOR.search(head), _CHANNEL_NAME.search(head)
    emit: Callable[[str], None] = out.content
    if (name := _called(head, declared)) is not None:
        out.begin_call(name)
        yield from json_value.arguments(source, out)
        emit = _drop
    elif (channel is not None and channel[1] == "analysis") or (
        author is not None and author[1] != _ASSISTANT
    ):
        emit = out.reasoning
    if (yield from source.until((END, CALL, RETURN, START), emit)) == START:
        source.text = START + source.text


def _called(head: str, declared: Collection[str]) -> str | None:
    """Give the function that a message calls.

    Without `functions.` only a declared name is one; other recipients are the assistant itself and the model's own tools.
    """
    recipient = _RECIPIENT.search(head)
    if recipient is None or not (recipient[1] or recipient[2] in declared):
        return None
    return None if recipient[0] == f"to={_ASSISTANT}" else recipient[2]


def _drop(_: str) -> None:
    """Take white space after a call's arguments."""
