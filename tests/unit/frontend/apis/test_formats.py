"""Chats' tools, formats and agents' hints as engines get them, and answers in the API's shapes."""

import json
from typing import Any

import msgspec
import pytest
from tokenizers import Tokenizer

from penstock.core.errors import RequestError
from penstock.core.json_text import encode_json as encode
from penstock.core.types.requests import KvRetention, TokenLogprob
from penstock.core.wire import pack_tokens
from penstock.frontend.apis.bodies import (
    AgentOptions,
    ChatRequest,
    CompletionRequest,
    Message,
    agent_options,
    parse_chat,
    parse_completion,
)
from penstock.frontend.apis.chat import EventStream, WholeAnswer
from penstock.frontend.apis.checks import check_tools, offered_tools, structured_of
from penstock.frontend.apis.dialect import Envelope, PromptTokensDetails, Usage, names_of
from penstock.frontend.apis.responses_body import parse_responses
from penstock.frontend.errors import ClientFields
from penstock.frontend.text.answer import PromptPart, TextEvent, TokenText
from penstock.frontend.text.tokens import Detokenizer
from tests.support.tokenizer import tiny_tokenizer_json


def read(**fields) -> AgentOptions:
    return agent_options(parse_completion(encode({"model": "m", "prompt": "hi", **fields})))


def test_a_body_without_them_says_nothing():
    assert read() == read(nvext={}) == read(agent_hints={}) == AgentOptions()


def test_a_session_has_a_name_and_the_rest_is_checked_alone():
    expected = AgentOptions("a")
    assert read(session={"id": "a"}) == expected
    assert read(session={"id": "a", "action": "open", "ttl_s": 1}) == expected
    assert read(session={"id": "a", "action": "close", "ephemeral": True}) == expected
    assert read(session={"id": "a"}, agent_hints={"speculative_prefill": True}) == expected


def test_the_peers_names_say_the_same():
    peer = {
        "session_control": {"session_id": "a", "action": "open", "timeout": 30},
        "agent_hints": {"priority": 5},
    }
    assert read(nvext=peer) == AgentOptions("a", priority=5, retention=KvRetention(priority=5))
    assert read(nvext={"session_control": {"session_id": "a"}, "annotations": ["x"]}) == AgentOptions("a")


@pytest.mark.parametrize(
    ("parse", "about"),
    [
        (parse_completion, {"prompt": "hi"}),
        (parse_chat, {"messages": [{"role": "user", "content": "hi"}]}),
        (lambda body: parse_responses(body).request, {"input": "hi"}),
    ],
    ids=["completion", "chat", "response"],
)
def test_sampling_by_the_peers_names_is_that_of_the_body(parse, about):
    peer = {"ignore_eos": True, "top_k": 7, "repetition_penalty": 1.2, "guided_choice": ["a"]}
    request = parse(encode({"model": "m", "top_k": 7, "nvext": peer | {"greed_sampling": True}, **about}))
    assert {name: getattr(request, name) for name in peer} == peer
    assert request.temperature == 0


def test_retention_is_said_by_itself_or_by_the_requests_priority():
    assert read(kv_retention={"priority": -2}).retention == KvRetention(priority=-2)
    assert read(kv_retention={"ttl_s": 90}).retention == KvRetention(priority=1, ttl_s=90)
    assert read(agent_hints={"priority": -1000}).retention == KvRetention(priority=-8)
    both = read(agent_hints={"priority": 3}, kv_retention={"priority": 0, "ttl_s": 9})
    assert (both.priority, both.retention) == (3, KvRetention(priority=0, ttl_s=9))


def test_the_fields_reach_an_encoded_body():
    body = msgspec.convert(
        {"model": "m", "prompt": "", "session": {"id": "a", "action": "open"}}, CompletionRequest
    )
    again = msgspec.msgpack.decode(msgspec.msgpack.encode(body), type=CompletionRequest)
    assert agent_options(again).session == "a"


SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}


def structured(**fields: Any) -> Any:
    packed = structured_of(ChatRequest(model="m", messages=[], **fields))
    return None if packed is None else json.loads(packed)


def test_formats_become_constraints() -> None:
    assert structured() is None
    assert structured(response_format={"type": "text"}) is None
    assert structured(response_format={"type": "json_object"}) == {"json_object": True}
    assert structured(response_format={"type": "json_object", "schema": SCHEMA}) == {"json": SCHEMA}
    bare = {"properties": {"a": {"type": "integer"}}}
    assert structured(response_format={"type": "json_object", "schema": bare}) == {"json": SCHEMA}
    named = {"type": "json_schema", "json_schema": {"name": "x", "strict": True, "schema": SCHEMA}}
    assert structured(response_format=named) == {"json": SCHEMA}


def test_vllms_own_field_is_passed_on() -> None:
    outputs = {"regex": "[a-z]+", "disable_any_whitespace": True}
    assert structured(structured_outputs=outputs) == outputs
    assert structured(structured_outputs=outputs, response_format={"type": "text"}) == outputs
    assert structured(structured_outputs=outputs | {"json_object": False}) == outputs
    for nothing in ({}, {"json": None, "regex": None, "disable_any_whitespace": True}):
        assert structured(structured_outputs={"json_object": False} | nothing) is None


@pytest.mark.parametrize("kind", ["path", "password", "binary", "int32", "x-ours"])
def test_a_format_that_no_grammar_knows_annotates(kind: str) -> None:
    told = {"type": "string", "format": "date"}
    schema = {
        "type": "object",
        "properties": {"format": {"format": kind}, "a": told, "b": {"anyOf": [{"items": {"format": kind}}]}},
        "default": {"format": kind},
    }
    kept = {
        "type": "object",
        "properties": {"format": {}, "a": told, "b": {"anyOf": [{"items": {}}]}},
        "default": {"format": kind},
    }
    assert structured(response_format={"type": "json_object", "schema": schema}) == {"json": kept}
    assert structured(structured_outputs={"json": json.dumps(schema)}) == {"json": kept}
    tool = {"type": "function", "function": {"name": "f", "parameters": schema}}
    named = {"type": "function", "function": {"name": "f"}}
    assert structured(tools=[tool], tool_choice=named) == {"json": kept}


@pytest.mark.parametrize(
    ("kind", "value"),
    [("json", SCHEMA), ("json", "{}"), ("regex", "a+"), ("choice", ["a"]), ("grammar", "root ::= x")],
)
def test_older_names_are_taken(kind: str, value: Any) -> None:
    assert structured(**{f"guided_{kind}": value}) == {kind: value}
    with pytest.raises(RequestError, match=f"guided_{kind}: contradicts"):
        structured(**{f"guided_{kind}": value}, structured_outputs={"regex": "b"})


CITY = {
    "type": "object",
    "properties": {"city": {"$ref": "#/$defs/name"}},
    "$defs": {"name": {"type": "string"}},
}
TOOLS = [
    {"type": "function", "function": {"name": "weather", "parameters": CITY}},
    {"type": "function", "function": {"name": "now"}},
]
NOW = {"type": "function", "function": {"name": "now"}}


def request(**fields: Any) -> ChatRequest:
    return ChatRequest(model="m", messages=[Message(role="user", content="hi")], **{"tools": TOOLS, **fields})


def test_tools_that_may_not_be_called_are_not_shown() -> None:
    for choice, shown in (("none", []), ("auto", TOOLS), (None, TOOLS), (NOW, TOOLS)):
        check_tools(request(tool_choice=choice))
        assert offered_tools(request(tool_choice=choice)) == shown


NOTHING = {"type": "object", "properties": {}, "additionalProperties": False}


@pytest.mark.parametrize(
    "parameters", [None, {}, {"type": "object", "properties": {}}, {"properties": {}, "required": []}]
)
def test_a_tool_that_names_no_parameters_takes_none(parameters: Any) -> None:
    tools = [{"type": "function", "function": {"name": "now", "parameters": parameters}}]
    named = structured_of(request(tools=tools, tool_choice=NOW)) or b""
    assert msgspec.json.decode(named)["json"] == NOTHING
    required = structured_of(request(tools=tools, tool_choice="required")) or b""
    assert msgspec.json.decode(required)["json"]["$defs"]["0"] == NOTHING


def test_required_calls_constrain_the_engine() -> None:
    assert structured_of(request()) is None
    assert structured_of(request(tool_choice="none")) is None
    named = structured_of(request(tool_choice=NOW))
    assert named is not None
    assert msgspec.json.decode(named)["json"] == NOTHING
    required = structured_of(request(tool_choice="required", parallel_tool_calls=False))
    assert required is not None
    schema = msgspec.json.decode(required)["json"]
    assert (schema["type"], schema["minItems"], schema["maxItems"]) == ("array", 1, 1)
    assert schema["$defs"]["0"]["$defs"] == CITY["$defs"]
    assert [option["properties"]["name"] for option in schema["items"]["anyOf"]] == [
        {"const": "weather"},
        {"const": "now"},
    ]
    assert (
        "maxItems" not in msgspec.json.decode(structured_of(request(tool_choice="required")) or b"")["json"]
    )


def test_definitions_of_one_name_stay_those_of_their_tool() -> None:
    def tool(name: str, **schema: Any) -> dict[str, Any]:
        return {"type": "function", "function": {"name": name, "parameters": {"type": "object"} | schema}}

    tools = [
        tool("a", **{"$defs": {"v": {"type": "string"}}}, properties={"v": {"$ref": "#/$defs/v"}}),
        tool("b", definitions={"v": {}}, properties={"v": {"$ref": "#/definitions/v"}, "default": {"$ref": "#"}}),
        tool("c", properties={"v": {"const": {"$ref": "#"}}, "w": {"$ref": "https://x"}}, **{"$defs": 5}),
    ]  # fmt: skip
    required = structured_of(request(tools=tools, tool_choice="required"))
    assert required is not None
    schema = msgspec.json.decode(required)["json"]
    assert [option["properties"]["parameters"] for option in schema["items"]["anyOf"]] == [
        {"$ref": f"#/$defs/{number}"} for number in range(3)
    ]
    defined = [schema["$defs"][str(number)]["properties"] for number in range(3)]
    assert defined == [
        {"v": {"$ref": "#/$defs/0/$defs/v"}},
        {"v": {"$ref": "#/$defs/1/definitions/v"}, "default": {"$ref": "#/$defs/1"}},
        {"v": {"const": {"$ref": "#"}}, "w": {"$ref": "https://x"}},
    ]


def test_a_schema_nested_too_deeply_is_refused() -> None:
    schema: dict[str, Any] = {}
    for _ in range(2000):
        schema = {"not": schema}
    deep = [{"type": "function", "function": {"name": "f", "parameters": schema}}]
    required = request(tools=deep, tool_choice="required")
    with pytest.raises(RequestError) as caught, ClientFields(names=names_of(required)):
        structured_of(required)
    assert (caught.value.param, caught.value.message[:38]) == (
        "tools",
        "tools: the schema is nested too deeply",
    )


TOKENIZER = Tokenizer.from_buffer(tiny_tokenizer_json())
DETOKENIZER = Detokenizer(TOKENIZER, tiny_tokenizer_json())
TOKEN_BYTES = DETOKENIZER.token_bytes
CHAT = Envelope("chatcmpl-1", 7, "tiny", chat=True)
PLAIN = Envelope("cmpl-1", 7, "tiny", chat=False)
USAGE = Usage(3, 4, 7, PromptTokensDetails(2))
A, PART = TOKENIZER.token_to_id("a"), TOKENIZER.token_to_id("ð")


def parse(events: bytes) -> list[dict]:
    assert events.endswith(b"\n\n")
    return [json.loads(line.removeprefix("data: ")) for line in events.decode().split("\n\n")[:-1]]


def stream(envelope: Envelope, *, include_usage: bool = False) -> EventStream:
    return EventStream(envelope, TOKEN_BYTES, include_usage=include_usage)


def logprob(token_id: int, start: int, *top: tuple[int, float]) -> TokenText:
    return TokenText(TokenLogprob(token_id=token_id, logprob=-0.5, top=top), start)


def test_a_chat_chunk_and_the_one_with_the_role_before_it() -> None:
    encoder = stream(CHAT)
    head = {"id": "chatcmpl-1", "object": "chat.completion.chunk", "created": 7, "model": "tiny"}

    def chunk(delta: dict, reason: str | None = None) -> dict:
        choice = {"index": 1, "delta": delta, "logprobs": None, "finish_reason": reason}
        return {**head, "choices": [choice]}

    role = {"role": "assistant", "content": ""}
    text = 'say "é"\n\u2028'
    assert parse(encoder.event(TextEvent(1, text))) == [chunk(role), chunk({"content": text})]
    assert parse(encoder.event(TextEvent(1, "b", "stop"))) == [chunk({"content": "b"}, "stop")]


def test_token_ids_are_beside_the_text_and_those_of_the_prompt_in_the_first_chunk() -> None:
    prompt = PromptPart(pack_tokens([7, 8]), DETOKENIZER, gives_ids=True)
    first, last = TextEvent(0, "a", prompt=prompt, token_ids=[3]), TextEvent(0, "b", "stop", token_ids=[4, 5])
    for include_usage in (False, True):
        encoder = stream(PLAIN, include_usage=include_usage)
        (one,), (two,) = parse(encoder.event(first)), parse(encoder.event(last))
        assert (one["choices"][0]["token_ids"], one["choices"][0]["prompt_token_ids"]) == ([3], [7, 8])
        assert two["choices"][0] == {
            "index": 0,
            "text": "b",
            "logprobs": None,
            "finish_reason": "stop",
            "token_ids": [4, 5],
        }
        encoder = stream(CHAT, include_usage=include_usage)
        (role, one), (two,) = parse(encoder.event(first)), parse(encoder.event(last))
        assert ("prompt_token_ids" in role, one["prompt_token_ids"], "prompt_token_ids" in two) == (
            False,
            [7, 8],
            False,
        )
        assert (one["choices"][0]["token_ids"], two["choices"][0]["token_ids"]) == ([3], [4, 5])
    thinking = TextEvent(0, "", prompt=prompt, token_ids=[3], reasoning="so")
    _, one = parse(stream(CHAT).event(thinking))
    reasoning = {"reasoning": "so", "reasoning_content": "so"}
    assert (one["choices"][0]["delta"], one["prompt_token_ids"]) == (reasoning, [7, 8])
    for envelope in (PLAIN, CHAT):
        whole = WholeAnswer(envelope, TOKEN_BYTES, choices=1, logprobs=False)
        whole.take(first)
        whole.take(last)
        answer = json.loads(whole.body(USAGE))
        choice = answer["choices"][0]
        assert choice["token_ids"] == [3, 4, 5]
        assert (answer if envelope.chat else choice)["prompt_token_ids"] == [7, 8]


def test_usage_is_named_in_every_chunk_and_given_in_the_last() -> None:
    encoder = stream(PLAIN, include_usage=True)
    (chunk,) = parse(encoder.event(TextEvent(0, "a")))
    assert chunk["usage"] is None
    last, done = encoder.end(USAGE).split(b"\n\n", 1)
    assert done == b"data: [DONE]\n\n"
    assert stream(PLAIN).end(USAGE) == done
    (last,) = parse(last + b"\n\n")
    assert last["choices"] == []
    assert last["usage"] == {
        "prompt_tokens": 3, "completion_tokens": 4, "total_tokens": 7, "prompt_tokens_details": {"cached_tokens": 2},
    }  # fmt: skip


@pytest.mark.parametrize("include_usage", [False, True])
def test_the_chunk_that_ends_a_choice_may_say_why(include_usage: bool) -> None:
    why = ({"request_id": "r"},)
    (chunk,) = parse(stream(PLAIN, include_usage=include_usage).event(TextEvent(0, "a", "stop", (), why)))
    assert chunk["penstock"] == {"decisions": [{"request_id": "r"}]}
    assert chunk["choices"] == [{"index": 0, "text": "a", "logprobs": None, "finish_reason": "stop"}]
    assert ("usage" in chunk) is include_usage


def test_a_whole_answer_says_why_only_if_there_is_something_to_say() -> None:
    for why in ((), ({"request_id": "r"},)):
        answer = WholeAnswer(PLAIN, TOKEN_BYTES, choices=1, logprobs=False)
        answer.take(TextEvent(0, "a", "stop", (), why))
        body = json.loads(answer.body(USAGE))
        assert body.get("penstock") == ({"decisions": [{"request_id": "r"}]} if why else None)
        assert ("penstock" in body) is bool(why)


def test_chat_logprobs() -> None:
    event = TextEvent(0, "a", None, (logprob(A, 0, (A, -0.5), (PART, float("-inf"))),))
    _, chunk = parse(stream(CHAT).event(event))
    top = [
        {"token": "a", "logprob": -0.5, "bytes": [97]},
        {"token": "\ufffd", "logprob": -9999.0, "bytes": [0xF0]},
    ]
    content = [{"token": "a", "logprob": -0.5, "bytes": [97], "top_logprobs": top}]
    assert chunk["choices"][0]["logprobs"] == {"content": content, "refusal": None}


def test_completion_logprobs() -> None:
    event = TextEvent(0, "aa", None, (logprob(A, 0, (A, -0.5)), logprob(A, 1, (A, -0.5), (PART, -3.0))))
    (chunk,) = parse(stream(PLAIN).event(event))
    assert chunk["choices"][0]["logprobs"] == {
        "tokens": ["a", "a"],
        "token_logprobs": [-0.5, -0.5],
        "top_logprobs": [{"a": -0.5}, {"a": -0.5, "\ufffd": -3.0}],
        "text_offset": [0, 1],
    }
    (chunk,) = parse(stream(PLAIN).event(TextEvent(0, "a", None, (logprob(A, 0),))))
    assert chunk["choices"][0]["logprobs"]["top_logprobs"] is None
