"""Embeddings are the hidden states of transformers, whatever is computed beside them and however the prompt is cut."""

import msgspec
import numpy as np
import pytest

from tests.unit.engine.paged.conftest import make_request

torch = pytest.importorskip("torch")

pytestmark = pytest.mark.engine
COUNT = 8


def hidden(path, prompt: list[int]) -> np.ndarray:
    """Give the last token's hidden state after the last norm."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    with torch.inference_mode():
        return model(torch.tensor([prompt]), output_hidden_states=True).hidden_states[-1][0, -1].numpy()


@pytest.mark.parametrize(
    ("architecture", "max_batch_tokens"),
    [
        ("llama", 48),
        *(pytest.param(*each, marks=pytest.mark.nightly) for each in (("gemma3", 48), ("llama", 2048))),
    ],
)
def test_they_equal_those_of_transformers(engine, reference, checkpoint, architecture, max_batch_tokens):
    made, expected = engine(architecture, max_batch_tokens=max_batch_tokens), reference(architecture)
    embedding = [
        msgspec.structs.replace(request, request_id=f"e{request.request_id}", embeds=True)
        for request in expected.requests(COUNT, ignore_eos=False)
    ]
    one_token = [
        msgspec.structs.replace(request, sampling=msgspec.structs.replace(request.sampling, max_tokens=1))
        for request in embedding
    ]
    made.run(*one_token, *expected.requests(COUNT))
    again = [msgspec.structs.replace(request, request_id=f"x{request.request_id}") for request in one_token]
    made.run(*again)  # of a cached prefix, one token is computed
    assert made.scheduler.load().prefix_hit_tokens > 0
    expected.check({name: tokens for name, tokens in made.tokens.items() if name.isdigit()}, COUNT)
    assert len(made.embeddings) == 2 * COUNT
    for index in range(COUNT):
        state = hidden(checkpoint(architecture), expected.prompts[index])
        for name in (f"e{index}", f"xe{index}"):
            found = np.frombuffer(made.embeddings[name], "<f4")
            np.testing.assert_allclose(found, state, rtol=1e-4, atol=1e-5)


def test_the_last_token_of_a_prompt_may_be_a_chunk_of_its_own(engine):
    prompt, found = list(range(20, 69)), []
    for max_batch_tokens in (48, 64):
        made = engine(max_batch_tokens=max_batch_tokens)
        made.run(msgspec.structs.replace(make_request("e", prompt, 1), embeds=True))
        found.append(np.frombuffer(made.embeddings["e"], "<f4"))
    np.testing.assert_allclose(*found, rtol=1e-4, atol=1e-5)
