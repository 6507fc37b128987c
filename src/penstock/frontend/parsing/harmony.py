"""Harmony, the format of gpt-oss: channels of analysis, commentary with tool calls, and final text.

<|channel|>analysis<|message|>...<|end|><|start|>assistant<|channel|>final<|message|>...
<|channel|>commentary to=functions.NAME <|constrain|>json<|message|>{...}<|call|>
"""

import re
from collections.abc import Callable, Mapping
from typing import Any

from penstock.frontend.parsing.source import Output, Source, Steps

START, CHANNEL, CONSTRAIN, MESSAGE = "<|start|>", "<|channel|>", "<|constrain|>", "<|message|>"
END, CALL, RETURN = "<|end|>", "<|call|>", "<|return|>"
MARKERS = (START, CHANNEL, CONSTRAIN, MESSAGE, END, CALL, RETURN)
_RECIPIENT = re.compile(r"to=(?:functions\.)?([\w.-]+)")
_CHANNEL_NAME = re.compile(r"<\|channel\|>\s*(\w+)")


def read(source: Source, out: Output, _: Mapping[str, Any]) -> Steps:
    """Read an answer, whose prompt ends with `<|start|>assistant`."""
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
        yield from source.until((END, CALL, RETURN, START), _target("".join(head), out))


def _target(head: str, out: Output) -> Callable[[str], None]:
    """Choose where a message goes by its head."""
    recipient, channel = _RECIPIENT.search(head), _CHANNEL_NAME.search(head)
    if recipient is not None:
        out.begin_call(recipient[1])
        return out.arguments
    return out.reasoning if channel is not None and channel[1] == "analysis" else out.content
