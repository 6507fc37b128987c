"""Clients as users have them, unchanged; and Schemathesis makes requests from the OpenAPI document."""

import asyncio
import contextlib
import json
import re
from pathlib import Path

import pytest
from frontend_site import serving

from tests.support.clients import run_command, run_program
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


CHECKS = "not_a_server_error,response_schema_conformance,content_type_conformance"


@pytest.mark.slow
@pytest.mark.needs("schemathesis clients")
@pytest.mark.within(240)
async def test_every_operation_holds_its_own_description(tmp_path: Path) -> None:
    async with serving(dispatcher=agent(), batches={"directory": str(tmp_path / "batches")}) as site:
        batches = asyncio.ensure_future(site.server.watch())
        document = json.loads((await site.ask("GET", "/openapi.json")).body)
        for kind in document["components"]["schemas"].values():
            fields = kind.get("properties", {})
            if fields.keys() & {"messages", "prompt", "input"}:
                fields["model"] = {"const": "tiny"}  # or nothing would be found to be answered
        described = tmp_path / "openapi.json"
        described.write_text(json.dumps(document))
        said = await run_command(
            "schemathesis",
            [
                "run", str(described), "--url", f"http://127.0.0.1:{site.port}", "--checks", CHECKS, "--no-color",
                "--max-examples", "4", "--phases", "examples,coverage,fuzzing", "--request-timeout", "20", "--seed", "1",
            ],
            command="schemathesis",
            folder=tmp_path,
            timeout_s=200,
        )  # fmt: skip
        batches.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await batches
    tested = re.search(r"Test cases:\s+([0-9]+) generated", said)
    assert tested, said
    assert int(tested[1]) > 2000, said
    answered = {request.request_id.partition("-")[0] for request in site.dispatcher.opened}
    assert answered >= {"cmpl", "embd"}, answered  # a random role makes no chat
