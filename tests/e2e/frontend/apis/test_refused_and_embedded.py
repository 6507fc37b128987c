"""Embeddings of every form of input; and each refusal of any API names the field that its client sent, whoever finds the error."""

import base64
import json
from collections.abc import AsyncIterator
from typing import Any

import numpy as np
import pytest
from frontend_site import TOKENIZER, serving

from penstock.core.errors import RequestError
from penstock.core.types.requests import Delta, FinishReason, Request
from penstock.core.wire import pack_tokens, token_list
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
LONG = "the quick fox " * 6_000  # decoded by an encoder process, too
BAD_PART = [{"type": "text", "text": "a"}, {"type": "video"}]
BAD_IMAGE = {"type": "image", "source": {"type": "url", "url": "http://x/y.png"}}


def refuses(field: str) -> Any:
    """Make a worker that finds an error in this field of its own."""

    async def script(_: Request) -> AsyncIterator[Delta]:
        raise RequestError(f"{field}: cannot be had; change it", param=field)
        yield

    return script


OF_WORKERS: list[tuple[str, dict[str, Any], str, str]] = [
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
]  # fmt: skip
"""A path, fields, the field that the worker names, and the one that the client is told."""


@pytest.mark.parametrize("text", ["hi", LONG], ids=["small", "large"])
async def test_a_workers_refusal_names_the_clients_field(text: str) -> None:
    dispatcher = says("so", context_length=200_000)
    async with serving(dispatcher=dispatcher) as site:
        for path, fields, worker, named in OF_WORKERS if text == "hi" else OF_WORKERS[::3]:
            said = {name: text for name in ("prompt", "input") if name in SEED[path]}
            if "messages" in SEED[path]:
                said["messages"] = [{"role": "user", "content": text}]
            dispatcher.script = refuses(worker)
            answer = await site.post(path, **(SEED[path] | said | fields))
            assert (answer.status, answer.error["message"]) == (400, f"{named}: cannot be had; change it")
            if path != MESSAGES:  # which have no such field
                assert answer.error["param"] == named


OF_THE_FRONTEND: list[tuple[str, dict[str, Any], str]] = [
    (CHAT, {"guided_json": SCHEMA, "response_format": {"type": "json_object"}}, "guided_json: contradicts"),
    (CHAT, {"tools": [{"type": "function"}]}, "tools[0].function: required"),
    (CHAT, {"tools": [{"type": "web", "parameters": {}}]}, "tools[0].type: must be 'function'"),
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
    (EMBEDDINGS, {"input": ""}, "input: is empty; expected at least one token"),
    (EMBEDDINGS, {"input": "hello " * 10_000}, "input: "),
    (EMBEDDINGS, {"input": ["a"] * 2049}, "input: at most 2048 inputs are allowed, got 2049; send several requests"),
    (EMBEDDINGS, {"dimensions": 0}, "dimensions: must be >= 1, got 0"),
    (EMBEDDINGS, {"encoding_format": "int8"}, "encoding_format: must be one of float, base64, got 'int8'"),
    (EMBEDDINGS, {"temperature": 1}, "temperature: unknown field"),
    (EMBEDDINGS, {"input": {"a": 1}}, "input: expected string or array, got object"),
    (TEXT, {"prompt": [99999999]}, "prompt: token ids must be"),
    (TEXT, {"max_tokens": 4096}, "max_tokens: "),
    (TEXT, {"model": "none"}, "model: 'none' does not exist here; models: tiny"),
    (CHAT, {"max_tokens": -1}, "max_tokens: must be >= 1, got -1"),
    (CHAT, {"max_tokns": 1}, "max_tokns: unknown field; did you mean 'max_tokens'?"),
    (CHAT, {"n": 1000}, "n: must be >= 1 and <= 128, got 1000"),
    (CHAT, {"messages": [{"role": "user", "content": "a" * 20_000}]}, "messages: "),
]  # fmt: skip
"""A path, fields, and how the refusal starts: with the field."""


async def test_the_frontends_refusal_names_the_clients_field() -> None:
    async with serving(dispatcher=says("so")) as site:
        for path, fields, starts in OF_THE_FRONTEND:
            answer = await site.post(path, **(SEED[path] | fields))
            assert answer.status == (404 if "model" in fields else 400), (path, fields)
            assert answer.error["message"].startswith(starts), (path, fields, answer.error)
            assert answer.error["type"] == "invalid_request_error"
        assert site.dispatcher.opened == []


async def test_a_refused_turn_of_a_stored_conversation_is_counted_in_its_own_input() -> None:
    image = {"type": "input_image", "image_url": "data:image/png;base64,AAAA"}
    async with serving(dispatcher=says("so")) as site:
        first = (await site.post(RESPONSES, input="hi")).json["id"]
        for text in ("hi", LONG[:70_000]):
            turn = [{"role": "user", "content": text}, {"role": "user", "content": [image]}]
            said = await site.post(RESPONSES, input=turn, instructions="x", previous_response_id=first)
            assert said.error["param"] == "input[1].content[0].type", said.error


async def test_a_large_body_of_tokenize_needs_no_model() -> None:
    async with serving(dispatcher=says("so", context_length=200_000)) as site:
        answer = await site.ask("POST", "/tokenize", json.dumps({"prompt": LONG}).encode())
        assert answer.status == 200, answer.body


SIZE = 8


def state(token_ids: list[int]) -> np.ndarray:
    """Give the hidden state that the scripted worker has for a prompt."""
    return np.array([len(token_ids), *range(1, SIZE)], dtype=np.float32)


async def embed(request: Request) -> AsyncIterator[Delta]:
    assert request.embeds
    assert request.sampling.max_tokens == 1
    token_ids = token_list(request.token_ids)
    yield Delta(request_id=request.request_id)  # a step has begun
    yield Delta(
        request_id=request.request_id,
        token_ids=pack_tokens([3]),
        finish_reason=FinishReason.LENGTH,
        cached_tokens=1,
        embedding=state(token_ids).astype("<f4").tobytes(),
    )


def unit(count: int, dimensions: int = SIZE) -> list[float]:
    vector = state([0] * count)[:dimensions]
    return (vector / np.linalg.norm(vector)).tolist()


async def test_every_form_of_input_and_of_values() -> None:
    async with serving(embed) as site:
        create = site.client.embeddings.create
        ids = TOKENIZER.encode("the quick").ids
        for given, counts in (
            ("the quick", [len(ids)]),
            (["the quick", "the"], [len(ids), len(TOKENIZER.encode("the").ids)]),
            (ids, [len(ids)]),
            ([ids, ids[:1]], [len(ids), 1]),
            (["the"] * 100, [len(TOKENIZER.encode("the").ids)] * 100),
        ):
            for form in ({}, {"encoding_format": "float"}, {"encoding_format": "base64"}):
                answer = await create(model="tiny", input=given, **form)
                assert [item.index for item in answer.data] == list(range(len(counts)))
                assert answer.usage.model_dump() == {
                    "prompt_tokens": sum(counts),
                    "total_tokens": sum(counts),
                }
                for item, count in zip(answer.data, counts, strict=True):
                    vector = item.embedding
                    if isinstance(vector, str):
                        vector = np.frombuffer(base64.b64decode(vector), "<f4")
                    np.testing.assert_allclose(vector, unit(count), rtol=1e-6)
        short = await create(model="tiny", input="the quick", dimensions=3)
        np.testing.assert_allclose(short.data[0].embedding, unit(len(ids), 3), rtol=1e-6)
        long = await site.post("/v1/embeddings", input="the quick", dimensions=9)
        assert long.error["message"] == "dimensions: must be <= 8, the size of this model's embeddings, got 9"
        body = (await site.ask("GET", "/metrics")).body.decode()
        assert 'penstock_frontend_requests_total{code="200",route="/v1/embeddings"}' in body


async def test_a_large_body_is_encoded_elsewhere_alike() -> None:
    async with serving(embed) as site:
        texts = ["the quick brown fox " * 20] * 300
        answer = await site.client.embeddings.create(model="tiny", input=texts, dimensions=2)
        count = len(TOKENIZER.encode(texts[0]).ids)
        assert answer.usage.prompt_tokens == 300 * count
        np.testing.assert_allclose(answer.data[299].embedding, unit(count, 2), rtol=1e-6)


async def test_an_engine_without_embeddings_says_so() -> None:
    async def refuses(request: Request) -> AsyncIterator[Delta]:
        raise RequestError("model: the engine of 'tiny' makes no embeddings", param="model")
        yield

    async with serving(refuses) as site:
        said = (await site.post("/v1/embeddings", input="a")).error["message"]
        assert said == "model: the engine of 'tiny' makes no embeddings"
