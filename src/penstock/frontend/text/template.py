"""Hugging Face chat templates: Jinja from the model's files, run in a sandbox, with conversations brought into a form that a template takes."""

import datetime as dt
import json
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from hashlib import blake2b
from itertools import count, product
from typing import Any, NoReturn, Self, TypeVar

import jinja2
import jinja2.ext
import jinja2.meta
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox
import msgspec

from penstock.core.clock import wall_time_s
from penstock.core.errors import ConfigError, RequestError
from penstock.core.types.instances import ADDITIONAL_TEMPLATES, TEXT_FILES

_LEVELS_MAX = 32


def spelled_out(tool: dict[str, Any]) -> dict[str, Any]:
    """Give a tool's function with every field that a template may read.

    Descriptions and parameters that are missing or null are empty, a type that is a list is an `anyOf`, and a schema that is
    `true` is an object.
    """
    function = tool["function"]
    parameters = function.get("parameters")
    schema = _schema(parameters if isinstance(parameters, dict) else {}, 0)
    if not isinstance(schema.get("properties"), dict):
        schema["properties"] = {}
    said = {"description": function.get("description") or "", "parameters": {"type": "object"} | schema}
    return {**tool, "function": {**function, **said}}


def _schema(schema: Any, level: int) -> dict[str, Any]:
    given = schema if isinstance(schema, dict) else {}
    if level > _LEVELS_MAX:
        return given
    whole = {**given, "description": given.get("description") or ""}
    if isinstance(kinds := given.get("type"), list):
        del whole["type"]
        whole.setdefault("anyOf", [{"type": kind} for kind in kinds])
    if isinstance(properties := given.get("properties"), dict):
        whole["properties"] = {name: _schema(each, level + 1) for name, each in properties.items()}
    if "items" in given:
        whole["items"] = _schema(given["items"], level + 1)
    return whole


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
    """Give the id of nine letters and digits that stands for a call's id, always the same; an id of that form stands for itself."""
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


_Kind = TypeVar("_Kind")
_TOKENIZER_CONFIG, _JINJA, _PROCESSOR = TEXT_FILES[1:]
_SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "pad_token")
_PROBE = "shown as text"
_PROBE_TOOL = {
    "type": "function",
    "function": {"name": "probe", "description": "", "parameters": {"type": "object", "properties": {}}},
}
RESERVED = frozenset(
    {*_SPECIAL_TOKENS, "messages", "tools", "add_generation_prompt", "raise_exception", "strftime_now"}
)
"""Variables that only the server sets, some from fields of their own; `chat_template_kwargs` may set any other."""


THINKING_SWITCHES = frozenset({"enable_thinking", "thinking"})
"""Variables of templates that turn reasoning on and off."""


class _NamedTemplate(msgspec.Struct):
    name: str
    template: str


_Given = str | list[_NamedTemplate] | None


class _ProcessorConfig(msgspec.Struct):
    chat_template: _Given = None


class _SpecialToken(msgspec.Struct):
    content: str


class TokenizerConfig(msgspec.Struct):
    """The fields of tokenizer_config.json that a chat template needs."""

    chat_template: _Given = None
    bos_token: str | _SpecialToken | None = None
    eos_token: str | _SpecialToken | None = None
    unk_token: str | _SpecialToken | None = None
    pad_token: str | _SpecialToken | None = None


class ChatTemplate:
    """Renders messages to the prompt text."""

    def __init__(self, source: str, special_tokens: dict[str, str]) -> None:
        """Compile the template.

        Args:
            source: the Jinja text.
            special_tokens: special tokens by variable name, such as `bos_token`.

        Raises:
            ConfigError: invalid Jinja.
        """
        try:
            self._template = _ENVIRONMENT.from_string(source)
        except jinja2.TemplateSyntaxError as error:
            raise ConfigError(f"chat template: line {error.lineno}: {error.message}") from error
        # Jinja copies the globals for each rendering, and copies its own kind of mapping in three times as long.
        self._template.globals = dict(self._template.globals)
        self.source = source
        self.variables = frozenset(jinja2.meta.find_undeclared_variables(_ENVIRONMENT.parse(source)))
        """Variables that the template reads, such as `tools` or `enable_thinking`."""
        self.special_tokens = special_tokens
        self._probe_arguments: dict[str, Any] = {}
        self.takes_strings = self._shows(_PROBE)
        """Whether a message's content may be a string."""
        self.takes_parts = self._shows([{"type": "text", "text": _PROBE}])
        """Whether a message's content may be a list of parts, where images are."""
        if not (self.takes_strings or self.takes_parts) and "tools" in self.variables:
            self._probe_arguments["tools"] = [_PROBE_TOOL]  # a template for tools alone
            self.takes_strings = self._shows(_PROBE)
        user = [{"role": "user", "content": _PROBE}]
        self.thinking_switches = frozenset(
            name
            for name in THINKING_SWITCHES & self.variables
            if self._probed(user, **{name: True}) != self._probed(user, **{name: False})
        )
        """Those of `THINKING_SWITCHES` that change a prompt."""
        self.rules = probed(self._probed)
        """What it takes of the messages that the API allows."""
        if self.takes_parts and not all(map(self._shows_parts, ("system", "user", "assistant"))):
            self.rules = replace(self.rules, several_parts=False)
        if not self._shows_first_call():
            self.rules = replace(self.rules, assistant_first=False)

    def prompt(
        self, messages: Conversation, arguments: dict[str, Any] | None = None, *, continues: bool = False
    ) -> str:
        """Render messages, in a form that the template takes, as `render` or, with `continues`, as `render_open`.

        Tools that the template refuses are spelled out for it (`spelled_out`).

        Raises:
            RequestError: the template refuses these messages or tools, or leaves one out.
        """
        tools = (arguments or {}).get("tools")
        try:
            return self._prompt(messages, arguments, continues=continues)
        except RequestError:
            if not tools or self._probed([{"role": "user", "content": _PROBE}], tools=tools):
                raise
        whole = [spelled_out(tool) for tool in tools]
        return self._prompt(messages, {**(arguments or {}), "tools": whole}, continues=continues)

    def _prompt(self, messages: Conversation, arguments: dict[str, Any] | None, *, continues: bool) -> str:
        problem: RequestError | None = None
        for rules in dict.fromkeys((self.rules, self.rules.strictest())):
            try:
                made = adapted(messages, rules)
                text = (self.render_open if continues else self.render)(made, arguments)
            except RequestError as error:
                problem = problem or error
                continue
            index = unseen(messages, text)
            if index is not None or not (rules.tools or all(each["role"] != "tool" for each in messages)):
                index = self._left_out(messages, rules, arguments)
            if index is None:
                return text
            problem = problem or _left_out(index, messages[index])
        assert problem is not None, "there is a rule at least"
        raise problem

    def render(self, messages: Conversation, arguments: dict[str, Any] | None = None) -> str:
        """Render messages up to the start of the assistant's answer.

        Args:
            messages: objects with `role`, `content` and any field that the template reads.
            arguments: more variables, such as `enable_thinking`, `tools` or `add_generation_prompt`.

        Raises:
            RequestError: the template refuses these messages.
        """
        variables = {
            **self.special_tokens,
            "tools": None,
            "documents": None,
            "add_generation_prompt": True,
            **(arguments or {}),
            "messages": messages,
        }
        try:
            return self._template.render(variables)
        except Exception as error:  # template code may raise anything; it is about these messages
            raise RequestError(
                f"the model's chat template refuses them: {error}", field="messages"
            ) from error

    def render_open(self, messages: Conversation, arguments: dict[str, Any] | None = None) -> str:
        """Render messages up to the end of the last one's content, so that the model continues it.

        Raises:
            RequestError: the template refuses these messages, or does not show the last one's content as it is.
        """
        text = self.render(messages, {**(arguments or {}), "add_generation_prompt": False})
        content = str(messages[-1]["content"])
        shown = content.strip()
        at = text.rfind(shown) if shown else -1
        if at < 0:
            raise RequestError(
                "the model's chat template does not show the last message as it is; leave it out",
                field="continue_final_message",
            )
        kept = content[len(content.rstrip()) :]
        end = at + len(shown)
        return text[:end] + (kept if text.startswith(kept, end) else "")

    def history(self, messages: Conversation) -> str:
        """Render an old conversation of texts and calls; "" where the template refuses it or takes no calls."""
        takes_calls = self.rules.calls or not any("tool_calls" in message for message in messages)
        return self._probed(adapted(messages, self.rules), add_generation_prompt=False) if takes_calls else ""

    def turn_end(self, special: Iterable[str]) -> str | None:
        """Give the special token that ends an assistant's turn, whether the conversation goes on or not; None if no single one does.

        A token that also stands within a turn, as after each of its messages, ends none.
        """
        said: list[Any] = [{"role": role, "content": _PROBE} for role in ("user", "assistant", "user")]
        called = {"type": "function", "id": "probe0123", "function": {"name": "probe", "arguments": {}}}
        whole = said[1] | dict.fromkeys(REASONING, _PROBE) | {"tool_calls": [called]}
        texts = [
            self._probed(each, add_generation_prompt=False) for each in (said[:2], said, [said[0], whole])
        ]
        last, going_on = (text.split(_PROBE)[2] if text.count(_PROBE) > 1 else "" for text in texts[:2])
        found = [
            token
            for token in special
            if token in last and going_on.startswith(last[: last.index(token) + len(token)])
        ]
        return found[0] if len(found) == 1 and texts[2].count(found[0]) <= texts[0].count(found[0]) else None

    def _left_out(
        self, messages: Conversation, rules: TemplateRules, arguments: dict[str, Any] | None
    ) -> int | None:
        """Give the index of the first message that is left out, whatever it says: a template may write a text otherwise, as in JSON."""
        marks = marked(messages)
        try:
            return unseen(marks, self.render(adapted(marks, rules), arguments), in_order=False)
        except RequestError:  # the template reads texts, and knows no marks
            return None

    def _shows(self, content: Any) -> bool:
        """Say whether the template shows the text of such a content, and not its Python form."""
        try:
            text = self.render([{"role": "user", "content": content}], self._probe_arguments)
        except RequestError:
            return False
        return _PROBE in text and f"'{_PROBE}'" not in text

    def _shows_first_call(self) -> bool:
        """Say whether the template shows a call at the start beside tools, or takes none there."""
        called = {"id": "probe0123", "type": "function", "function": {"name": _PROBE, "arguments": {}}}
        said = {"role": "assistant", "content": "", "tool_calls": [called]}
        text = self._probed(adapted([said], self.rules), tools=[_PROBE_TOOL]) if self.rules.calls else ""
        return not text or _PROBE in text

    def _shows_parts(self, role: str) -> bool:
        """Say whether the template shows all texts of a message of a role, or none."""
        texts = ["first of two", "second of two"]
        said = {"role": role, "content": [{"type": "text", "text": text} for text in texts]}
        user = {"role": "user", "content": [{"type": "text", "text": _PROBE}]}
        asked = {"system": [said, user], "user": [said], "assistant": [user, said]}[role]
        try:
            text = self.render(asked, self._probe_arguments)
        except RequestError:
            return True
        return len({each in text for each in texts}) == 1

    def _probed(self, messages: Conversation, **arguments: Any) -> str:
        """Render a conversation of texts; "" where the template refuses it."""
        if self.takes_parts and not self.takes_strings:
            messages = [
                {**message, "content": [{"type": "text", "text": message["content"]}]} for message in messages
            ]
        try:
            return self.render(messages, self._probe_arguments | arguments)
        except RequestError:
            return ""


@dataclass(frozen=True, slots=True)
class ChatTemplates:
    """The chat templates of a model: most models have one."""

    default: ChatTemplate
    tool_use: ChatTemplate

    @classmethod
    def load(cls, files: Mapping[str, bytes]) -> Self | None:
        """Load the templates of a model; None if it has none.

        Args:
            files: those of the model by name; the others are not read.

        Raises:
            ConfigError: a file or a template is malformed.
        """
        config = _decoded(files, _TOKENIZER_CONFIG, TokenizerConfig)
        sources = _sources(files, config)
        if not sources:
            return None
        tokens = {
            name: token if isinstance(token, str) else token.content
            for name in _SPECIAL_TOKENS
            if (token := getattr(config, name)) is not None
        }
        source = sources.get("default") or next(iter(sources.values()))
        default = ChatTemplate(source, tokens)
        with_tools = sources.get("tool_use", source)
        return cls(default, default if with_tools == source else ChatTemplate(with_tools, tokens))

    def of(self, *, tools: bool) -> ChatTemplate:
        """Choose by whether a request offers tools, as transformers does."""
        return self.tool_use if tools else self.default

    @property
    def source(self) -> str:
        """The Jinja of them all."""
        return "\n".join(dict.fromkeys((self.default.source, self.tool_use.source)))


def _sources(files: Mapping[str, bytes], config: TokenizerConfig) -> dict[str, str]:
    """Give the templates by name. Jinja files go before a processor's JSON, and that before the tokenizer's configuration."""
    named = {
        name.removeprefix(ADDITIONAL_TEMPLATES).removesuffix(".jinja"): content
        for name, content in files.items()
        if name.startswith(ADDITIONAL_TEMPLATES)
    }
    if _JINJA in files:
        named["default"] = files[_JINJA]
    found: dict[str, str] = {}
    for given in (
        _by_name(config.chat_template),
        _by_name(_decoded(files, _PROCESSOR, _ProcessorConfig).chat_template),
        {name: content.decode() for name, content in named.items()},
    ):
        found = given if "default" in given else found | given
    return found


def _by_name(given: _Given) -> dict[str, str]:
    if given is None or isinstance(given, str):
        return {"default": given} if given is not None else {}
    return {each.name: each.template for each in given}


def _decoded(files: Mapping[str, bytes], name: str, kind: type[_Kind]) -> _Kind:
    try:
        return msgspec.json.decode(files.get(name, b"{}"), type=kind)
    except ValueError as error:
        raise ConfigError(f"{name}: {error}") from error


def _left_out(index: int, message: dict[str, Any]) -> RequestError:
    return RequestError(
        f"the model's chat template leaves out what this message of role {message['role']!r} says; leave"
        " it out, or say it in a message of role 'user'",
        field=f"messages[{index}]",
    )


class _GenerationTag(jinja2.ext.Extension):
    """`{% generation %}` marks the assistant's tokens for training; here it renders only its content."""

    tags = {"generation"}  # noqa: RUF012 - jinja2 declares it so

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(form: str) -> str:
    return dt.datetime.fromtimestamp(wall_time_s(), dt.UTC).astimezone().strftime(form)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,  # noqa: FBT001, FBT002 - as templates call it
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,  # noqa: FBT001, FBT002
) -> str:
    """Dump without jinja2's HTML escapes."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _environment() -> jinja2.sandbox.ImmutableSandboxedEnvironment:
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


_ENVIRONMENT = _environment()
