"""Clients as users have them, unchanged: chats, streams, tool calls with their results, and structured output."""

import pytest
from frontend_site import serving

from tests.support.clients import run_program
from tests.support.tool_talk import AFTER, TOKENIZER, agent

pytestmark = [pytest.mark.slow, pytest.mark.within(300)]

PARIS = {"city": "Paris"}
FACT = {"city": "Paris", "days": 3}
UNIT = pytest.approx([0.6, 0.8], abs=1e-6)
TOKENS = len(TOKENIZER.encode(AFTER).ids) + 1  # the stop token counts


async def said_by(environment: str, program: str) -> dict:
    """Run a client against a model that calls `weather`."""
    async with serving(dispatcher=agent()) as site:
        return await run_program(environment, program, f"http://127.0.0.1:{site.port}", "tiny")


@pytest.mark.needs("python clients")
async def test_litellm() -> None:
    said = await said_by("python", "litellm_client.py")
    assert said.pop("embedding") == UNIT
    texts = dict.fromkeys(["text", "hosted_vllm", "anthropic", "responses", "completion", "after"], AFTER)
    streamed = {"text": AFTER, "tokens": TOKENS}
    assert said == {**texts, "streamed": streamed, "call": PARIS, "format": FACT}


@pytest.mark.needs("python clients")
async def test_langchain() -> None:
    texts = dict.fromkeys(["text", "streamed", "responses", "completion", "after"], AFTER)
    counts = {"tokens": TOKENS, "logprobs": 0, "batch": [AFTER, AFTER]}
    calls = {"call": PARIS, "streamed_call": PARIS, "format": FACT, "function": FACT}
    said = await said_by("python", "langchain_client.py")
    assert said.pop("embedding") == UNIT
    assert said == {**texts, **counts, **calls}


@pytest.mark.needs("python clients")
async def test_instructor() -> None:
    made = {"whole": FACT, "streamed": FACT}
    assert await said_by("python", "instructor_client.py") == {
        "tool_call": made,
        "json_mode": made,
        "json_schema_mode": made,
    }


@pytest.mark.needs("python clients")
async def test_openai_agents() -> None:
    said = await said_by("python", "agents_client.py")
    assert said.pop("calls") == ["Paris"] * 4
    assert set(said) == {"OpenAIChatCompletionsModel", "OpenAIResponsesModel"}
    for by in said.values():
        assert (by["whole"], by["streamed"]) == (AFTER, AFTER)
        assert by["events"] > 10
        assert by["tokens"] > TOKENS  # of both turns


@pytest.mark.needs("node clients")
async def test_openai_and_ai_of_npm() -> None:
    said = await said_by("node", "node_client.mjs")
    assert (said["openai"].pop("embedding"), said["ai"].pop("embedding")) == (UNIT, UNIT)
    assert said["openai"] == {
        "text": AFTER,
        "streamed": AFTER,
        "tokens": TOKENS,
        "responses": AFTER,
        "events": ["response.created", "response.completed"],
        "models": ["tiny"],
        "agent": AFTER,
    }
    assert said["ai"].pop("completion") == AFTER
    one = {
        "text": AFTER,
        "streamed": AFTER,
        "tokens": TOKENS,
        "agent": AFTER,
        "cities": ["Paris"],
        "object": FACT,
    }
    assert said["ai"] == dict.fromkeys(["responses", "chat", "compatible"], one)
