"""Each refusal names the field that its client sent, whoever finds the error: the frontend, an encoder process or a worker."""

from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import pytest
from frontend_site import run, serving

from penstock.core.errors import RequestError
from penstock.core.types.requests import Delta, Request
from tests.support.tool_talk import says

CHAT, TEXT, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
MESSAGES, EMBEDDINGS = "/v1/messages", "/v1/embeddings"
HI = [{"role": "user", "content": "hi"}]
SEED: dict[str, dict[str, Any]] = {
    CHAT: {"messages": HI},
    TEXT: {"prompt": "hi"},
    RESPONSES: {"input": "hi"},
    MESSAGES: {"messages": HI, "max_tokens": 9, "system": "be brief"},
    EMBEDDINGS: {"input": "hi"},
}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {}}}
SCHEMA = {"type": "object"}
FORM = {"type": "json_schema", "schema": SCHEMA}
LONG = "the quick fox " * 20_000  # decoded by an encoder process, too
BAD_PART = [{"type": "text", "text": "a"}, {"type": "video"}]
BAD_IMAGE = {"type": "image", "source": {"type": "url", "url": "http://x/y.png"}}


def refuses(field: str) -> Any:
    """Make a worker that finds an error in this field of its own."""

    async def script(_: Request) -> AsyncIterator[Delta]:
        raise RequestError(f"{field}: cannot be had; change it", param=field)
        yield

    return script


@pytest.mark.parametrize(
    ("path", "fields", "worker", "named"),
    [
        (CHAT, {"guided_json": SCHEMA}, "response_format", "guided_json"),
        (CHAT, {"guided_regex": "a"}, "response_format", "guided_regex"),
        (CHAT, {"structured_outputs": {"json": SCHEMA}}, "response_format", "structured_outputs"),
        (CHAT, {"response_format": {"type": "json_object"}}, "response_format", "response_format"),
        (CHAT, {"nvext": {"guided_choice": ["a"]}}, "response_format", "nvext.guided_choice"),
        (CHAT, {"nvext": {"top_k": 5}}, "top_k", "nvext.top_k"),
        (CHAT, {"tools": [TOOL], "tool_choice": "required"}, "response_format", "tools"),
        (CHAT, {"max_completion_tokens": 9}, "max_tokens", "max_completion_tokens"),
        (CHAT, {"max_tokens": 9}, "max_tokens", "max_tokens"),
        (CHAT, {}, "prompt", "messages"),
        (TEXT, {"guided_grammar": "a"}, "response_format", "guided_grammar"),
        (TEXT, {"echo": True, "logprobs": 1}, "prompt_logprobs", "logprobs"),
        (TEXT, {}, "token_ids", "prompt"),
        (RESPONSES, {"text": {"format": FORM}}, "response_format", "text.format"),
        (RESPONSES, {"max_output_tokens": 9}, "max_tokens", "max_output_tokens"),
        (RESPONSES, {}, "prompt", "input"),
        (MESSAGES, {"output_config": {"format": FORM}}, "response_format", "output_config.format"),
        (MESSAGES, {"output_format": FORM}, "response_format", "output_format"),
        (MESSAGES, {}, "prompt", "messages"),
        (EMBEDDINGS, {}, "prompt", "input"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("text", ["hi", LONG], ids=["small", "large"])
def test_a_workers_refusal_names_the_clients_field(
    path: str, fields: dict[str, Any], worker: str, named: str, text: str
) -> None:
    body = {"model": "tiny"} | SEED[path] | fields
    for name in ("prompt", "input"):
        if name in body:
            body[name] = text
    if "messages" in body:
        body["messages"] = [{"role": "user", "content": text}]

    async def test() -> None:
        dispatcher = says("so", context_length=200_000)
        dispatcher.script = refuses(worker)
        async with serving(dispatcher=dispatcher) as site, aiohttp.ClientSession() as http:
            async with http.post(f"http://127.0.0.1:{site.port}{path}", json=body) as answer:
                said = await answer.json()
            error = said["error"]
            assert answer.status == 400, said
            assert error["message"] == f"{named}: cannot be had; change it"
            if path != MESSAGES:  # which have no such field
                assert error["param"] == named

    run(test)


@pytest.mark.parametrize(
    ("path", "fields", "starts"),
    [
        (CHAT, {"guided_json": SCHEMA, "response_format": {"type": "json_object"}}, "guided_json: contradicts"),
        (CHAT, {"tools": [{"type": "function"}]}, "tools[0].function: required"),
        (CHAT, {"tools": [{"type": "web"}]}, "tools[0].type: must be 'function'"),
        (CHAT, {"tools": [TOOL | {"function": {"name": 7}}]}, "tools[0].function.name: must be a string of 1 to 256 characters, got 7"),
        (RESPONSES, {"tools": [{"type": "function", "name": "f", "parameters": 7}]}, "tools[0].parameters: must be an object"),
        (RESPONSES, {"instructions": "x", "input": [{"role": "user", "content": "hi"}, {"role": "bad", "content": "x"}]}, "input[1].role: must be"),
        (RESPONSES, {"instructions": "x", "input": [{"content": "hi"}]}, "input[0].role: required"),
        (RESPONSES, {"input": []}, "input: must hold at least one message"),
        (RESPONSES, {"input": [{"type": "function_call_output", "call_id": "1", "output": BAD_PART}]}, "input[0].output[1].type: 'video'"),
        (RESPONSES, {"instructions": "x", "input": [{"role": "user", "content": [{"type": "input_image", "image_url": "ftp://x"}]}]}, "input[0].content[0].type: 'image_url' is not supported: model"),
        (RESPONSES, {"max_output_tokens": 0}, "max_output_tokens: must be >= 1"),
        (RESPONSES, {"max_output_tokens": 9000}, "max_output_tokens: "),
        (RESPONSES, {"text": {"format": {"type": "xml"}}}, "text.format.type: must be one of"),
        (RESPONSES, {"text": {"format": {"type": "json_schema"}}}, "text.format.schema: must be an object"),
        (MESSAGES, {"stop_sequences": [""]}, "stop_sequences: string 0 has 0 characters"),
        (MESSAGES, {"messages": [*HI, {"role": "user", "content": [BAD_IMAGE]}]}, "messages[1].content: 'image_url' is not supported: model"),
        (MESSAGES, {"tools": [{"name": "", "input_schema": {}}]}, "tools[0].name: must be a string"),
        (MESSAGES, {"tools": [{"name": "f"}], "tool_choice": {"type": "tool"}}, "tool_choice.name: required"),
        (MESSAGES, {"tools": [{"name": "f"}], "tool_choice": {"type": "tool", "name": "g"}}, "tool_choice.name: must be one of 'f'"),
        (MESSAGES, {"max_tokens": 9000}, "max_tokens: "),
        (MESSAGES, {"messages": []}, "messages: "),
        (EMBEDDINGS, {"input": []}, "input: must not be an empty list"),
        (EMBEDDINGS, {"input": [1, "a"]}, "input: mixes"),
        (EMBEDDINGS, {"input": [1 << 30]}, "input: token ids must be"),
    ],
)  # fmt: skip
def test_the_frontends_refusal_names_the_clients_field(
    path: str, fields: dict[str, Any], starts: str
) -> None:
    body = {"model": "tiny"} | SEED[path] | fields

    async def test() -> None:
        async with serving(dispatcher=says("so")) as site, aiohttp.ClientSession() as http:
            async with http.post(f"http://127.0.0.1:{site.port}{path}", json=body) as answer:
                said = await answer.json()
            assert answer.status == 400, said
            assert said["error"]["message"].startswith(starts)

    run(test)


def test_a_refused_turn_of_a_stored_conversation_is_counted_in_its_own_input() -> None:
    image = {"type": "input_image", "image_url": "data:image/png;base64,AAAA"}

    async def test() -> None:
        async with serving(dispatcher=says("so")) as site, aiohttp.ClientSession() as http:
            url = f"http://127.0.0.1:{site.port}{RESPONSES}"
            async with http.post(url, json={"model": "tiny", "input": "hi"}) as answer:
                first = (await answer.json())["id"]
            for text in ("hi", LONG[:70_000]):
                turn = [{"role": "user", "content": text}, {"role": "user", "content": [image]}]
                body = {"model": "tiny", "input": turn, "instructions": "x", "previous_response_id": first}
                async with http.post(url, json=body) as answer:
                    said = await answer.json()
                assert said["error"]["param"] == "input[1].content[0].type", said

    run(test)


def test_a_large_body_of_tokenize_needs_no_model() -> None:
    async def test() -> None:
        async with (
            serving(dispatcher=says("so", context_length=200_000)) as site,
            aiohttp.ClientSession() as http,
            http.post(f"http://127.0.0.1:{site.port}/tokenize", json={"prompt": LONG}) as answer,
        ):
            assert answer.status == 200, await answer.text()

    run(test)
