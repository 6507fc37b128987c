"""Embeddings of a served model, by the openai client, are transformers' hidden states."""

import asyncio

import numpy as np
import openai
import pytest

from penstock.demo import MODEL_DIR

torch = pytest.importorskip("torch")

pytestmark = [pytest.mark.slow, pytest.mark.engine]
TEXTS = ["What is Penstock?", "How does the router choose a worker?", "x " * 300]
DIM = 32


def expected() -> tuple[list[np.ndarray], int]:
    """Give each text's embedding, and the tokens of all."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(MODEL_DIR, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(MODEL_DIR)
    vectors, count = [], 0
    for text in TEXTS:
        ids = tokenizer(text, return_tensors="pt").input_ids
        with torch.inference_mode():
            state = model(ids, output_hidden_states=True).hidden_states[-1][0, -1].numpy()
        vectors.append(state)
        count += ids.shape[1]
    return vectors, count


def test_they_are_transformers_hidden_states(one_worker):
    vectors, count = expected()

    async def embed(site):
        create = site.client.embeddings.create
        chats = [asyncio.ensure_future(site.tell(f"chat {index}", max_tokens=30)) for index in range(3)]
        for _ in range(2):  # the second time of cached blocks
            answer = await create(model="penstock-demo", input=TEXTS)
            assert answer.usage.prompt_tokens == count
            for item, vector in zip(answer.data, vectors, strict=True):
                unit = vector / np.linalg.norm(vector)
                np.testing.assert_allclose(item.embedding, unit, atol=2e-4)
        short = await create(model="penstock-demo", input=TEXTS[0], dimensions=DIM, encoding_format="float")
        unit = vectors[0][:DIM] / np.linalg.norm(vectors[0][:DIM])
        np.testing.assert_allclose(short.data[0].embedding, unit, atol=2e-4)
        with pytest.raises(openai.BadRequestError, match="the size of this model's embeddings"):
            await create(model="penstock-demo", input="a", dimensions=1 << 20)
        for text, usage in await asyncio.gather(*chats):
            assert text
            assert usage.completion_tokens == 30

    one_worker(embed)
