"""OpenAI's Agents SDK: an agent that calls a tool and answers, by chat completions and by the Responses API, whole and streamed."""

import asyncio
import json
import sys

import openai
from agents import (
    Agent,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)

URL, MODEL = sys.argv[1:]
set_tracing_disabled(disabled=True)
calls: list[str] = []


@function_tool
def weather(city: str) -> str:
    """Tell the weather."""
    calls.append(city)
    return "sunny"


async def main() -> dict:
    client = openai.AsyncOpenAI(base_url=f"{URL}/v1", api_key="none", max_retries=0)
    said = {}
    for kind in (OpenAIChatCompletionsModel, OpenAIResponsesModel):
        agent = Agent(
            name="guide",
            instructions="be brief",
            model=kind(model=MODEL, openai_client=client),
            tools=[weather],
        )
        whole = await Runner.run(agent, "hello")
        streamed = Runner.run_streamed(agent, "hello")
        events = [event.type async for event in streamed.stream_events()]
        said[kind.__name__] = {
            "whole": whole.final_output,
            "streamed": streamed.final_output,
            "events": len(events),
            "tokens": whole.context_wrapper.usage.output_tokens,
        }
    return said | {"calls": calls}


print(json.dumps(asyncio.run(main())))
