"""Bodies of the OpenAI API: what is refused, by which field and in which words, and what is taken."""

import json
from enum import StrEnum
from typing import Any

import msgspec
import pytest

from penstock.core.errors import EngineError, Overloaded, RequestError
from penstock.core.json_text import encode_json as encode
from penstock.frontend.apis import decoding
from penstock.frontend.apis.bodies import (
    AgentHintsBody,
    ChatRequest,
    CompletionRequest,
    ContinuationBody,
    SessionBody,
    agent_options,
    parse_chat,
    parse_completion,
)
from penstock.frontend.apis.checks import check_chat, check_completion, stop_strings, structured_of
from penstock.frontend.apis.decoding import body_error
from penstock.frontend.errors import UnknownModelError, error_answer

HI = [{"role": "user", "content": "hi"}]
ASSISTANT = {"role": "assistant", "content": "well"}
WEATHER = {"type": "function", "function": {"name": "weather"}}
CHOICES_MAX = 8


def chat(**fields: Any) -> ChatRequest:
    request = parse_chat(json.dumps({"model": "m", "messages": HI, **fields}).encode())
    check_chat(request, CHOICES_MAX)
    structured_of(request)
    agent_options(request)
    return request


def complete(**fields: Any) -> CompletionRequest:
    request = parse_completion(json.dumps({"model": "m", "prompt": "hi", **fields}).encode())
    check_completion(request, CHOICES_MAX)
    return request


@pytest.mark.parametrize(
    ("body", "says"),
    [
        (b"", "the body is empty; expected a JSON object"),
        (b'{"model": "m"', "the body is not valid JSON"),
        (b"\xef\xbb\xbf{}", "the body begins with a byte order mark"),
        (b'{"model": NaN}', "the body is not valid JSON"),
        (b'{"model": "\xff"}', "the body is not valid UTF-8"),
        (b"[]", "the body: expected object, got array"),
        (b'{"model":"m","messages":[],"tools":' + b"[" * 100_000, "the body is nested too deeply"),
    ],
)
def test_what_is_no_json_object_is_refused_without_a_field(body: bytes, says: str) -> None:
    with pytest.raises(RequestError) as caught:
        parse_chat(body)
    assert (says in caught.value.message, caught.value.param) == (True, None), caught.value.message


@pytest.mark.parametrize(
    ("sent", "read"),
    [
        (r"a\ud83d", "a\ufffd"), (r"\ude00a", "\ufffda"), (r"\uD83D\uD83D\uDE00", "\ufffd\U0001f600"),
        (r"\\ud83d", r"\ud83d"), (r"\\\ud83d", "\\\ufffd"), (r"\ud83d\ude00", "\U0001f600"),
    ],
)  # fmt: skip
def test_half_of_a_surrogate_pair_is_replaced_or_named(sent: str, read: str) -> None:
    body = b'{"model": "m", "messages": [{"role": "user", "content": "%b"}], "tools": [{"strict": true}]%b}'
    assert parse_chat(body % (sent.encode(), b"")).messages[0].content == read
    if "\ufffd" in read:
        with pytest.raises(RequestError, match="the body has half of a surrogate pair"):
            parse_chat(body % (sent.encode(), b', "strict": true'))


def allowed(mode: str, *names: str) -> dict[str, Any]:
    tools = [{"type": "function", "function": {"name": name}} for name in names]
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools}}


REFUSED_CHATS: list[tuple[dict[str, Any], str, str]] = [
    # of another type, or unknown
    ({"model": 1}, "model", "expected string, got integer 1"),
    ({"max_tokens": "5"}, "max_tokens", "expected integer or null, got string '5'"),
    ({"max_tokens": 4.5}, "max_tokens", "must be a whole number, got 4.5"),
    ({"stream": "yes"}, "stream", "expected boolean or null, got string"),
    ({"temperature": "hot"}, "temperature", "expected number or null, got string"),
    ({"stop": [1]}, "stop[0]", "expected string, got integer"),
    ({"messages": [{"content": "hi"}]}, "messages[0].role", "required, but missing"),
    ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content", "expected string or array or null"),
    ({"max_tokns": 5}, "max_tokns", "unknown field; did you mean 'max_tokens'?"),
    ({"zzz": 5}, "zzz", "zzz: unknown field"),
    ({"": 5}, "", "'': unknown field"),
    ({"stream_options": {"usage": True}}, "stream_options.usage", "unknown field"),
    # of other servers
    ({"skip_special_tokens": False}, "skip_special_tokens", "only true is served here, got false; leave it out"),
    ({"typical_p": 0.5}, "typical_p", "only 1 is served here, got 0.5; leave it out"),
    ({"best_of": [[7]]}, "best_of", "only 1 is served here, got an array; leave it out"),
    *(({name: value}, name, "not supported by this server") for name in ("think", "thinking", "reasoning") for value in (False, True)),
    ({"thinking_budget": 0}, "thinking_budget", "not supported by this server"),
    ({"thinking_token_budget": -1}, "thinking_token_budget", "must be >= 0, got -1"),
    ({"use_beam_search": True}, "use_beam_search", "not supported by this server; leave it out"),
    ({"truncate_prompt_tokens": 5}, "truncate_prompt_tokens", "not supported by this server; leave it out"),
    ({"functions": [{"name": "f"}]}, "functions", "not supported"),
    ({"functions": [{"name": "f"}], "tool_choice": "none"}, "functions", "not supported"),
    ({"verbosity": "loud"}, "verbosity", "must be one of low, medium, high, got 'loud'"),
    ({"background": True}, "background", "not supported by this server; leave it out"),
    ({"modalities": ["text", "audio"]}, "modalities", "not supported"),
    # out of range
    ({"max_tokens": 0}, "max_tokens", "must be >= 1, got 0"),
    ({"max_completion_tokens": -1}, "max_completion_tokens", "must be >= 1, got -1"),
    ({"n": 9}, "n", "must be >= 1 and <= 8, got 9"),
    ({"temperature": 2.1}, "temperature", "must be >= 0 and <= 2, got 2.1"),
    ({"top_p": -0.1}, "top_p", "must be >= 0 and <= 1, got -0.1"),
    ({"presence_penalty": -3.0}, "presence_penalty", "must be >= -2 and <= 2, got -3.0"),
    ({"frequency_penalty": 3.0}, "frequency_penalty", "must be >= -2 and <= 2, got 3.0"),
    ({"repetition_penalty": 0.0}, "repetition_penalty", "must be > 0 and <= 10, got 0.0"),
    ({"min_p": 1.1}, "min_p", "must be >= 0 and <= 1, got 1.1"),
    ({"top_k": -2}, "top_k", "must be >= -1 and <= 2147483647, got -2"),
    ({"min_tokens": -1}, "min_tokens", "must be >= 0, got -1"),
    ({"priority": 1001}, "priority", "must be >= -1000 and <= 1000, got 1001"),
    ({"seed": 1 << 63}, "seed", "must be >= "),
    ({"stop": ["x"] * 17}, "stop", "got 17"),
    ({"stop": ["x", ""]}, "stop", "string 1 has 0 characters"),
    ({"stop": "x" * 2000}, "stop", "string 0 has 2000 characters"),
    ({"cache_salt": ""}, "cache_salt", "must not be empty"),
    ({"cache_salt": "x" * 300}, "cache_salt", "got 300"),
    ({"logit_bias": {"a": 1}}, "logit_bias", "expected token ids as keys, got 'a'"),
    ({"logit_bias": {"5": 101}}, "logit_bias", "got 101.0 for token 5"),
    ({"logit_bias": {str(index): 1 for index in range(1025)}}, "logit_bias", "at most 1024"),
    ({"allowed_token_ids": []}, "allowed_token_ids", "must not be empty"),
    ({"bad_words": ["a", "  "]}, "bad_words", "word 1 has 2 characters"),
    ({"bad_words": ["x" * 129]}, "bad_words", "expected 1 to 128"),
    # contradictions
    ({"max_tokens": 3, "max_completion_tokens": 4}, "max_tokens", "contradicts max_completion_tokens"),
    ({"top_logprobs": 3}, "top_logprobs", "without logprobs"),
    ({"top_logprobs": 21, "logprobs": True}, "top_logprobs", "must be >= 0 and <= 20, got 21"),
    ({"continue_final_message": True, "add_generation_prompt": True}, "continue_final_message", "contradicts"),
    ({"continue_final_message": True}, "continue_final_message", "a last message of role 'assistant'"),
    ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs", "leave out stream"),
    # messages
    ({"messages": []}, "messages", "at least one message"),
    ({"messages": [*HI, {"role": "robot", "content": "x"}]}, "messages[1].role", "must be"),
    ({"messages": [{"role": "user"}]}, "messages[0].content", "required, but missing"),
    *(
        ({"messages": [*HI, ASSISTANT | {"tool_calls": [call]}]}, "messages[1].tool_calls[0].function.name", "name of the function that was called")
        for call in ({}, {"function": {}}, {"id": "a", "type": "function", "function": {"name": None}})
    ),
    ({"messages": [HI[0] | {"tool_calls": [{"function": {"name": "f"}}]}]}, "messages[0].tool_calls", "of role 'assistant'"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content[0].image_url", "required, but missing"),
    ({"messages": [{"role": "user", "content": [{"type": "drawing"}]}]}, "messages[0].content[0].type", "'drawing' is not supported"),
    ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0].text", "required, but missing"),
    *(
        ({"chat_template_kwargs": {"a": 1, name: 1}}, f"chat_template_kwargs.{name}", "is not the request's to set; leave it out")
        for name in ("messages", "tools", "add_generation_prompt", "bos_token", "strftime_now")
    ),
    # tools
    ({"tools": [{"type": "functoin", "function": {"name": "f"}}]}, "tools[0].type", "got 'functoin'"),
    ({"tools": [{"type": "custom", "custom": {"name": "f"}}]}, "tools[0].type", "must be 'function'"),
    ({"tools": [{"name": "f"}]}, "tools[0].type", "required, but missing"),
    ({"tools": [{"type": "web_search"}], "tool_choice": {"type": "web_search"}}, "tool_choice", "runs no tools itself, got 'web_search'"),
    ({"tools": [{"type": "web_search"}], "tool_choice": "required"}, "tool_choice", "needs tools of type 'function'"),
    ({"tools": [{"type": "function"}]}, "tools[0].function", "required, but missing"),
    ({"tools": [{"type": "function", "function": {"name": ""}}]}, "tools[0].function.name", "1 to 256"),
    ({"tools": [{"type": "function", "function": {"name": "f", "parameters": 5}}]}, "tools[0].function.parameters", "must be an object"),
    ({"tools": [WEATHER] * 600}, "tools", "at most 512 are allowed, got 600"),
    ({"tools": [WEATHER], "tool_choice": "always"}, "tool_choice", "must be one of none, auto, required"),
    ({"tools": [], "tool_choice": "required"}, "tool_choice", "needs tools"),
    ({"tools": [WEATHER], "tool_choice": {"type": "allowed_tools"}}, "tool_choice", "mode 'auto' or 'required'"),
    ({"tools": [WEATHER], "tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": []}}}, "tool_choice", "mode 'auto' or 'required'"),
    ({"tools": [WEATHER], "tool_choice": allowed("auto", "x")}, "tool_choice", "must be one of 'weather', got 'x'"),
    ({"tools": [WEATHER], "tool_choice": allowed("required")}, "tool_choice", "needs tools"),
    ({"tools": [WEATHER], "tool_choice": {"type": "function", "function": {"name": "x"}}}, "tool_choice", "must be one of 'weather', got 'x'"),
    ({"tools": [WEATHER], "tool_choice": "required", "response_format": {"type": "json_object"}}, "tool_choice", "required calls contradict response_format"),
    # formats
    ({"response_format": {"type": "xml"}}, "response_format", "must be one of text, json_object, json_schema, got 'xml'"),
    ({"response_format": {"type": "json_schema"}}, "response_format", "json_schema.schema: must be an object"),
    ({"response_format": {"type": "json_schema", "json_schema": {"schema": {"enum": ["x" * (1 << 20)]}}}}, "response_format", "at most 1048576 are allowed"),
    ({"structured_outputs": {}}, "structured_outputs", "got none"),
    ({"structured_outputs": {"json": {}, "regex": "a"}}, "structured_outputs", "got json, regex"),
    ({"structured_outputs": {"regex": "a"}, "response_format": {"type": "json_object"}}, "structured_outputs", "contradicts response_format"),
    ({"guided_regex": "a", "structured_outputs": {"regex": "b"}}, "guided_regex", "contradicts"),
    # sessions and hints
    ({"session": {"id": "x" * 257}}, "session.id", "session.id: "),
    ({"session": {"id": "a", "action": ""}}, "session.action", "session.action: "),
    ({"session": {"id": "a", "action": "open", "ttl_s": 0}}, "session.ttl_s", "session.ttl_s: "),
    ({"session": {"id": "a", "ttl_s": 5}}, "session.ttl_s", "session.ttl_s: "),
    ({"session": {"id": "a", "ephemeral": True}}, "session.ephemeral", "session.ephemeral: "),
    ({"session": {"id": "a"}, "nvext": {"session_control": {"session_id": "a"}}}, "nvext.session_control", "nvext.session_control: "),
    ({"nvext": {"session_control": {"session_id": ""}}}, "nvext.session_control.session_id", "session_id: "),
    ({"nvext": {"session_control": {"session_id": "a", "action": "x"}}}, "nvext.session_control.action", "action: "),
    ({"nvext": {"session_control": {"session_id": "a", "timeout": -1}}}, "nvext.session_control.timeout", "timeout: "),
    ({"nvext": {"annotations": ["query_instance_id:7"]}}, "nvext.annotations", "nvext.annotations: "),
    ({"nvext": {"token_data": [1]}}, "nvext.token_data", "nvext.token_data: "),
    ({"nvext": {"top_k": 5}, "top_k": 6}, "nvext.top_k", "nvext.top_k: "),
    ({"nvext": {"ignore_eos": "yes"}}, "nvext.ignore_eos", "nvext.ignore_eos: "),
    ({"agent_hints": {"priority": 1001}}, "agent_hints.priority", "agent_hints.priority: "),
    ({"agent_hints": {"osl": 1 << 31}}, "agent_hints.osl", "agent_hints.osl: "),
    ({"agent_hints": {}, "nvext": {"agent_hints": {}}}, "nvext.agent_hints", "nvext.agent_hints: "),
    ({"kv_retention": {}}, "kv_retention", "kv_retention: "),
    ({"kv_retention": {"priority": 8}}, "kv_retention.priority", "kv_retention.priority: "),
    ({"kv_retention": {"ttl_s": 0}}, "kv_retention.ttl_s", "kv_retention.ttl_s: "),
]  # fmt: skip
REFUSED_COMPLETIONS: list[tuple[dict[str, Any], str, str]] = [
    ({"suffix": "end"}, "suffix", "not supported"),
    ({"max_tokens": -1}, "max_tokens", "must be >= 0, got -1"),
    ({"n": 3, "best_of": 2}, "best_of", "must be >= 3 and <= 8, got 2"),
    ({"best_of": 9}, "best_of", "must be >= 1 and <= 8, got 9"),
    ({"best_of": 2, "stream": True}, "best_of", "leave out stream or best_of"),
    ({"prompt": ["a"] * 2, "best_of": 5}, "prompt", "are 10 choices, at most 8"),
    ({"prompt": ["a"] * 5, "n": 2}, "prompt", "are 10 choices, at most 8"),
    ({"prompt": []}, "prompt", "must not be an empty list"),
    ({"prompt": ["a", 1]}, "prompt", "mixes strings and token ids"),
    ({"prompt": [True]}, "prompt[0]", "prompt["),
    ({"prompt_logprobs": 21}, "prompt_logprobs", "must be >= 0 and <= 20, got 21"),
    ({"prompt": "text", "continuation": {"num_emitted": 0}}, "continuation", "continuation: "),
    ({"prompt": [[1, 2]], "continuation": {"num_emitted": 1}}, "continuation", "continuation: "),
    ({"prompt": [1, 2], "continuation": {"num_emitted": 2}}, "continuation.num_emitted", "num_emitted: "),
    ({"prompt": [1, 2], "continuation": {"num_emitted": -1}}, "continuation.num_emitted", "num_emitted: "),
    ({"prompt": [1, 2], "continuation": {"num_emitted": None}}, "continuation.num_emitted", "expected integer, got null"),
    ({"prompt": [1, 2], "continuation": {"num_emitted": 1, "choice": 8}}, "continuation.choice", "choice: "),
    *(
        ({"prompt": [1, 2], "continuation": {"num_emitted": 1}} | before, next(iter(before)), "")
        for before in ({"echo": True}, {"prompt_logprobs": 1}, {"stop": "x"})
    ),
]  # fmt: skip


@pytest.mark.parametrize(("fields", "param", "says"), REFUSED_CHATS)
def test_a_wrong_chat_is_refused_by_its_field(fields: dict[str, Any], param: str, says: str) -> None:
    with pytest.raises(RequestError) as caught:
        chat(**fields)
    assert (caught.value.param, caught.value.http_status) == (param, 400), caught.value.message
    assert says in caught.value.message


@pytest.mark.parametrize(("fields", "param", "says"), REFUSED_COMPLETIONS)
def test_a_wrong_completion_is_refused_by_its_field(fields: dict[str, Any], param: str, says: str) -> None:
    with pytest.raises(RequestError) as caught:
        complete(**fields)
    assert (caught.value.param, caught.value.http_status) == (param, 400), caught.value.message
    assert says in caught.value.message


@pytest.mark.parametrize("value", ["[" * 900 + "]" * 900, "7" * 5000, '"' + "a" * 100_000 + '"'])
def test_a_value_of_any_size_is_refused_in_few_words(value: str) -> None:
    body = (
        f'{{"model": "m", "messages": [{{"role": "user", "content": "a"}}], "skip_special_tokens": {value}}}'
    )
    with pytest.raises(RequestError) as caught:
        parse_chat(body.encode())
    assert len(caught.value.message) < 200


def test_numbers_out_of_range_are_refused() -> None:
    with pytest.raises(RequestError, match="temperature: number out of range"):
        parse_chat(b'{"model": "m", "messages": [], "temperature": 1e999}')


def test_as_many_levels_as_the_error_allows_are_taken() -> None:
    deep = '{"model": "m", "messages": [{"role": "user", "content": "a"}], "metadata": %s}'
    assert parse_chat((deep % ("[" * 499 + "]" * 499)).encode()).model == "m"
    with pytest.raises(RequestError, match="nested too deeply; expected at most 500 levels"):
        parse_chat((deep % ("[" * 2000 + "]" * 2000)).encode())
    for text in ("[" * 600, r"\"[" * 600, "][" * 600):  # brackets of a text are no levels
        assert parse_chat((deep % json.dumps(text)).encode()).model == "m"
    wide = "[" + ",".join(["[]"] * 2000) + "]"
    assert parse_chat((deep % wide).encode()).model == "m"
    with pytest.raises(RequestError, match="nested too deeply"):
        parse_chat((deep % ('["]",' * 501 + "1" + "]" * 501)).encode())
    for depth in range(700, 1000):  # a value may be too deep to be shown though the decoder reads it
        body = b'{"model": "m", "messages": 7, "deep": ' + b"[" * depth + b"]" * depth + b"}"
        with pytest.raises(RequestError):
            parse_chat(body)


class Colour(StrEnum):
    RED = "red"
    BLUE = "blue"


class Paint(msgspec.Struct):
    colour: Colour


def test_the_values_of_an_enum_are_named() -> None:
    body = b'{"colour": "green"}'
    with pytest.raises(msgspec.DecodeError) as caught:
        msgspec.json.decode(body, type=Paint)
    error = body_error(caught.value, body, Paint)
    assert (error.message, error.param) == ("colour: must be one of 'red', 'blue', got 'green'", "colour")


@pytest.mark.parametrize(
    "fields",
    [
        {"tools": [WEATHER, {"type": "web_search"}], "tool_choice": allowed("required", "weather")},
        {"prediction": {"type": "content", "content": "hi"}, "verbosity": "high"},
        {"temperature": 0.0, "top_p": 0.0, "n": 8, "top_k": -1, "max_tokens": 1},
        {"temperature": 2.0, "max_tokens": 3, "max_completion_tokens": 3, "logprobs": False, "top_logprobs": 0},
        {"logit_bias": {}, "tools": [], "tool_choice": "auto", "functions": [{"name": "f"}], "function_call": "none"},
        {"user": "u", "metadata": {"a": "b"}, "store": True, "service_tier": "auto", "verbosity": "medium"},
        {"messages": [*HI, ASSISTANT], "continue_final_message": True},
        {"messages": [*HI, {"role": "assistant", "content": None}], "stream_options": {"include_usage": True}},
        {"messages": [*HI, ASSISTANT | {"refusal": None, "annotations": [], "audio": None}]},
        {"messages": [*HI, {"role": "assistant", "content": [{"type": "refusal", "refusal": "no"}]}]},
        {"chat_template_kwargs": {"enable_thinking": False, "documents": []}, "reasoning_effort": "high"},
        {"prompt_logprobs": 0},
    ],
)  # fmt: skip
def test_what_is_sound_or_changes_nothing_is_taken(fields: dict[str, Any]) -> None:
    assert chat(**fields).model == "m"


@pytest.mark.parametrize(
    "fields",
    [
        *({"prompt": prompt} for prompt in ("text", ["a", "b"], [1, 2], [[1], [2, 3]])),
        {"echo": False, "best_of": 1, "suffix": ""},
        {"n": 2, "best_of": 2, "stream": True},
        {"n": 2, "best_of": 8},
        {"prompt": [1] * 100, "n": 8},
        {"echo": True, "max_tokens": 0},
    ],
)
def test_sound_completions_are_taken(fields: dict[str, Any]) -> None:
    assert complete(**fields).prompt == fields.get("prompt", "hi")


def test_one_stop_string_is_a_list_of_one() -> None:
    assert (stop_strings(chat(stop="x")), stop_strings(chat())) == (("x",), ())


@pytest.fixture
def named(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    names: set[str] = set()
    monkeypatch.setattr(decoding, "_named", names)
    return names


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("guided_decoding_disable_fallback", None),
        ("use_beam_search", False),
        ("new_thing", 0),
        ("new_thing", ""),
        ("new_thing", []),
        ("new_thing", {}),
        ("skip_special_tokens", True),
        ("length_penalty", 1.5),
        ("rid", "r-1"),
        ("best_of", 1),
        ("typical_p", 1.0),
        ("client_metadata", {"x-codex-installation-id": "8f"}),
        ("context_management", [{"type": "compaction", "compact_threshold": 1000}]),
        ("prompt_cache_options", {"ttl": "1h"}),
    ],
)
def test_an_unknown_field_without_effect_is_taken_and_named(named: set[str], field: str, value: Any) -> None:
    assert chat(**{field: value}, max_tokens=3).max_tokens == 3
    assert named == {field}
    with pytest.raises(RequestError) as caught:
        chat(**{field: value}, strict=True)
    assert caught.value.param == field


def test_fields_of_nested_objects_may_be_unknown_too_and_only_so_many_are_named(named: set[str]) -> None:
    options = {"include_usage": True, "later": None, "other": False}
    assert chat(stream=True, stream_options=options, nvext={"seen": []}).stream_options.include_usage  # type: ignore[union-attr]
    assert named == {"stream_options.later", "stream_options.other", "nvext.seen"}
    chat(**{f"odd{index}": None for index in range(1000)})
    assert len(named) == decoding._NAMED_MAX


def test_whole_numbers_may_be_written_as_floats_and_null_left_out_at_any_depth(named: set[str]) -> None:
    body = chat(max_tokens=4.0, top_k=50.0, seed=1.0, temperature=1.0)
    assert (body.max_tokens, body.top_k, body.seed, body.temperature) == (4, 50, 1, 1.0)
    completion = complete(
        prompt=[5.0, 6],
        stop_token_ids=[3.0],
        continuation={"num_emitted": 1.0, "choice": None},
        agent_hints={"osl": 4.0, "speculative_prefill": None},
        session={"id": "s", "ephemeral": None},
    )
    assert (completion.prompt, completion.stop_token_ids) == ([5, 6], [3])
    assert (completion.continuation, completion.session) == (
        ContinuationBody(num_emitted=1),
        SessionBody(id="s"),
    )
    assert completion.agent_hints == AgentHintsBody(osl=4)
    assert named == set()


def test_errors_have_the_apis_shape() -> None:
    def shape(error: Exception) -> dict[str, Any]:
        return json.loads(encode(error_answer(error)))["error"]

    assert shape(RequestError("n: bad", param="n")) == {
        "message": "n: bad", "type": "invalid_request_error", "param": "n", "code": None,
    }  # fmt: skip
    assert shape(UnknownModelError("no", param="model"))["code"] == "model_not_found"
    assert shape(EngineError("broke"))["code"] == "engine_error"
    error = Overloaded("no")
    for status, kind in ((404, "invalid_request_error"), (429, "rate_limit_error"), (503, "server_error")):
        error.http_status = status
        assert shape(error)["type"] == kind
