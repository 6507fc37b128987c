"""Embeddings through the openai client: inputs of every form, and what is refused."""

import base64
from collections.abc import AsyncIterator

import numpy as np
from frontend_site import TOKENIZER, serving

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
