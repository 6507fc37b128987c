"""Embeddings through the openai client: inputs of every form, and what is refused."""

import base64
import json
from collections.abc import AsyncIterator

import numpy as np
import pytest
from frontend_site import TOKENIZER, Site, run, serving

from penstock.core.errors import RequestError
from penstock.core.types.requests import Delta, FinishReason, Request
from penstock.core.wire import pack_tokens, token_list

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


def test_every_form_of_input_and_of_values() -> None:
    async def test() -> None:
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
            body = (await site.ask("GET", "/metrics")).body.decode()
            assert 'penstock_frontend_requests_total{code="200",route="/v1/embeddings"}' in body

    run(test)


def test_a_large_body_is_encoded_elsewhere_alike() -> None:
    async def test() -> None:
        async with serving(embed) as site:
            texts = ["the quick brown fox " * 20] * 300
            answer = await site.client.embeddings.create(model="tiny", input=texts, dimensions=2)
            count = len(TOKENIZER.encode(texts[0]).ids)
            assert answer.usage.prompt_tokens == 300 * count
            np.testing.assert_allclose(answer.data[299].embedding, unit(count, 2), rtol=1e-6)

    run(test)


@pytest.mark.parametrize(
    ("fields", "param", "message"),
    [
        ({"input": ""}, "input", "input: is empty; expected at least one token"),
        ({"input": []}, "input", "input: must not be an empty list"),
        ({"input": ["a", 1]}, "input", "input: mixes strings and token ids; expected a string, strings, token ids or lists"),
        ({"input": [99999]}, "input", "input: token ids must be >= 0 and < "),
        ({"input": "hello " * 3000}, "input", "input: 18000 bytes are at least "),
        ({"input": ["a"] * 2049}, "input", "input: at most 2048 inputs are allowed, got 2049; send several requests"),
        ({"input": "a", "dimensions": 0}, "dimensions", "dimensions: must be >= 1, got 0"),
        ({"input": "a", "dimensions": 9}, "dimensions", "dimensions: must be <= 8, the size of this model's embeddings, got 9"),
        ({"input": "a", "encoding_format": "int8"}, "encoding_format", "encoding_format: must be one of float, base64, got 'int8'"),
        ({"input": "a", "temperature": 1}, "temperature", "temperature: unknown field"),
        ({"input": {"a": 1}}, "input", "input: expected string or array, got object"),
        ({}, "input", "input: required, but missing"),
        ({"input": "a", "model": "none"}, "model", "model: 'none' does not exist here; models: tiny"),
    ],
)  # fmt: skip
def test_bad_input_is_named(fields: dict, param: str, message: str) -> None:
    async def test() -> None:
        async with serving(embed) as site:
            error = await refusal(site, **fields)
            assert error["message"].startswith(message), error
            assert error["param"] == param

    run(test)


def test_an_engine_without_embeddings_says_so() -> None:
    async def refuses(request: Request) -> AsyncIterator[Delta]:
        raise RequestError("model: the engine of 'tiny' makes no embeddings", param="model")
        yield

    async def test() -> None:
        async with serving(refuses) as site:
            assert (await refusal(site, input="a"))[
                "message"
            ] == "model: the engine of 'tiny' makes no embeddings"

    run(test)


async def refusal(site: Site, **fields: object) -> dict:
    answer = await site.ask("POST", "/v1/embeddings", json.dumps({"model": "tiny"} | fields).encode())
    assert 400 <= answer.status < 500
    return answer.error
