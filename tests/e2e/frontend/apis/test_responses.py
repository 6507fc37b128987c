"""The Responses API through the openai client, whole, streamed, and continued by an answer's id."""

import json

import openai
import pytest
from frontend_site import IDS, TEXT, TOKENIZER, Site, run, serving

from penstock.core.types.requests import FinishReason
from penstock.core.wire import token_list
from tests.support.dispatcher import ScriptedDispatcher, speak
from tests.support.tokenizer import tiny_card
from tests.support.tool_talk import FILES, PARIS, SAID, says

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


def test_an_answer_whole_and_streamed() -> None:
    async def test() -> None:
        async with serving() as site:
            api = site.client.responses
            whole = await api.create(
                model="tiny", input="hello", instructions="be brief", max_output_tokens=50
            )
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
            assert (
                "".join(event.delta for event in events if event.type == "response.output_text.delta") == TEXT
            )
            assert events[-1].response.output_text == TEXT
            async with api.stream(model="tiny", input="hello") as stream:
                assert (await stream.get_final_response()).output_text == TEXT

    run(test)


@pytest.mark.parametrize("stream", [False, True])
def test_reasoning_and_calls_are_items_and_the_talk_goes_on_by_id(stream: bool) -> None:
    async def test() -> None:
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
            later = await api.create(
                model="tiny",
                input=[result],
                tools=TOOLS,
                previous_response_id=answer.id,
                instructions="be brief",
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

    run(test)


def test_what_is_not_stored_is_404() -> None:
    async def test() -> None:
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

    run(test)


def test_large_inputs_are_continued_too() -> None:
    async def test() -> None:
        card = tiny_card(context_length=400_000)
        async with serving(
            dispatcher=ScriptedDispatcher(speak([*IDS, 0], finish=FinishReason.STOP), [card])
        ) as site:
            api = site.client.responses
            large = "the quick brown fox " * 4000
            answer = await api.create(model="tiny", input=large)
            assert answer.output_text == TEXT
            await api.create(model="tiny", input=large, previous_response_id=answer.id)
            assert prompt_of(site).count("the quick brown fox") == 8001
            await api.create(model="tiny", input="short", previous_response_id=answer.id)
            assert prompt_of(site).endswith(f"<|assistant|>{TEXT}<|end|><|user|>short<|end|><|assistant|>")

    run(test)


def test_an_answer_that_breaks_off_is_incomplete() -> None:
    async def test() -> None:
        dispatcher = ScriptedDispatcher(
            speak(IDS, finish=FinishReason.LENGTH), [tiny_card(files=FILES)], FILES
        )
        async with serving(dispatcher=dispatcher) as site:
            answer = await site.client.responses.create(model="tiny", input="hello")
            assert (answer.status, answer.incomplete_details.reason) == ("incomplete", "max_output_tokens")
            with pytest.raises(openai.BadRequestError, match="max_output_tokens: must be >= 1, got 0"):
                await site.client.responses.create(model="tiny", input="hello", max_output_tokens=0)

    run(test)


def test_texts_become_tokens_and_tokens_texts() -> None:
    async def test() -> None:
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

    run(test)
