"""Chat templates, with the conventions that templates on the hub rely on."""

import json

import pytest

from penstock.core.errors import ConfigError, RequestError
from penstock.frontend.text.template import ChatTemplate

USER = [{"role": "user", "content": "hi <b>"}]


def render(source: str, messages=USER, arguments=None, **special: str) -> str:
    return ChatTemplate(source, special).render(messages, arguments)


@pytest.mark.parametrize(
    ("source", "arguments", "said"),
    [
        ("{% for m in messages %}\n  {% if true %}\n{{ m.content }}\n  {% endif %}\n{% endfor %}\nend", None, "hi <b>\nend"),
        ("{{ bos_token }}{{ enable_thinking }}{{ add_generation_prompt }}{{ tools }}", {"enable_thinking": False}, "<s>FalseTrueNone"),
        ("{{ messages[0].content }}", {"messages": []}, "hi <b>"),
        ("{{ messages | tojson }}{{ \"é'\" | tojson }}", None, '[{"role": "user", "content": "hi <b>"}]"é\'"'),
        ("{% for m in messages * 2 %}{% generation %}{{ m.content }}{% endgeneration %}{% break %}{% endfor %}", None, "hi <b>"),
    ],
    ids=["white space", "variables", "arguments do not replace messages", "tojson", "loop controls and generation marks"],
)  # fmt: skip
def test_what_templates_of_the_hub_rely_on(
    source: str, arguments: dict[str, object] | None, said: str
) -> None:
    assert render(source, arguments=arguments, bos_token="<s>") == said


def test_strftime_now_formats_the_date() -> None:
    assert len(render("{{ strftime_now('%Y-%m-%d') }}")) == len("2026-01-01")


def test_a_template_may_refuse_messages() -> None:
    with pytest.raises(RequestError, match="roles must alternate") as caught:
        render("{{ raise_exception('roles must alternate') }}")
    assert caught.value.param == "messages"


@pytest.mark.parametrize("source", ["{{ messages[7].content.x }}", "{{ 1 / 0 }}", "{{ messages + 1 }}"])
def test_any_failure_of_a_template_is_a_refusal(source: str) -> None:
    with pytest.raises(RequestError, match="chat template refuses"):
        render(source)


@pytest.mark.parametrize("source", ["{{ ''.__class__.__mro__ }}", "{% set x = messages.append(1) %}"])
def test_templates_cannot_leave_the_sandbox(source: str) -> None:
    with pytest.raises(RequestError):
        render(source)


def test_a_malformed_template_says_where() -> None:
    with pytest.raises(ConfigError, match="chat template: line 2"):
        ChatTemplate("x\n{% if %}", {})


NAMED = [{"name": "tool_use", "template": "tool"}, {"name": "default", "template": "chat"}]


@pytest.mark.parametrize(
    ("config", "file", "said"),
    [
        ({"chat_template": "config", "eos_token": {"content": "</s>"}}, b"file {{ eos_token }}", "file </s>"),
        ({"chat_template": "config"}, None, "config"),
        ({"chat_template": NAMED}, None, "chat"),
        ({}, None, None),
        (None, None, None),
    ],
)
def test_the_file_goes_before_the_configuration_and_the_default_before_other_names(
    config: dict[str, object] | None, file: bytes | None, said: str | None
) -> None:
    loaded = ChatTemplate.load(None if config is None else json.dumps(config).encode(), file)
    assert (None if loaded is None else loaded.render(USER)) == said


def test_a_malformed_configuration_is_named() -> None:
    with pytest.raises(ConfigError, match=r"tokenizer_config\.json"):
        ChatTemplate.load(b"{", None)
