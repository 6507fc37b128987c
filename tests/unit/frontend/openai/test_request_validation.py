"""Values of requests: ranges, contradictions, and what is not served."""

from typing import Any

import pytest

from penstock.core.errors import RequestError
from penstock.frontend.openai.bodies import (
    ChatRequest,
    CompletionRequest,
    ContentPart,
    ContinuationBody,
    Message,
    StreamOptions,
)
from penstock.frontend.openai.validation import check_chat, check_completion, stop_strings

HI = [Message(role="user", content="hi")]


def chat_refusal(**fields: Any) -> RequestError:
    with pytest.raises(RequestError) as caught:
        check_chat(ChatRequest(model="m", **{"messages": HI, **fields}), choices_max=8)
    return caught.value


def completion_refusal(**fields: Any) -> RequestError:
    with pytest.raises(RequestError) as caught:
        check_completion(CompletionRequest(model="m", **{"prompt": "hi", **fields}), choices_max=8)
    return caught.value


@pytest.mark.parametrize(
    ("field", "value", "bounds"),
    [
        ("max_tokens", -5, ">= 1"),
        ("max_tokens", 0, ">= 1"),
        ("max_completion_tokens", -1, ">= 1"),
        ("n", 0, ">= 1 and <= 8"),
        ("n", 9, ">= 1 and <= 8"),
        ("temperature", -0.1, ">= 0 and <= 2"),
        ("temperature", 2.1, ">= 0 and <= 2"),
        ("top_p", 0.0, "> 0 and <= 1"),
        ("top_p", 1.5, "> 0 and <= 1"),
        ("presence_penalty", -3.0, ">= -2 and <= 2"),
        ("frequency_penalty", 3.0, ">= -2 and <= 2"),
        ("repetition_penalty", 0.0, "> 0 and <= 10"),
        ("min_p", 1.1, ">= 0 and <= 1"),
        ("top_k", -2, ">= -1 and <= 2147483647"),
        ("top_k", 1 << 63, ">= -1 and <= 2147483647"),
        ("min_tokens", -1, ">= 0"),
        ("priority", 1001, ">= -1000 and <= 1000"),
        ("seed", 1 << 63, ">= "),
    ],
)
def test_a_value_out_of_range_is_refused_with_the_range(field: str, value: float, bounds: str) -> None:
    error = chat_refusal(**{field: value})
    assert error.param == field
    assert f"{field}: must be {bounds}" in error.message
    assert f"got {value}" in error.message
    assert error.http_status == 400


def test_bounds_themselves_are_allowed() -> None:
    for fields in (
        {"temperature": 0.0},
        {"temperature": 2.0},
        {"top_p": 1.0},
        {"n": 8},
        {"top_k": -1},
        {"max_tokens": 1},
    ):
        check_chat(ChatRequest(model="m", messages=HI, **fields), choices_max=8)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("functions", [{"name": "f"}]),
        ("verbosity", "high"),
        ("modalities", ["text", "audio"]),
    ],
)
def test_what_is_not_served_is_refused_by_name(field: str, value: Any) -> None:
    error = chat_refusal(**{field: value})
    assert error.param == field
    assert "not supported" in error.message


def test_what_is_not_served_may_ask_for_nothing() -> None:
    check_chat(
        ChatRequest(
            model="m",
            messages=HI,
            logit_bias={},
            tools=[],
            tool_choice="auto",
            functions=[{"name": "f"}],
            function_call="none",
        ),
        choices_max=8,
    )
    check_completion(
        CompletionRequest(model="m", prompt="x", echo=False, best_of=1, suffix=""), choices_max=8
    )


def test_completions_refuse_suffix() -> None:
    assert completion_refusal(suffix="end").param == "suffix"


def test_the_best_are_of_at_least_as_many_as_are_given() -> None:
    assert "must be >= 3 and <= 8, got 2" in completion_refusal(n=3, best_of=2).message
    assert "must be >= 1 and <= 8, got 9" in completion_refusal(best_of=9).message
    assert completion_refusal(best_of=2, stream=True).param == "best_of"
    assert "are 10 choices, at most 8" in completion_refusal(prompt=["a"] * 2, best_of=5).message
    check_completion(CompletionRequest(model="m", prompt="x", n=2, best_of=2, stream=True), choices_max=8)
    check_completion(CompletionRequest(model="m", prompt="x", n=2, best_of=8), choices_max=8)


@pytest.mark.parametrize(
    ("prompt", "said", "field"),
    [
        ("text", {"num_emitted": 0}, "continuation"),
        ([[1, 2]], {"num_emitted": 1}, "continuation"),
        ([1, 2], {"num_emitted": 2}, "continuation.num_emitted"),
        ([1, 2], {"num_emitted": -1}, "continuation.num_emitted"),
        ([1, 2], {"num_emitted": 1, "choice": 8}, "continuation.choice"),
    ],
)
def test_continuations_are_checked(prompt, said, field) -> None:
    assert completion_refusal(prompt=prompt, continuation=ContinuationBody(**said)).param == field


@pytest.mark.parametrize(("field", "value"), [("echo", True), ("prompt_logprobs", 1), ("stop", "x")])
def test_a_continuation_has_no_text_before_it(field, value) -> None:
    said = ContinuationBody(num_emitted=1)
    assert completion_refusal(prompt=[1, 2], continuation=said, **{field: value}).param == field


def test_contradictions_are_refused() -> None:
    assert chat_refusal(max_tokens=3, max_completion_tokens=4).param == "max_tokens"
    check_chat(ChatRequest(model="m", messages=HI, max_tokens=3, max_completion_tokens=3), choices_max=8)
    assert chat_refusal(top_logprobs=3).param == "top_logprobs"
    check_chat(ChatRequest(model="m", messages=HI, logprobs=False, top_logprobs=0), choices_max=8)
    assert chat_refusal(top_logprobs=21, logprobs=True).param == "top_logprobs"
    assert (
        chat_refusal(continue_final_message=True, add_generation_prompt=True).param
        == "continue_final_message"
    )


def test_a_message_that_goes_on_is_the_assistants() -> None:
    assert "role 'assistant'" in chat_refusal(continue_final_message=True).message
    said = [*HI, Message(role="assistant", content="well")]
    check_chat(ChatRequest(model="m", messages=said, continue_final_message=True), choices_max=8)


def test_what_changes_nothing_is_accepted() -> None:
    for fields in (
        {"stream_options": StreamOptions(include_usage=True)},
        {"messages": [*HI, Message(role="assistant", content=None)]},
        {"messages": [*HI, Message(role="assistant", content=[ContentPart(type="refusal", refusal="no")])]},
        {"reasoning_effort": "high"},
        {"verbosity": "medium"},
    ):
        check_chat(ChatRequest(model="m", **{"messages": HI, **fields}), choices_max=8)


@pytest.mark.parametrize("name", ["messages", "tools", "add_generation_prompt", "bos_token", "strftime_now"])
def test_what_the_server_gives_to_a_template_is_not_the_requests_to_set(name: str) -> None:
    error = chat_refusal(chat_template_kwargs={"enable_thinking": False, name: 1})
    assert error.param == f"chat_template_kwargs.{name}"
    assert error.message == f"chat_template_kwargs.{name}: is not the request's to set; leave it out"


def test_other_variables_of_a_template_are_allowed() -> None:
    arguments = {"enable_thinking": False, "documents": []}
    check_chat(ChatRequest(model="m", messages=HI, chat_template_kwargs=arguments), choices_max=8)


def test_stop_strings_are_bounded() -> None:
    assert stop_strings(ChatRequest(model="m", messages=HI, stop="x")) == ("x",)
    assert stop_strings(ChatRequest(model="m", messages=HI)) == ()
    assert "got 17" in chat_refusal(stop=["x"] * 17).message
    assert "string 1 has 0 characters" in chat_refusal(stop=["x", ""]).message
    assert chat_refusal(stop="x" * 2000).param == "stop"


def test_cache_salts_are_bounded() -> None:
    assert chat_refusal(cache_salt="").param == "cache_salt"
    assert "got 300" in chat_refusal(cache_salt="x" * 300).message


def test_messages_are_checked_one_by_one() -> None:
    assert chat_refusal(messages=[]).param == "messages"
    assert chat_refusal(messages=[*HI, Message(role="robot", content="x")]).param == "messages[1].role"
    assert chat_refusal(messages=[Message(role="user")]).param == "messages[0].content"
    image = Message(
        role="user", content=[ContentPart(type="text", text="see"), ContentPart(type="image_url")]
    )
    error = chat_refusal(messages=[image])
    assert error.param == "messages[0].content[1].image_url"
    assert "required, but missing" in error.message
    error = chat_refusal(messages=[Message(role="user", content=[ContentPart(type="drawing")])])
    assert error.param == "messages[0].content[0].type"
    assert "'drawing' is not supported" in error.message
    empty = Message(role="user", content=[ContentPart(type="text")])
    assert chat_refusal(messages=[empty]).param == "messages[0].content[0].text"


def test_prompts_are_of_one_kind_and_not_too_many() -> None:
    assert completion_refusal(prompt=[]).param == "prompt"
    assert "mixes strings and token ids" in completion_refusal(prompt=["a", 1]).message
    assert "are 10 choices, at most 8" in completion_refusal(prompt=["a"] * 5, n=2).message
    check_completion(CompletionRequest(model="m", prompt=[1] * 100, n=8), choices_max=8)


def test_functions_of_the_old_api_are_refused_unless_they_must_not_be_called() -> None:
    check_chat(
        ChatRequest(model="m", messages=HI, functions=[{"name": "f"}], function_call="none"), choices_max=8
    )
    assert chat_refusal(functions=[{"name": "f"}], tool_choice="none").param == "functions"


@pytest.mark.parametrize(
    ("field", "value", "text"),
    [
        ("logit_bias", {"a": 1}, "expected token ids as keys, got 'a'"),
        ("logit_bias", {"5": 101}, "got 101 for token 5"),
        ("logit_bias", {str(index): 1 for index in range(1025)}, "at most 1024"),
        ("allowed_token_ids", [], "must not be empty"),
        ("bad_words", ["a", "  "], "word 1 has 2 characters"),
        ("bad_words", ["x" * 129], "expected 1 to 128"),
    ],
)
def test_limits_of_tokens_are_checked(field: str, value: Any, text: str) -> None:
    with pytest.raises(RequestError, match=text) as caught:
        check_chat(ChatRequest(model="m", messages=HI, **{field: value}), 8)
    assert caught.value.param == field


def test_no_tokens_may_be_asked_of_completions_only() -> None:
    assert chat_refusal(max_tokens=0).param == "max_tokens"
    check_completion(CompletionRequest(model="m", prompt="x", echo=True, max_tokens=0), choices_max=8)
    assert completion_refusal(max_tokens=-1).param == "max_tokens"


def test_prompt_logprobs_are_few_and_not_streamed() -> None:
    assert completion_refusal(prompt_logprobs=21).param == "prompt_logprobs"
    assert completion_refusal(prompt_logprobs=-1).param == "prompt_logprobs"
    assert "leave out stream" in chat_refusal(prompt_logprobs=1, stream=True).message
    check_chat(ChatRequest(model="m", messages=HI, prompt_logprobs=0), choices_max=8)
