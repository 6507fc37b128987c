"""Tool calls, reasoning and cut answers of every API: events are what the clients' own types say, and nothing of a call becomes text."""

import json
from collections.abc import AsyncIterator
from typing import Any

import openai
import pytest
from anthropic.types import Message as AnthropicMessage
from anthropic.types import RawMessageStreamEvent
from frontend_site import HI, IDS, TEXT, TOKENIZER, Site, serving
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter
from structlog.testing import capture_logs
from tokenizers import Tokenizer

from penstock.core.types.requests import Delta, FinishReason, Request, TokenLogprob
from penstock.core.wire import pack_tokens
from tests.support.dispatcher import ScriptedDispatcher, speak
from tests.support.tokenizer import tiny_card, tiny_tokenizer_json
from tests.support.tool_talk import PARIS, SAID, cut, says

SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}}
ASK = [{"role": "user", "content": "how is it?"}]
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
        chat = await ask(site, "/v1/chat/completions", messages=ASK, logprobs=True, top_logprobs=top)
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
    body = {"messages": ASK, "max_tokens": 300, "tools": [{"name": "weather", "input_schema": SCHEMA}]}
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
    plain = {"messages": ASK, "n": n, "logprobs": True, "top_logprobs": 2}
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
        chunks = await ask(site, "/v1/chat/completions", stream=True, messages=ASK, tools=CHAT_TOOLS, n=n)
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


NAMED = {"type": "function", "function": {"name": "weather"}}
CALLS = f'[{{"name": "weather", "parameters": {PARIS}}}, {{"name": "weather", "parameters": {PARIS}}}]'
FORCED = [(CALLS[:length], "required") for length in (0, 1, 15, 48, len(CALLS) // 2 + 4)]
FORCED += [(PARIS[:length], "named") for length in (0, 12)]


async def chat(site: Site, choice: str, *, stream: bool) -> tuple[str, list[str], str]:
    """Give the text, each call's arguments, and why the answer ended."""
    asked: Any = {"model": "tiny", "messages": HI, "tools": CHAT_TOOLS}
    asked["tool_choice"] = NAMED if choice == "named" else choice
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
    asked["tool_choice"] = {"type": "function", "name": "weather"} if choice == "named" else choice
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
    choices: Any = {"required": {"type": "any"}, "named": {"type": "tool", "name": "weather"}}
    asked["tool_choice"] = choices.get(choice, {"type": choice})
    answer = await site.post("/v1/messages", **asked)
    assert answer.status == 200, answer.body
    if not stream:
        text = "".join(block["text"] for block in answer.json["content"] if block["type"] == "text")
        used = [block["input"] for block in answer.json["content"] if block["type"] == "tool_use"]
        calls, reason = [json.dumps(each, ensure_ascii=False) for each in used], answer.json["stop_reason"]
        return text, calls, "length" if reason == "max_tokens" else reason
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
                begun = 1 if choice == "named" else said.count('"weather"')
                whole = said.count("}") if choice == "named" else said.count("}}")
                assert len(calls) == (begun if stream or api is responses else whole), (
                    "what is cut is no call"
                )
                assert all(PARIS.startswith(arguments) for arguments in calls)


@pytest.mark.parametrize("api", [chat, responses, messages])
@pytest.mark.parametrize(
    ("said", "text", "arguments"),
    [
        ('<tool_call>{"name": "weather", "arguments": null}</tool_call>', "", "{}"),
        ('<think>hm <tool_call>{"name": "weather"}</tool_call></think>', "", "{}"),
        (f'I look.<tool_call>{{"name": "weather", "arguments": {PARIS}}}</tool_call>So.', "I look.So.", PARIS),
        (f'<think>a</think><think>b</think>So.</think><tool_call>{{"name": "weather", "arguments": {PARIS}}}', "So.", PARIS),
    ],
)  # fmt: skip
async def test_calls_out_of_their_grammar_are_mended_in_every_api(
    api: Any, said: str, text: str, arguments: str
) -> None:
    for at_once in (1, 100):
        async with serving(dispatcher=says(said, at_once=at_once)) as site:
            for stream in (False, True):
                found, calls, reason = await api(site, "auto", stream=stream)
                assert (found.replace("\n", ""), calls) == (text, [arguments])
                assert reason in {"tool_calls", "tool_use", "completed"}
            if "hm <tool_call>" in said:
                assert await site.metric("penstock_frontend_tool_call_repairs_total{") == 2


async def test_a_call_of_a_grammar_that_is_not_known_is_text_with_its_marks() -> None:
    tokenizer = Tokenizer.from_buffer(tiny_tokenizer_json())
    tokenizer.add_special_tokens(["<|tool_call_begin|>", "<|tool_call_end|>"])
    config = {"chat_template": "{% for m in messages %}{{ m.content }}{% endfor %}{{ tools }}"}
    files = {
        "tokenizer.json": tokenizer.to_str().encode(),
        "tokenizer_config.json": json.dumps(config).encode(),
    }
    said = 'I look.<|tool_call_begin|>functions.weather:0{"city": "Paris"}<|tool_call_end|>'
    script = speak([*tokenizer.encode(said).ids, 0], finish=FinishReason.STOP)
    dispatcher = ScriptedDispatcher(script, [tiny_card(files=files)], files)
    async with serving(dispatcher=dispatcher) as site:
        with capture_logs() as logs:
            for stream in (False, True):
                assert await chat(site, "auto", stream=stream) == (said, [], "stop")
    assert [log["event"] for log in logs].count("tool_calls_unknown") == 1


@pytest.mark.parametrize("reason", ["length", "stop"])
async def test_a_call_that_is_cut_is_none_to_be_run(reason: str) -> None:
    said = f'I look.<tool_call>{{"name": "weather", "arguments": {PARIS[:12]}'
    async with serving(dispatcher=cut(said) if reason == "length" else says(said + "<stop>")) as site:
        for stream in (False, True):
            asked: Any = {"tools": CHAT_TOOLS, "stop": ["<stop>"], "stream": stream}
            given = await ask(site, "/v1/chat/completions", messages=ASK, **asked)
            choices = [choice for chunk in (given if stream else [given]) for choice in chunk["choices"]]
            assert choices[-1]["finish_reason"] == reason
            if not stream:
                assert "tool_calls" not in choices[0]["message"]
            asked = {"tools": [{"name": "weather", "input_schema": SCHEMA}], "stop_sequences": ["<stop>"]}
            given = await ask(site, "/v1/messages", messages=ASK, max_tokens=300, stream=stream, **asked)
            end = given[-2]["delta"] if stream else given
            assert end["stop_reason"] == ("max_tokens" if reason == "length" else "stop_sequence")
            if not stream:
                assert [block["type"] for block in given["content"]] == ["text"]


async def test_forced_calls_of_a_message_that_was_begun_are_calls_too() -> None:
    begun = [*HI, {"role": "assistant", "content": "Let me see:"}]
    asked: Any = {"model": "tiny", "messages": begun, "max_tokens": 300, "tool_choice": {"type": "any"}}
    asked["tools"] = [{"name": "weather", "input_schema": SCHEMA}]
    async with serving(dispatcher=cut(CALLS)) as site:
        answer = (await site.post("/v1/messages", **asked)).json
    assert [block["type"] for block in answer["content"]] == ["tool_use", "tool_use"]
    assert answer["content"][0]["input"] == json.loads(PARIS)


QUESTION = [{"role": "user", "content": "how is the weather?"}]
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
        },
    }
]


async def test_a_whole_answer_goes_back_as_history() -> None:
    async with serving(dispatcher=says(SAID)) as site:
        answer = await site.client.chat.completions.create(model="tiny", messages=QUESTION, tools=TOOLS)
        (choice,) = answer.choices
        assert choice.finish_reason == "tool_calls"
        assert choice.message.content == "I look."
        assert choice.message.reasoning == choice.message.reasoning_content == "hm\n"
        assert json.loads(choice.message.tool_calls[0].function.arguments) == {"city": "Paris é"}
        said = choice.message.model_dump(exclude_none=True)
        result = {"role": "tool", "tool_call_id": choice.message.tool_calls[0].id, "content": "rain"}
        await site.client.chat.completions.create(
            model="tiny", messages=[*QUESTION, said, result], tools=TOOLS
        )
        prompt = TOKENIZER.decode(
            list(memoryview(site.dispatcher.opened[1].token_ids).cast("i")), skip_special_tokens=False
        )
        assert f"I look.<tool_call>{PARIS}</tool_call>" in prompt
        assert "<think>hm\n</think>" in prompt
        assert json.dumps(TOOLS, ensure_ascii=False) in prompt


async def test_with_tool_choice_none_the_text_is_the_users() -> None:
    call = '<tool_call>{"name": "weather"}</tool_call>'
    async with serving(dispatcher=says(call)) as site:
        answer = await site.client.chat.completions.create(
            model="tiny", messages=QUESTION, tools=TOOLS, tool_choice="none"
        )
        assert answer.choices[0].message.content == call
        assert answer.choices[0].message.tool_calls is None
        assert answer.choices[0].finish_reason == "stop"
        assert b"weather" in bytes(answer.model_dump_json(), "utf-8")


async def test_a_template_without_tools_refuses_them() -> None:
    async with serving() as site:
        with pytest.raises(openai.BadRequestError) as caught:
            await site.client.chat.completions.create(model="tiny", messages=QUESTION, tools=TOOLS)
        assert caught.value.param == "tools"


async def test_tools_of_a_large_body_are_parsed_too() -> None:
    async with serving(dispatcher=says(SAID, context_length=200_000)) as site:
        long = [{"role": "system", "content": "the quick brown fox " * 4000}, *QUESTION]
        answer = await site.client.chat.completions.create(model="tiny", messages=long, tools=TOOLS)
        assert answer.choices[0].message.tool_calls[0].function.arguments == PARIS
        assert answer.choices[0].message.reasoning_content == "hm\n"
