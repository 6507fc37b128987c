"""The runner under its scheduler: several in one process, requests that move, blocks that travel, sampling in place."""

import os
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from penstock.engine.paged import step as step_module  # noqa: E402
from penstock.engine.paged.memory import PagedConfig  # noqa: E402
from penstock.engine.paged.runner import PagedRunner  # noqa: E402

pytestmark = pytest.mark.engine


def test_two_engines_share_a_process(engine, reference):
    llama, gemma = engine("llama"), engine("gemma3", block_size=4)
    llama.submit(*reference("llama").requests(4))
    gemma.submit(*reference("gemma3").requests(4))
    while llama.step() | gemma.step():
        pass
    reference("llama").check(llama.tokens, 4)
    reference("gemma3").check(gemma.tokens, 4)


@pytest.mark.parametrize("native", [True, False])
@pytest.mark.parametrize("dtype", ["bfloat16", pytest.param("float16", marks=pytest.mark.nightly)])
def test_short_floats(engine, reference, dtype, native, monkeypatch):
    """Rounding differs from that of transformers, so only the first tokens, with their clear lead, must be equal."""
    if not native:
        monkeypatch.setattr(step_module, "native_decodes", lambda memory: False)
    expected = reference("llama")
    paged = engine(dtype=dtype)
    tokens = paged.run(*expected.requests(8, logprobs=0))
    assert paged.runner.kv_memory()[0][0][0].nbytes == 2 * 2 * 8 * 2 * 16 * 2
    first = [tokens[str(index)][0] == expected.output(index)[0] for index in range(8)]
    assert sum(first) >= 7
    assert all(np.isfinite(report.logprob) for reports in paged.logprobs.values() for report in reports)


def test_logprobs_are_those_of_the_model(engine, reference, new_request, checkpoint):
    from transformers import AutoModelForCausalLM

    prompt = reference("llama").prompts[5]
    paged = engine()
    output = paged.run(new_request("a", prompt, 8, logprobs=3, temperature=1.5, seed=2))["a"]
    model = AutoModelForCausalLM.from_pretrained(checkpoint("llama"), dtype=torch.float32)
    with torch.inference_mode():
        logits = model(torch.tensor([prompt + output])).logits[0, len(prompt) - 1 : -1]
    expected = torch.log_softmax(logits, -1)
    assert [report.token_id for report in paged.logprobs["a"]] == output
    for position, report in enumerate(paged.logprobs["a"]):
        assert report.logprob == pytest.approx(float(expected[position, output[position]]), abs=1e-3)
        assert [token for token, _ in report.top] == expected[position].topk(3).indices.tolist()


def test_it_computes_on_its_core(checkpoint):
    def start():
        info = PagedRunner(PagedConfig(model=str(checkpoint("llama")), kv_blocks=8, device="cpu:0")).start()
        return info.num_blocks, len(os.sched_getaffinity(0))

    with ThreadPoolExecutor(1) as thread:  # what it is kept to ends with it
        assert thread.submit(start).result() == (8, 1)


@pytest.mark.parametrize("native", [True, False])
def test_numbers_gone_wrong_stay_with_their_request(engine, reference, native, monkeypatch):
    """A block that held infinities and NaN is given to another request, which must not notice."""
    if not native:
        monkeypatch.setattr(step_module, "native_decodes", lambda memory: False)
    expected = reference("llama")
    paged = engine(kv_blocks=64, max_batch_tokens=64)
    weights = paged.runner._loaded.model._module.model.layers[0].self_attn.v_proj.weight
    sound = weights.data.clone()
    weights.data *= float("inf")
    paged.run(*expected.requests(4))
    weights.data.copy_(sound)
    paged.pool.reset()
    paged.tokens.clear()
    expected.check(paged.run(*expected.requests(6)), 6)
