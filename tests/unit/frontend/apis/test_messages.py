"""Bodies of the Anthropic API as chats."""

import json
from typing import Any

import pytest

from penstock.core.errors import RequestError
from penstock.frontend.apis.bodies import ChatRequest
from penstock.frontend.apis.messages_body import parse_messages

HI = [{"role": "user", "content": "hi"}]


def chat(**fields: Any) -> ChatRequest:
    request = parse_messages(
        json.dumps({"model": "m", "max_tokens": 5, "messages": HI, **fields}).encode()
    ).request
    assert isinstance(request, ChatRequest)
    return request


def test_tool_results_are_messages_of_their_own_before_the_users_text() -> None:
    content = [
        {
            "type": "tool_result",
            "tool_use_id": "1",
            "content": [{"type": "text", "text": "rain"}],
            "is_error": False,
        },
        {"type": "tool_result", "tool_use_id": "2"},
        {"type": "tool_result", "tool_use_id": "3", "content": "no such file", "is_error": True},
        {
            "type": "tool_result",
            "tool_use_id": "4",
            "content": [{"type": "text", "text": "late"}],
            "is_error": True,
        },
        {"type": "text", "text": "so?", "cache_control": {"type": "ephemeral"}},
    ]
    said = chat(messages=[{"role": "user", "content": content}]).messages
    assert [(message.role, message.tool_call_id, message.content) for message in said] == [
        ("tool", "1", "rain"), ("tool", "2", ""), ("tool", "3", "Error: no such file"), ("tool", "4", "Error:\nlate"), ("user", None, "so?"),
    ]  # fmt: skip


def test_images_are_parts() -> None:
    source = {"type": "base64", "media_type": "image/png", "data": "AAAA"}
    said = chat(
        messages=[
            {"role": "user", "content": [{"type": "image", "source": source}, {"type": "text", "text": "?"}]}
        ]
    )
    parts = said.messages[0].content
    assert isinstance(parts, list)
    assert [part.type for part in parts] == ["image_url", "text"]
    assert parts[0].image_url.url == "data:image/png;base64,AAAA"  # type: ignore[union-attr]


def test_texts_of_documents_and_search_results_are_texts() -> None:
    text = {"type": "text", "text": "inside"}
    blocks = [
        {"type": "document", "title": "T", "source": {"type": "text", "media_type": "text/plain", "data": "plain"}},
        {"type": "document", "source": {"type": "content", "content": "whole"}, "citations": {"enabled": True}},
        {"type": "document", "source": {"type": "content", "content": [text]}, "context": None},
        {"type": "search_result", "source": "http://page", "title": "S", "content": [text, text]},
    ]  # fmt: skip
    said = "T\nplain\nwhole\ninside\nS\nhttp://page\ninside\ninside"
    assert chat(messages=[{"role": "user", "content": blocks}]).messages[0].content == said
    result = [{"role": "user", "content": [{"type": "tool_result", "tool_use_id": "1", "content": blocks}]}]
    assert chat(messages=result).messages[0].content == said


def test_a_system_message_among_the_others_stays_where_it_is() -> None:
    asked = [*HI, {"role": "assistant", "content": "yes"}, {"role": "system", "content": "be brief"}]
    said = chat(messages=asked, diagnostics=None, inference_geo="eu", speed="standard").messages
    assert [(message.role, message.content) for message in said[1:]] == [
        ("assistant", "yes"),
        ("system", "be brief"),
    ]


@pytest.mark.parametrize(
    ("choice", "made"),
    [
        ({"type": "auto"}, "auto"),
        ({"type": "any"}, "required"),
        ({"type": "none"}, "none"),
        ({"type": "tool", "name": "f"}, {"type": "function", "function": {"name": "f"}}),
    ],
)
def test_choices_of_tools(choice: dict[str, Any], made: Any) -> None:
    assert chat(tool_choice=choice).tool_choice == made
    assert chat(tool_choice=choice | {"disable_parallel_tool_use": True}).parallel_tool_calls is False


def test_thinking_turns_reasoning_on_and_off() -> None:
    assert chat(thinking={"type": "disabled"}).reasoning_effort == "none"
    assert chat(thinking={"type": "enabled", "budget_tokens": 99}).chat_template_kwargs == {
        "enable_thinking": True, "thinking": True,
    }  # fmt: skip
    assert chat(output_config={"effort": "low"}).reasoning_effort == "low"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"system": [{"type": "text", "text": "a"}, {"type": "image"}]}, "system[1].type"),
        ({"max_tokens": None}, "max_tokens"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": [{"type": "document"}]}]}, "messages[0].content[0].type"),
        ({"messages": [{"role": "user", "content": [{"type": "tool_result", "content": [{"type": "audio"}]}]}]}, "messages[0].content[0].content[0].type"),
        ({"messages": [{"role": "user", "content": [{"type": "document", "source": {"type": "url", "url": "x"}}]}]}, "messages[0].content[0].type"),
        ({"messages": [{"role": "user", "content": [{"type": "document", "source": {"type": "content", "content": [{"type": "document"}]}}]}]}, "messages[0].content[0].source.content[0].type"),
        ({"tool_choice": {"type": "some"}}, "tool_choice.type"),
        ({"output_config": {"format": {"type": "xml"}}}, "output_config.format"),
        ({"colour": "red"}, "colour"),
    ],
)  # fmt: skip
def test_what_is_not_served_is_refused_by_name(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(RequestError) as caught:
        chat(**fields)
    assert caught.value.param == param
