"""Tool calls and reasoning through the openai client, whole and streamed."""

import json

import openai
import pytest
from frontend_site import TOKENIZER, serving

from tests.support.tool_talk import PARIS, SAID, says

ASK = [{"role": "user", "content": "how is the weather?"}]
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
        answer = await site.client.chat.completions.create(model="tiny", messages=ASK, tools=TOOLS)
        (choice,) = answer.choices
        assert choice.finish_reason == "tool_calls"
        assert choice.message.content == "I look."
        assert choice.message.reasoning_content == "hm\n"
        assert json.loads(choice.message.tool_calls[0].function.arguments) == {"city": "Paris é"}
        said = choice.message.model_dump(exclude_none=True)
        result = {"role": "tool", "tool_call_id": choice.message.tool_calls[0].id, "content": "rain"}
        await site.client.chat.completions.create(model="tiny", messages=[*ASK, said, result], tools=TOOLS)
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
            model="tiny", messages=ASK, tools=TOOLS, tool_choice="none"
        )
        assert answer.choices[0].message.content == call
        assert answer.choices[0].message.tool_calls is None
        assert answer.choices[0].finish_reason == "stop"
        assert b"weather" in bytes(answer.model_dump_json(), "utf-8")


async def test_a_template_without_tools_refuses_them() -> None:
    async with serving() as site:
        with pytest.raises(openai.BadRequestError) as caught:
            await site.client.chat.completions.create(model="tiny", messages=ASK, tools=TOOLS)
        assert caught.value.param == "tools"


async def test_tools_of_a_large_body_are_parsed_too() -> None:
    async with serving(dispatcher=says(SAID, context_length=200_000)) as site:
        long = [{"role": "system", "content": "the quick brown fox " * 4000}, *ASK]
        answer = await site.client.chat.completions.create(model="tiny", messages=long, tools=TOOLS)
        assert answer.choices[0].message.tool_calls[0].function.arguments == PARIS
        assert answer.choices[0].message.reasoning_content == "hm\n"
