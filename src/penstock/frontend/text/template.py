"""Hugging Face chat templates: Jinja from the model's files, run in a sandbox."""

import datetime as dt
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
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
from penstock.frontend.text.conversation import (
    REASONING,
    Conversation,
    TemplateRules,
    adapted,
    marked,
    probed,
    unseen,
)
from penstock.frontend.text.tools import spelled_out

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
                f"messages: the model's chat template refuses them: {error}", param="messages"
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
                "continue_final_message: the model's chat template does not show the last message as it is; leave it out",
                param="continue_final_message",
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
        f"messages[{index}]: the model's chat template leaves out what this message of role {message['role']!r} says; leave"
        " it out, or say it in a message of role 'user'",
        param=f"messages[{index}]",
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
