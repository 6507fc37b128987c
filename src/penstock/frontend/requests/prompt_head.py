"""The head of prompts: known noise of clients is left out there, and other text that changes with each request is reported.

KV is reused up to the first token that differs, so a line that changes at the head makes every request compute its whole prompt.
"""

from collections import OrderedDict
from collections.abc import Callable, Sequence
from hashlib import blake2b
from itertools import takewhile

from penstock.core.log import get_logger
from penstock.core.wire import Wire
from penstock.frontend.openai.bodies import Message
from penstock.frontend.openai.media import ContentPart

NOISE = ("x-anthropic-billing-header:",)
"""Beginnings of lines at the head of a system message that are not for the model: what Claude Code is billed by."""
SYSTEM = ("system", "developer")
_HEAD_CHARACTERS = 256
_REST_CHARACTERS = 1024
_SHORTEST = 2048
"""Characters of a system message from which on its head is watched: less is computed soon."""
_HEADS_TOLD = 3
"""Different heads of one rest at which they are reported; two have users who changed the text."""
_RESTS_MAX = 512

_log = get_logger()


class PromptHead(Wire, frozen=True):
    """The head of a system message, and a digest of how it ends."""

    text: str
    rest: bytes


def without_noise(content: str | list[ContentPart]) -> str | list[ContentPart]:
    """Leave lines of `NOISE` out of the head of a system message's content."""
    if isinstance(content, str):
        while content.startswith(NOISE):
            content = content.partition("\n")[2]
        return content
    if not content or not (content[0].text or "").startswith(NOISE):
        return content
    text = without_noise(content[0].text or "")
    return [ContentPart(type="text", text=str(text)), *content[1:]] if text else without_noise(content[1:])


def head_of(messages: Sequence[Message]) -> PromptHead | None:
    """Give the head of a chat's system message; None if it has no long one."""
    content = messages[0].content if messages and messages[0].role in SYSTEM else None
    if isinstance(content, list):
        content = "\n".join(part.words or "" for part in content)
    if content is None or len(content) < _SHORTEST:
        return None
    content = str(without_noise(content))
    rest = content[-_REST_CHARACTERS:].encode("utf-8", "surrogatepass")
    return PromptHead(text=content[:_HEAD_CHARACTERS], rest=blake2b(rest, digest_size=16).digest())


class ChangingHeads:
    """Tells of system messages that end alike and begin otherwise with each request. One event loop owns it."""

    def __init__(self, count: Callable[[str], None]) -> None:
        """Count changed heads by `count`, which gets the model's name."""
        self._count = count
        self._heads: OrderedDict[tuple[str, str, bytes], list[str]] = OrderedDict()

    def saw(self, model: str, tenant: str, head: PromptHead) -> None:
        """Take the head of a prompt; at the third one of its kind the log says where they differ."""
        key = (model, tenant, head.rest)
        heads = self._heads.setdefault(key, [])
        self._heads.move_to_end(key)
        if len(self._heads) > _RESTS_MAX:
            self._heads.popitem(last=False)
        if head.text in heads:
            return
        was_told = len(heads) == _HEADS_TOLD
        if was_told:
            heads.pop()
        heads.append(head.text)
        if len(heads) == _HEADS_TOLD:
            self._count(model)
        if len(heads) == _HEADS_TOLD and not was_told:
            _log.warning(
                "prompt_head_changes",
                model=model,
                tenant=tenant,
                same_characters=len(
                    [*takewhile(lambda each: len(set(each)) == 1, zip(*heads, strict=False))]
                ),
                fix="have the client send what changes at the end: from the first character that differs no KV is reused",
            )
