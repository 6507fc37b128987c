"""Every event and answer is what the clients' own types say, to the letter; tool calls, reasoning, choices and their usage add up."""

import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
from anthropic.types import Message as AnthropicMessage
from anthropic.types import RawMessageStreamEvent
from frontend_site import IDS, TEXT, Site, serving
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from penstock.core.types.requests import Delta, FinishReason, Request, TokenLogprob
from penstock.core.wire import pack_tokens
from tests.support.tool_talk import PARIS, SAID, says

SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}}
HI = [{"role": "user", "content": "how is it?"}]
CHAT_TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": SCHEMA}}]


async def ask(site: Site, path: str, **body: Any) -> Any:
    """Give the events of a stream, or the answer."""
    answer = await site.post(path, **body)
    assert answer.status == 200, answer.body
    return answer.events if body.get("stream") else answer.json


async def test_responses_are_of_the_openai_clients_types() -> None:
    events_of: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
    body = {"input": "how is it?", "tools": [{"type": "function", "name": "weather", "parameters": SCHEMA}]}
    async with serving(dispatcher=says(SAID)) as site:
        whole = Response.model_validate(await ask(site, "/v1/responses", **body))
        events = await ask(site, "/v1/responses", stream=True, **body)
    for number, event in enumerate(events):
        events_of.validate_python(event)
        assert event["sequence_number"] == number
    opened: dict[int, str] = {}
    arguments: dict[int, str] = {}
    for event in events:
        match event["type"]:
            case "response.output_item.added":
                assert event["output_index"] == len(opened), "in order"
                opened[event["output_index"]] = event["item"]["id"]
            case "response.function_call_arguments.delta":
                assert opened[event["output_index"]] == event["item_id"]
                arguments[event["output_index"]] = arguments.get(event["output_index"], "") + event["delta"]
            case "response.function_call_arguments.done":
                assert arguments[event["output_index"]] == event["arguments"]
            case "response.output_item.done":
                assert opened[event["output_index"]] == event["item"]["id"]
    assert [json.loads(text) for text in arguments.values()] == [json.loads(PARIS), {}]
    last = Response.model_validate(events[-1]["response"])
    assert [item.type for item in last.output] == [item.type for item in whole.output]
    assert last.usage == whole.usage
    assert whole.usage is not None
    assert whole.usage.total_tokens == whole.usage.input_tokens + whole.usage.output_tokens


async def test_responses_give_back_the_format_and_the_tool_that_were_asked_for() -> None:
    form = {"type": "json_schema", "name": "place", "description": "one", "schema": SCHEMA, "strict": True}
    tool = {"type": "function", "name": "weather", "parameters": SCHEMA}
    asked = [
        ({}, {"type": "text"}, "auto"),
        ({"text": {"format": {"type": "text"}}}, {"type": "text"}, "auto"),
        ({"text": {"format": {"type": "json_object"}}}, {"type": "json_object"}, "auto"),
        ({"text": {"format": form, "verbosity": "medium"}}, form, "auto"),
        ({"tools": [tool], "tool_choice": "required"}, {"type": "text"}, "required"),
        (
            {"tools": [tool], "tool_choice": {"type": "function", "name": "weather"}},
            {"type": "text"},
            {"type": "function", "name": "weather"},
        ),
    ]
    async with serving(dispatcher=says(SAID)) as site:
        for fields, text_format, choice in asked:
            answer = await ask(site, "/v1/responses", input="hello", **fields)
            Response.model_validate(answer)
            assert answer["text"]["format"] == text_format
            assert answer["tool_choice"] == choice
            assert answer["text"]["verbosity"] == (fields.get("text") or {}).get("verbosity")
            events = await ask(site, "/v1/responses", input="hello", stream=True, **fields)
            for event in events:
                if "response" in event:
                    assert Response.model_validate(event["response"])
                    assert event["response"]["text"] == answer["text"]
                    assert event["response"]["tool_choice"] == choice


async def with_logprobs(request: Request) -> AsyncIterator[Delta]:
    for place, token_id in enumerate(IDS):
        top = tuple((other, -0.5 - other) for other in (token_id, 7)[: request.sampling.logprobs])
        yield Delta(
            request_id=request.request_id,
            token_ids=pack_tokens([token_id]),
            finish_reason=FinishReason.LENGTH if place == len(IDS) - 1 else None,
            logprobs=()
            if request.sampling.logprobs is None
            else (TokenLogprob(token_id=token_id, logprob=-0.5, top=top),),
        )


@pytest.mark.parametrize("asked", [{"include": ["message.output_text.logprobs"]}, {"top_logprobs": 2}])
async def test_log_probabilities_of_responses_are_those_of_chats(asked: dict[str, Any]) -> None:
    events_of: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
    async with serving(with_logprobs) as site:
        top = asked.get("top_logprobs", 0)
        chat = await ask(site, "/v1/chat/completions", messages=HI, logprobs=True, top_logprobs=top)
        whole = await ask(site, "/v1/responses", input="hello", **asked)
        events = await ask(site, "/v1/responses", input="hello", stream=True, **asked)
        bare = await ask(site, "/v1/responses", input="hello")
    Response.model_validate(whole)
    wanted = chat["choices"][0]["logprobs"]["content"]
    assert wanted
    assert whole["output"][0]["content"][0]["logprobs"] == wanted
    assert whole["top_logprobs"] == top
    for event in events:
        events_of.validate_python(event)
    deltas = [event["logprobs"] for event in events if event["type"] == "response.output_text.delta"]
    assert [token for delta in deltas for token in delta] == wanted
    (done,) = (event for event in events if event["type"] == "response.output_text.done")
    assert done["logprobs"] == wanted
    assert events[-1]["response"]["output"][0]["content"] == whole["output"][0]["content"]
    assert bare["output"][0]["content"][0]["logprobs"] == []


async def test_messages_are_of_the_anthropic_clients_types() -> None:
    events_of: TypeAdapter[Any] = TypeAdapter(RawMessageStreamEvent)
    body = {"messages": HI, "max_tokens": 300, "tools": [{"name": "weather", "input_schema": SCHEMA}]}
    async with serving(dispatcher=says(SAID)) as site:
        whole = AnthropicMessage.model_validate(await ask(site, "/v1/messages", **body))
        events = await ask(site, "/v1/messages", stream=True, **body)
    inputs: dict[int, str] = {}
    is_open: int | None = None
    for event in events:
        if event["type"] == "ping":
            continue
        events_of.validate_python(event)
        match event["type"]:
            case "content_block_start":
                assert is_open is None
                is_open = event["index"]
            case "content_block_delta":
                assert event["index"] == is_open
                if event["delta"]["type"] == "input_json_delta":
                    inputs[event["index"]] = inputs.get(event["index"], "") + event["delta"]["partial_json"]
            case "content_block_stop":
                assert event["index"] == is_open
                is_open = None
    assert [json.loads(text or "{}") for text in inputs.values()][:1] == [json.loads(PARIS)]
    delta = next(event for event in events if event["type"] == "message_delta")
    assert delta["delta"]["stop_reason"] == whole.stop_reason == "tool_use"
    assert delta["usage"]["output_tokens"] == whole.usage.output_tokens
    assert events[-1]["type"] == "message_stop"


async def test_chats_are_of_the_openai_clients_types() -> None:
    n = 3
    plain = {"messages": HI, "n": n, "logprobs": True, "top_logprobs": 2}
    async with serving() as site:
        whole = ChatCompletion.model_validate(await ask(site, "/v1/chat/completions", **plain))
        usage = {"include_usage": True}
        chunks = await ask(site, "/v1/chat/completions", stream=True, stream_options=usage, **plain)
    texts = [""] * n
    tokens = [0] * n
    for chunk in chunks:
        ChatCompletionChunk.model_validate(chunk)
        for choice in chunk["choices"]:
            texts[choice["index"]] += choice["delta"].get("content") or ""
            tokens[choice["index"]] += len((choice.get("logprobs") or {}).get("content") or ())
    assert texts == [TEXT] * n == [choice.message.content for choice in whole.choices]
    assert len(set(tokens)) == 1
    assert whole.usage is not None
    assert chunks[-1]["usage"]["completion_tokens"] == whole.usage.completion_tokens == n * (len(IDS) + 1)

    async with serving(dispatcher=says(SAID)) as site:
        chunks = await ask(site, "/v1/chat/completions", stream=True, messages=HI, tools=CHAT_TOOLS, n=n)
    calls: dict[tuple[int, int], str] = {}
    for chunk in chunks:
        ChatCompletionChunk.model_validate(chunk)
        for choice in chunk["choices"]:
            for call in choice["delta"].get("tool_calls") or ():
                key = choice["index"], call["index"]
                calls[key] = calls.get(key, "") + (call["function"].get("arguments") or "")
    found = {key: json.loads(text) for key, text in calls.items()}
    assert found == {
        (index, number): wanted for index in range(n) for number, wanted in enumerate((json.loads(PARIS), {}))
    }
