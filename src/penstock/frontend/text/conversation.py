"""Conversations as a chat template takes them.

A template is probed once, at load, with short conversations. What it refuses or leaves out is brought into a form that it takes:
another role, joined messages, other ids of calls. Equal beginnings of conversations stay equal, so their KV is reused.
"""

import json
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from hashlib import blake2b
from itertools import count, product
from typing import Any

Message = dict[str, Any]
Conversation = Sequence[Message]
Content = str | list[dict[str, str]]
_SYSTEM = ("system", "developer")
REASONING = ("reasoning_content", "reasoning", "thinking")
"""What templates call the reasoning of a message."""
_JOINT = "\n\n"
_BLANK = " "
"""Content of a message that only keeps the turns: some templates refuse an empty one."""
_REASONING_END = "</think>"
_MARK = "probe{}shown"
_LETTERS = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"
_SHORT_ID = 9
"""Letters and digits of a call's id where templates of Mistral's models check it."""


@dataclass(frozen=True, slots=True)
class TemplateRules:
    """What a chat template takes and shows.

    Attributes:
        developer: the role `developer`; otherwise such messages are of `system`.
        system: a system message at the start; otherwise it is the user's.
        several_systems: more than one at the start; otherwise they are joined.
        several_parts: all texts of a content with several parts; otherwise those beside each other are joined.
        late_systems: system messages after the start; otherwise they are the user's.
        users: two messages of the user in a row; otherwise they are joined.
        assistants: two of the assistant in a row; otherwise they are joined, or a blank one of the user goes between text and calls.
        assistant_first: the assistant's message at the start; otherwise a blank one of the user goes before it.
        user_after_tool: the user's message after a tool's; otherwise a blank one of the assistant goes between them.
        tools: a tool's messages; otherwise the template refuses or leaves them out.
        calls: an assistant's calls; otherwise the template leaves them out.
        parallel_calls: several in one message; otherwise each is a message, with the tool's after it.
        text_with_calls: text beside calls; otherwise it is a message before them.
        text_before_calls: such a message; without it and `text_with_calls` the template leaves the text out.
        object_arguments: arguments of calls as objects; otherwise as JSON text.
        long_call_ids: ids of calls of any length; otherwise they have nine letters or digits.
    """

    developer: bool = True
    system: bool = True
    several_systems: bool = True
    several_parts: bool = True
    late_systems: bool = True
    users: bool = True
    assistants: bool = True
    assistant_first: bool = True
    user_after_tool: bool = True
    tools: bool = True
    calls: bool = True
    parallel_calls: bool = True
    text_with_calls: bool = True
    text_before_calls: bool = True
    object_arguments: bool = True
    long_call_ids: bool = True

    @property
    def lacking(self) -> list[str]:
        """Names of what the template does not take."""
        return [field.name for field in fields(self) if not getattr(self, field.name)]

    def strictest(self) -> "TemplateRules":
        """Give the rules of a template that takes turns of user and assistant, calls as this one, and nothing else."""
        return replace(
            self,
            developer=False,
            system=False,
            late_systems=False,
            users=False,
            assistants=False,
            assistant_first=False,
            user_after_tool=False,
        )


def probed(render: Callable[[Conversation], str]) -> TemplateRules:
    """Find what a template takes.

    Args:
        render: renders a conversation; gives "" where the template refuses it.
    """

    def shows(*messages: Message) -> bool:
        return unseen(messages, render(messages), in_order=False) is None

    user, again = _said("user", 1), _said("user", 2)
    answer, other = _said("assistant", 3), _said("assistant", 4)
    system, further, developer = _said("system", 5), _said("system", 6), _said("developer", 7)
    if not shows(user):
        return TemplateRules()
    start = [system] if shows(system, user) else []
    has_developer = shows(developer, user)
    rules = TemplateRules(
        developer=has_developer,
        system=bool(start),
        several_systems=shows(system, further, user)
        and (shows(system, developer, user) or not has_developer),
        late_systems=shows(*start, user, answer, further, again),
        users=shows(*start, user, again),
        assistants=shows(user, answer, other, again),
        assistant_first=shows(*start, answer, user),
    )
    return _with_calls(rules, render)


def _said(role: str, mark: int) -> Message:
    return {"role": role, "content": _MARK.format(mark)}


def _with_calls(rules: TemplateRules, render: Callable[[Conversation], str]) -> TemplateRules:
    """Find what a template takes of calls and of tools' messages."""

    def called(text: str, *marks: int) -> Message:
        calls = [
            {
                "id": f"call_{mark:016}",
                "type": "function",
                "function": {"name": _MARK.format(mark), "arguments": {"key": "value"}},
            }
            for mark in marks
        ]
        return {"role": "assistant", "content": text, "tool_calls": calls}

    def result(mark: int, of: int) -> Message:
        return {**_said("tool", mark), "tool_call_id": f"call_{of:016}", "name": _MARK.format(of)}

    def shows(rules: TemplateRules, marks: Sequence[int], *messages: Message) -> bool:
        text = render(adapted(messages, rules))
        return "'key'" not in text and all(_MARK.format(mark) in text for mark in marks)

    user, again, other = _said("user", 1), _said("user", 2), _said("assistant", 3)
    beside, further = map(_MARK.format, (4, 5))
    for form in _forms_of_calls(rules):
        names = (6, 7) if form.calls else ()
        if shows(form, [8, *names[:1]], user, called("", 6), result(8, 6)):
            rules = form
            break
    else:
        return replace(rules, tools=False, calls=False)
    in_turn = replace(rules, text_with_calls=False)
    turns = user, called(beside, 6), result(8, 6), other, again, called(further, 7), result(9, 7)
    return replace(
        rules,
        user_after_tool=shows(rules, [2, 8], user, called("", 6), result(8, 6), again),
        parallel_calls=shows(rules, [8, 9, *names], user, called("", 6, 7), result(8, 6), result(9, 7)),
        text_with_calls=shows(rules, [4, 8], *turns[:3]),
        text_before_calls=shows(in_turn, [2, 3, 4, 5, 8, 9], *turns),
    )


def _forms_of_calls(rules: TemplateRules) -> Iterator[TemplateRules]:
    for calls, object_arguments, long_call_ids in product((True, False), repeat=3):
        yield replace(rules, calls=calls, object_arguments=object_arguments, long_call_ids=long_call_ids)


def adapted(messages: Conversation, rules: TemplateRules) -> Conversation:
    """Bring a conversation into a form that a template with these rules takes; the messages given stay as they are."""
    made: list[Message] = []
    at_start = True
    for given in messages if rules.parallel_calls else _one_call_each(messages):
        role = given["role"]
        at_start = at_start and role in _SYSTEM
        if role in _SYSTEM and not (rules.system if at_start else rules.late_systems):
            role = "user"
        elif role == "developer" and not rules.developer:
            role = "system"
        message = given if role == given["role"] else {**given, "role": role}
        if not rules.several_parts and not isinstance(given["content"], str):
            message = {**message, "content": _joined_parts(given["content"])}
        for part in _parts(message, rules):
            _add(part, made, rules)
    return made


def _one_call_each(messages: Conversation) -> Iterator[Message]:
    """Give each call a message of its own, before the tool's message that answers it."""
    rest = deque(messages)
    while rest:
        message = rest.popleft()
        calls = message.get("tool_calls") or ()
        if len(calls) <= 1:
            yield message
            continue
        results = []
        while rest and rest[0]["role"] == "tool":
            results.append(rest.popleft())
        for call in calls:
            yield {**message, "tool_calls": [call]}
            message = {"role": message["role"], "content": ""}
            yield from (each for each in results if each.get("tool_call_id") == call.get("id"))
            results = [each for each in results if each.get("tool_call_id") != call.get("id")]
        yield from results


def _parts(message: Message, rules: TemplateRules) -> Iterator[Message]:
    """Give the messages that a message becomes by how the template takes calls."""
    if "tool_call_id" in message and not rules.long_call_ids:
        message = {**message, "tool_call_id": short_call_id(message["tool_call_id"])}
    if message.get("tool_calls"):
        if message["content"] and rules.text_before_calls and not rules.text_with_calls:
            yield {name: value for name, value in message.items() if name != "tool_calls"}
            message = {"role": message["role"], "content": "", "tool_calls": message["tool_calls"]}
        if not (rules.object_arguments and rules.long_call_ids):
            message = {**message, "tool_calls": [_call(call, rules) for call in message["tool_calls"]]}
    yield message


def _call(call: dict[str, Any], rules: TemplateRules) -> dict[str, Any]:
    call = dict(call)
    if not rules.long_call_ids and isinstance(call.get("id"), str):
        call["id"] = short_call_id(call["id"])
    function = call.get("function")
    if not rules.object_arguments and isinstance(function, dict):
        arguments = function.get("arguments")
        text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
        call["function"] = {**function, "arguments": text}
    return call


def short_call_id(call_id: str) -> str:
    """Give the id of nine letters and digits that stands for a call's id: always the same, itself if it is one."""
    if len(call_id) == _SHORT_ID and call_id.isascii() and call_id.isalnum():
        return call_id
    number = int.from_bytes(blake2b(call_id.encode("utf-8", "surrogatepass"), digest_size=8).digest(), "big")
    digits = []
    for _ in range(_SHORT_ID):
        number, digit = divmod(number, len(_LETTERS))
        digits.append(_LETTERS[digit])
    return "".join(digits)


def _add(message: Message, made: list[Message], rules: TemplateRules) -> None:
    """Add a message, or join it to the one before it."""
    last = made[-1] if made else {"role": "", "content": ""}
    role, before = message["role"], last["role"]
    if role in _SYSTEM and before in _SYSTEM:
        joins = not rules.several_systems
    elif role == before == "assistant" and (message.get("tool_calls") or last.get("tool_calls")):
        joins = not rules.assistants and rules.text_with_calls
    else:
        joins = role == before and not {"user": rules.users, "assistant": rules.assistants}.get(role, True)
    if joins:
        made[-1] = _joined(last, message)
        return
    if role == "assistant" and (
        (before in {"", *_SYSTEM} and not rules.assistant_first)
        or (before == "assistant" and not rules.assistants and not last.get("tool_calls"))
    ):
        made.append({"role": "user", "content": _BLANK})
    elif role == "user" and before == "tool" and not rules.user_after_tool:
        made.append({"role": "assistant", "content": _BLANK})
    made.append(message)


def _joined(first: Message, second: Message) -> Message:
    joined = {**first, "content": _joined_content(first["content"], second["content"])}
    for name in REASONING:
        if said := [each[name] for each in (first, second) if each.get(name)]:
            joined[name] = _JOINT.join(said)
    if calls := [*first.get("tool_calls", ()), *second.get("tool_calls", ())]:
        joined["tool_calls"] = calls
    return joined


def _joined_content(first: Content, second: Content) -> Content:
    if isinstance(first, str) and isinstance(second, str):
        return _JOINT.join(filter(None, (first, second)))
    parts = [[{"type": "text", "text": each}] if isinstance(each, str) else each for each in (first, second)]
    return [*parts[0], {"type": "text", "text": _JOINT}, *parts[1]]


def _joined_parts(parts: list[dict[str, str]]) -> list[dict[str, str]]:
    """Join texts that stand beside each other."""
    joined: list[dict[str, str]] = []
    for part in parts:
        if "text" in part and joined and "text" in joined[-1]:
            joined[-1] = {**joined[-1], "text": f"{joined[-1]['text']}\n{part['text']}"}
        else:
            joined.append(part)
    return joined


def unseen(messages: Conversation, text: str, *, in_order: bool = True) -> int | None:
    """Give the index of the first message of which a rendered text lacks something; None if it lacks nothing.

    Args:
        messages: as they came, not adapted.
        text: rendered from them.
        in_order: what a message says has to follow what the message before it says.
    """
    at = 0
    for index, message in enumerate(messages):
        for words in _words(message):
            found = text.find(words, at if in_order else 0)
            if found < 0:
                return index
            at = found + len(words)
    return None


def _words(message: Message) -> Iterator[str]:
    """Give what a template has to show of a message: its texts without reasoning and white space around them.

    Beside calls a template may leave a text out, as `TemplateRules` says: models are trained without it there.
    """
    if message.get("tool_calls"):
        return
    content = message["content"]
    for text in [content] if isinstance(content, str) else [part.get("text", "") for part in content]:
        yield (text.rpartition(_REASONING_END)[2] if message["role"] == "assistant" else text).strip()


def marked(messages: Conversation) -> Conversation:
    """Put a mark of its own in the place of each text, so that `unseen` tells for sure what a template leaves out."""
    numbers = count(1)

    def mark_of(text: str) -> str:
        return _MARK.format(next(numbers)) if text.strip() else text

    def mark(content: Content) -> Content:
        if isinstance(content, str):
            return mark_of(content)
        return [{**part, "text": mark_of(part["text"])} if "text" in part else part for part in content]

    return [{**message, "content": mark(message["content"])} for message in messages]
