"""Chat templates, with the conventions that templates on the hub rely on."""

import json

import pytest

from penstock.core.errors import ConfigError, RequestError
from penstock.frontend.text.template import ChatTemplate

USER = [{"role": "user", "content": "hi <b>"}]


def render(source: str, messages=USER, arguments=None, **special: str) -> str:
    return ChatTemplate(source, special).render(messages, arguments)


def test_blocks_leave_no_white_space_behind() -> None:
    source = "{% for m in messages %}\n  {% if true %}\n{{ m.content }}\n  {% endif %}\n{% endfor %}\nend"
    assert render(source) == "hi <b>\nend"


def test_special_tokens_and_arguments_are_variables() -> None:
    source = "{{ bos_token }}{{ enable_thinking }}{{ add_generation_prompt }}{{ tools }}"
    assert render(source, arguments={"enable_thinking": False}, bos_token="<s>") == "<s>FalseTrueNone"


def test_arguments_cannot_replace_the_messages() -> None:
    assert render("{{ messages[0].content }}", arguments={"messages": []}) == "hi <b>"


def test_tojson_writes_text_as_it_is() -> None:
    assert render("{{ messages | tojson }}", [{"role": "user", "content": "é<'"}]) == (
        '[{"role": "user", "content": "é<\'"}]'
    )


def test_loop_controls_and_generation_marks_are_known() -> None:
    source = (
        "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% break %}{% endfor %}"
    )
    assert render(source, USER * 2) == "hi <b>"


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


def test_the_file_goes_before_the_configuration() -> None:
    config = json.dumps({"chat_template": "config", "eos_token": {"content": "</s>"}}).encode()
    loaded = ChatTemplate.load(config, b"file {{ eos_token }}")
    assert loaded is not None
    assert loaded.render(USER) == "file </s>"
    loaded = ChatTemplate.load(config, None)
    assert loaded is not None
    assert loaded.render(USER) == "config"


def test_of_named_templates_the_default_is_taken() -> None:
    named = [{"name": "tool_use", "template": "tool"}, {"name": "default", "template": "chat"}]
    loaded = ChatTemplate.load(json.dumps({"chat_template": named}).encode(), None)
    assert loaded is not None
    assert loaded.render(USER) == "chat"


def test_a_model_may_have_no_template() -> None:
    assert ChatTemplate.load(None, None) is None
    assert ChatTemplate.load(b"{}", None) is None


def test_a_malformed_configuration_is_named() -> None:
    with pytest.raises(ConfigError, match=r"tokenizer_config\.json"):
        ChatTemplate.load(b"{", None)
