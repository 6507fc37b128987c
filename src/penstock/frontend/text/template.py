"""Hugging Face chat templates: Jinja from the model's files, run in a sandbox."""

import datetime as dt
import json
from collections.abc import Sequence
from typing import Any, NoReturn

import jinja2
import jinja2.ext
import jinja2.meta
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox
import msgspec

from penstock.core.clock import wall_time_s
from penstock.core.errors import ConfigError, RequestError

_SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "pad_token")
_PROBE = "shown as text"
RESERVED = frozenset(
    {*_SPECIAL_TOKENS, "messages", "tools", "add_generation_prompt", "raise_exception", "strftime_now"}
)
"""Variables that only the server sets, some from fields of their own; `chat_template_kwargs` may set any other."""


class _NamedTemplate(msgspec.Struct):
    name: str
    template: str


class _SpecialToken(msgspec.Struct):
    content: str


class TokenizerConfig(msgspec.Struct):
    """The fields of tokenizer_config.json that a chat template needs."""

    chat_template: str | list[_NamedTemplate] | None = None
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
        self.takes_strings = self._shows(_PROBE)
        """Whether a message's content may be a string."""
        self.takes_parts = self._shows([{"type": "text", "text": _PROBE}])
        """Whether a message's content may be a list of parts, where images are."""

    @classmethod
    def load(cls, tokenizer_config: bytes | None, template_file: bytes | None) -> "ChatTemplate | None":
        """Load the template of a model; a template file takes precedence over tokenizer_config.json.

        Raises:
            ConfigError: tokenizer_config.json or the template is malformed.
        """
        try:
            config = msgspec.json.decode(tokenizer_config or b"{}", type=TokenizerConfig)
        except ValueError as error:
            raise ConfigError(f"tokenizer_config.json: {error}") from error
        source = template_file.decode() if template_file is not None else _default(config.chat_template)
        if source is None:
            return None
        tokens = {
            name: token if isinstance(token, str) else token.content
            for name in _SPECIAL_TOKENS
            if (token := getattr(config, name)) is not None
        }
        return cls(source, tokens)

    def render(self, messages: Sequence[dict[str, Any]], arguments: dict[str, Any] | None = None) -> str:
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

    def render_open(self, messages: Sequence[dict[str, Any]], arguments: dict[str, Any]) -> str:
        """Render messages up to the end of the last one's content, so that the model continues it.

        Raises:
            RequestError: the template refuses these messages, or does not show the last one's content as it is.
        """
        text = self.render(messages, {**arguments, "add_generation_prompt": False})
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

    def _shows(self, content: Any) -> bool:
        """Say whether the template shows the text of such a content, and not its Python form."""
        try:
            text = self.render([{"role": "user", "content": content}])
        except RequestError:
            return False
        return _PROBE in text and f"'{_PROBE}'" not in text


def _default(template: str | list[_NamedTemplate] | None) -> str | None:
    if template is None or isinstance(template, str):
        return template
    by_name = {named.name: named.template for named in template}
    return by_name.get("default") or next(iter(by_name.values()), None)


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
