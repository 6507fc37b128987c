"""The Responses API through the openai client, whole, streamed, and continued by an answer's id."""

import json
from typing import Any

import openai
import pytest
from frontend_site import IDS, TEXT, TOKENIZER, Site, serving
from openai.types.responses import Response

from penstock.core.wire import token_list
from tests.support.tool_talk import PARIS, SAID, says

TOOLS = [
    {
        "type": "function",
        "name": "weather",
        "parameters": {"type": "object", "properties": {}},
        "strict": False,
    }
]


def prompt_of(site: Site, index: int = -1) -> str:
    return TOKENIZER.decode(token_list(site.dispatcher.opened[index].token_ids), skip_special_tokens=False)


async def test_an_answer_whole_and_streamed() -> None:
    async with serving() as site:
        api = site.client.responses
        whole = await api.create(model="tiny", input="hello", instructions="be brief", max_output_tokens=50)
        assert (whole.output_text, whole.status, whole.id[:5]) == (TEXT, "completed", "resp_")
        assert whole.usage.output_tokens == len(IDS) + 1
        assert prompt_of(site) == "<|system|>be brief<|end|><|user|>hello<|end|><|assistant|>"
        events = [event async for event in await api.create(model="tiny", input="hello", stream=True)]
        kinds = list(dict.fromkeys(event.type for event in events))
        assert kinds == [
            "response.created", "response.in_progress", "response.output_item.added", "response.content_part.added",
            "response.output_text.delta", "response.output_text.done", "response.content_part.done",
            "response.output_item.done", "response.completed",
        ]  # fmt: skip
        assert [event.sequence_number for event in events] == list(range(len(events)))
        assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == TEXT
        assert events[-1].response.output_text == TEXT
        async with api.stream(model="tiny", input="hello") as stream:
            assert (await stream.get_final_response()).output_text == TEXT


@pytest.mark.parametrize("stream", [False, True])
async def test_reasoning_and_calls_are_items_and_the_talk_goes_on_by_id(stream: bool) -> None:
    async with serving(dispatcher=says(SAID)) as site:
        api = site.client.responses
        asked = {"model": "tiny", "input": "how is it?", "tools": TOOLS}
        if stream:
            async with api.stream(**asked) as events:
                answer = await events.get_final_response()
        else:
            answer = await api.create(**asked)
        reasoning, message, call, _ = answer.output
        assert reasoning.content[0].text == "hm\n"
        assert message.content[0].text == "I look."
        assert 0 < answer.usage.output_tokens_details.reasoning_tokens < answer.usage.output_tokens
        assert (call.type, call.name, json.loads(call.arguments)) == (
            "function_call",
            "weather",
            json.loads(PARIS),
        )
        result = {"type": "function_call_output", "call_id": call.call_id, "output": "rain"}
        told = [{"type": "item_reference", "id": item.id} for item in answer.output[:3]]
        await api.create(model="tiny", input=[*told, result], tools=TOOLS, store=False)
        assert "<think>hm\n</think>" in prompt_of(site)
        assert prompt_of(site).count("<tool_call>") == 1
        again = await api.create(**asked | {"stream": False}, include=["reasoning.encrypted_content"])
        kept = {"type": "reasoning", "summary": [], "encrypted_content": again.output[0].encrypted_content}
        await api.create(model="tiny", input=[kept, again.output[2].model_dump(), result], store=False)
        assert "<think>hm\n</think>" in prompt_of(site)
        later = await api.create(
            model="tiny", input=[result], tools=TOOLS, previous_response_id=answer.id, instructions="be brief"
        )
        assert later.previous_response_id == answer.id
        prompt = prompt_of(site)
        assert prompt.startswith("<|system|>be brief<|user|>how is it?<|assistant|>I look.<tool_call>")
        assert "<think>hm\n</think>" in prompt
        assert "<|tool|>rain" in prompt
        items = [
            {"role": "user", "content": "how is it?"},
            *(item.model_dump() for item in answer.output),
            result,
        ]
        await api.create(model="tiny", input=items, tools=TOOLS, instructions="be brief")
        assert prompt_of(site) == prompt  # the whole conversation as input is the same


async def test_what_is_not_stored_is_404() -> None:
    async with serving() as site:
        api = site.client.responses
        unstored = await api.create(model="tiny", input="hello", store=False)
        for response_id in (unstored.id, "resp_none"):
            with pytest.raises(openai.NotFoundError) as caught:
                await api.create(model="tiny", input="more", previous_response_id=response_id)
            assert caught.value.param == "previous_response_id"
    async with serving(responses_bytes_max=10) as site:
        api = site.client.responses
        answer = await api.create(model="tiny", input="hello")
        with pytest.raises(openai.NotFoundError, match="responses_bytes_max is 10"):
            await api.create(model="tiny", input="more", previous_response_id=answer.id)


async def test_a_kept_answer_is_given_again_until_it_is_deleted() -> None:
    async with serving() as site:
        api = site.client.responses
        answer = await api.create(model="tiny", input="hello")
        assert (await api.retrieve(answer.id)).output == answer.output
        await api.delete(answer.id)
        for gone in (api.retrieve, api.delete):
            with pytest.raises(openai.NotFoundError, match="was deleted"):
                await gone(answer.id)
        with pytest.raises(openai.NotFoundError, match="was deleted"):
            await api.create(model="tiny", input="hello", previous_response_id=answer.id)


@pytest.mark.parametrize("stream", [False, True])
async def test_calls_have_the_form_of_the_clients_tool(stream: bool) -> None:
    def called(name: str, arguments: object) -> str:
        return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"

    said = (
        called("patch", {"input": "a\nb"})
        + called("mcp__fs__read", {})
        + called("tool_search", {"query": "x"})
    )
    schema = {"type": "object"}
    read = {"type": "function", "name": "read", "parameters": schema, "strict": False}
    tools = [
        {"type": "custom", "name": "patch"},
        {"type": "namespace", "name": "mcp__fs__", "description": "d", "tools": [read]},
        {"type": "tool_search", "execution": "client", "description": "d", "parameters": schema},
    ]
    async with serving(dispatcher=says(said)) as site:
        asked = {"model": "tiny", "input": "hello", "tools": tools, "stream": stream}
        answer = await site.client.responses.create(**asked)
        if stream:
            events = [event async for event in answer]
            deltas = [event for event in events if event.type == "response.custom_tool_call_input.delta"]
            assert [event.delta for event in deltas] == ["a\nb"]
            answer = events[-1].response
    patch, read_call, search = answer.output
    assert (patch.type, patch.name, patch.input) == ("custom_tool_call", "patch", "a\nb")
    assert (read_call.type, read_call.namespace, read_call.name) == ("function_call", "mcp__fs__", "read")
    assert (search.type, search.execution, search.arguments) == ("tool_search_call", "client", {"query": "x"})
    assert len({item.call_id for item in answer.output}) == 3


async def test_answers_repeat_what_was_asked() -> None:
    repeated: dict[str, Any] = {
        "instructions": 'be "brief"',
        "metadata": {"topic": "weather"},
        "truncation": "auto",
        "reasoning": {"effort": "low", "summary": "auto"},
        "temperature": 0.5,
        "top_p": 0.25,
        "max_output_tokens": 40,
        "max_tool_calls": 3,
        "parallel_tool_calls": False,
        "prompt_cache_key": "key",
        "prompt_cache_retention": "24h",
        "safety_identifier": "someone",
        "tools": TOOLS,
        "tool_choice": "auto",
        "user": "somebody",
    }
    async with serving(dispatcher=says("hello", context_length=200_000)) as site:
        for asked in ("hello", "the quick brown fox " * 4000):  # an encoder process reads the latter
            body = json.dumps({"model": "tiny", "input": asked, **repeated}).encode()
            answer = json.loads((await site.ask("POST", "/v1/responses", body)).body)
            Response.model_validate(answer, strict=True)
            assert {name: answer[name] for name in repeated} == repeated
            assert (answer["service_tier"], answer["background"]) == ("default", False)
            assert answer["completed_at"] >= answer["created_at"]
            streamed = await site.client.responses.create(model="tiny", input=asked, stream=True, **repeated)
            async for event in streamed:
                if event.type in {"response.created", "response.in_progress", "response.completed"}:
                    given = event.response.model_dump()
                    assert {name: given[name] for name in ("instructions", "metadata", "truncation")} == {
                        name: repeated[name] for name in ("instructions", "metadata", "truncation")
                    }
        bare = await site.client.responses.create(model="tiny", input="hello")
        assert (bare.instructions, bare.metadata, bare.truncation) == (None, {}, "disabled")
        assert (bare.temperature, bare.top_p) == (1.0, 1.0)
        with pytest.raises(openai.BadRequestError, match="truncation: must be 'auto' or 'disabled'"):
            await site.client.responses.create(model="tiny", input="hello", truncation="some")


async def test_the_oldest_items_are_left_out_where_the_client_allows_it() -> None:
    fox = "the quick brown fox jumps over the lazy dog "
    call = {"type": "function_call", "call_id": "c1", "name": "weather", "arguments": "{}"}
    output = {"type": "function_call_output", "call_id": "c1", "output": f"rain {fox}"}

    def items(turns: int) -> list[dict[str, Any]]:
        talk: list[dict[str, Any]] = [{"role": "user", "content": "first"}, call, output]
        for turn in range(turns):
            talk += [
                {"role": "assistant", "content": f"{fox * 3} {turn}"},
                {"role": "user", "content": f"{fox} {turn}"},
            ]
        return [*talk, {"role": "user", "content": "last"}]

    async with serving(dispatcher=says("hello", context_length=2048)) as site:
        api = site.client.responses
        asked = {"model": "tiny", "instructions": "be brief", "tools": TOOLS}
        for turns in (100, 1500):  # an encoder process reads the latter
            for truncation in ("disabled", None):
                with pytest.raises(openai.BadRequestError) as caught:
                    await api.create(input=items(turns), truncation=truncation, **asked)
                assert caught.value.code == "context_length_exceeded"
            answer = await api.create(input=items(turns), truncation="auto", max_output_tokens=100, **asked)
            prompt = prompt_of(site)
            assert prompt.startswith("<|system|>be brief<|")
            assert "rain" not in prompt
            assert "weather" in prompt.rpartition("last")[2], "the tools stay"
            assert f"{fox} {turns - 1}<|user|>last" in prompt
            left = 2048 - answer.usage.input_tokens
            assert 100 <= left < 100 + 4 * len(TOKENIZER.encode(fox).ids) + 40
            later = await api.create(
                model="tiny", input="and now?", previous_response_id=answer.id, truncation="auto"
            )
            assert prompt_of(site).endswith("<|user|>last<|assistant|>hello<|user|>and now?<|assistant|>")
            assert later.status == "completed"
        whole = await api.create(input=items(2), truncation="auto", **asked)
        prompt = prompt_of(site)
        await api.create(input=items(2), **asked)
        assert prompt_of(site) == prompt, "what fits is left as it is"
        assert whole.truncation == "auto"


async def test_texts_become_tokens_and_tokens_texts() -> None:
    async with serving() as site:
        body = json.dumps({"model": "tiny", "prompt": TEXT}).encode()
        tokens = json.loads((await site.ask("POST", "/tokenize", body)).body)
        assert (tokens["tokens"], tokens["count"], tokens["max_model_len"]) == (IDS, len(IDS), 512)
        chat = json.dumps({"messages": [{"role": "user", "content": "hello"}]}).encode()
        rendered = json.loads((await site.ask("POST", "/tokenize", chat)).body)["tokens"]
        back = json.loads(
            (await site.ask("POST", "/detokenize", json.dumps({"tokens": rendered}).encode())).body
        )
        assert back == {"prompt": "<|user|>hello<|end|><|assistant|>"}
        info = json.loads((await site.ask("GET", "/tokenizer_info")).body)
        assert (info["eos_token"], info["model_max_length"]) == ("<|end|>", 512)
        assert "add_generation_prompt" in info["chat_template"]
        assert (await site.ask("GET", "/tokenizer_info?model=none")).status == 404
        refused = await site.ask("POST", "/detokenize", b'{"tokens": [99999]}')
        assert (refused.status, refused.error["param"]) == (400, "tokens")
        refused = await site.ask("POST", "/tokenize", b"{}")
        assert (refused.status, refused.error["param"]) == (400, "prompt")
