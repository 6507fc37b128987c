"""Answers cut by their limit of tokens, of every API, whole and streamed: nothing of a forced tool call becomes text."""

import json
from typing import Any

import pytest
from frontend_site import HI, Site, serving
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from tests.support.tool_talk import PARIS, cut

SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}}
CHAT_TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": SCHEMA}}]
NAMED = {"type": "function", "function": {"name": "weather"}}
CALLS = f'[{{"name": "weather", "parameters": {PARIS}}}, {{"name": "weather", "parameters": {PARIS}}}]'
FORCED = [(CALLS[:length], "required") for length in (0, 1, 15, 48, len(CALLS) // 2 + 4)]
FORCED += [(PARIS[:length], "named") for length in (0, 12)]


async def chat(site: Site, choice: str, *, stream: bool) -> tuple[str, list[str], str]:
    """Give the text, each call's arguments, and why the answer ended."""
    asked: Any = {"model": "tiny", "messages": HI, "tools": CHAT_TOOLS}
    asked["tool_choice"] = "required" if choice == "required" else NAMED
    if not stream:
        (whole,) = (await site.client.chat.completions.create(**asked)).choices
        arguments = [call.function.arguments for call in whole.message.tool_calls or []]
        return whole.message.content or "", arguments, whole.finish_reason
    text, calls, reason = "", {}, ""
    async for chunk in await site.client.chat.completions.create(**asked, stream=True):
        (given,) = chunk.choices
        text += given.delta.content or ""
        for call in given.delta.tool_calls or []:
            calls[call.index] = calls.get(call.index, "") + (call.function.arguments or "")
        reason = given.finish_reason or reason
    return text, list(calls.values()), reason


async def responses(site: Site, choice: str, *, stream: bool) -> tuple[str, list[str], str]:
    asked: Any = {"model": "tiny", "input": "hello", "tools": [{"type": "function", **NAMED["function"]}]}
    asked["tool_choice"] = "required" if choice == "required" else {"type": "function", "name": "weather"}
    if stream:
        events = [event async for event in await site.client.responses.create(**asked, stream=True)]
        text = "".join(event.delta for event in events if event.type == "response.output_text.delta")
        answer = events[-1].response
        assert answer.output_text == text
    else:
        answer = await site.client.responses.create(**asked)
    arguments = [item.arguments for item in answer.output if item.type == "function_call"]
    return answer.output_text, arguments, "length" if answer.status == "incomplete" else answer.status


async def messages(site: Site, choice: str, *, stream: bool) -> tuple[str, list[str], str]:
    asked: Any = {"model": "tiny", "messages": HI, "max_tokens": 300, "stream": stream}
    asked["tools"] = [{"name": "weather", "input_schema": SCHEMA}]
    asked["tool_choice"] = {"type": "any"} if choice == "required" else {"type": "tool", "name": "weather"}
    answer = await site.post("/v1/messages", **asked)
    assert answer.status == 200, answer.body
    if not stream:
        text = "".join(block["text"] for block in answer.json["content"] if block["type"] == "text")
        count = sum(block["type"] == "tool_use" for block in answer.json["content"])
        reason = answer.json["stop_reason"]
        return text, [""] * count, "length" if reason == "max_tokens" else reason
    text, calls, reason = "", {}, ""
    for event in answer.events:
        if event["type"] == "content_block_start" and event["content_block"]["type"] == "tool_use":
            calls[event["index"]] = ""
        elif event["type"] == "content_block_delta":
            text += event["delta"].get("text", "")
            if "partial_json" in event["delta"]:
                calls[event["index"]] += event["delta"]["partial_json"]
        elif event["type"] == "message_delta":
            reason = event["delta"]["stop_reason"]
    return text, list(calls.values()), "length" if reason == "max_tokens" else reason


REASONED = '<think>hm</think>I look.<tool_call>{"name": "weather", "parameters": '


@pytest.mark.parametrize(
    ("said", "kinds", "last"),
    [
        ("I lo", ["message"], "incomplete"),
        ("<think>h", ["reasoning"], "incomplete"),
        ("<think>hm</think>I look.", ["reasoning", "message"], "incomplete"),
        (REASONED + PARIS[:12], ["reasoning", "message", "function_call"], "incomplete"),
        (REASONED + PARIS, ["reasoning", "message", "function_call"], "completed"),
    ],
)
async def test_the_item_in_which_a_response_is_cut_is_incomplete(
    said: str, kinds: list[str], last: str
) -> None:
    events_of: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
    wanted = [*("completed" for _ in kinds[1:]), last]
    asked: Any = {"model": "tiny", "input": "hello", "tools": [{"type": "function", **NAMED["function"]}]}
    async with serving(dispatcher=cut(said)) as site:
        whole = Response.model_validate((await site.post("/v1/responses", **asked)).json)
        streamed = await site.post("/v1/responses", stream=True, **asked)
    assert (whole.status, whole.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert [(item.type, item.status) for item in whole.output] == list(zip(kinds, wanted, strict=True))
    events = [events_of.validate_python(event) for event in streamed.events]
    done = [event.item for event in events if event.type == "response.output_item.done"]
    assert [(item.type, item.status) for item in done] == list(zip(kinds, wanted, strict=True))
    assert events[-1].type == "response.incomplete"
    assert events[-1].response.output == done


@pytest.mark.parametrize("api", [chat, responses, messages])
async def test_forced_calls_that_are_cut_leave_no_text(api: Any) -> None:
    for said, choice in FORCED:
        async with serving(dispatcher=cut(said)) as site:
            for stream in (False, True):
                text, calls, reason = await api(site, choice, stream=stream)
                assert (text, reason) == ("", "length"), (said, choice, stream)
                assert len(calls) == (1 if choice == "named" else said.count('"weather"'))
                assert all(PARIS.startswith(arguments) for arguments in calls)


async def test_forced_calls_of_a_message_that_was_begun_are_calls_too() -> None:
    begun = [*HI, {"role": "assistant", "content": "Let me see:"}]
    asked: Any = {"model": "tiny", "messages": begun, "max_tokens": 300, "tool_choice": {"type": "any"}}
    asked["tools"] = [{"name": "weather", "input_schema": SCHEMA}]
    async with serving(dispatcher=cut(CALLS)) as site:
        answer = (await site.post("/v1/messages", **asked)).json
    assert [block["type"] for block in answer["content"]] == ["tool_use", "tool_use"]
    assert answer["content"][0]["input"] == json.loads(PARIS)
