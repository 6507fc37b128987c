"""The runner under its scheduler: several in one process, requests that move, blocks that travel, sampling in place."""

import os
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from penstock.core.hashing import block_hashes

torch = pytest.importorskip("torch")

from penstock.engine.paged.config import PagedConfig  # noqa: E402
from penstock.engine.paged.runner import PagedRunner  # noqa: E402
from penstock.engine.paged.step import step as step_module  # noqa: E402

pytestmark = pytest.mark.engine
SAMPLED = {"temperature": 1.0, "seed": 11, "top_p": 0.95, "presence_penalty": 0.6, "repetition_penalty": 1.1}


def test_two_engines_share_a_process(engine, reference):
    llama, gemma = engine("llama"), engine("gemma3", block_size=4)
    llama.submit(*reference("llama").requests(4))
    gemma.submit(*reference("gemma3").requests(4))
    while llama.step() | gemma.step():
        pass
    reference("llama").check(llama.tokens, 4)
    reference("gemma3").check(gemma.tokens, 4)


@pytest.mark.parametrize("params", [{}, SAMPLED, {"temperature": 0.8}])
def test_a_moved_request_goes_on_exactly(engine, reference, new_request, params):
    prompt = reference("llama").prompts[0]
    unmoved = engine().run(new_request("a", prompt, 40, **params))["a"]
    if params:
        assert unmoved[:16] != reference("llama").output(0)
    for emitted in (1, 17, 39):
        elsewhere = engine(max_batch_tokens=50)
        moved = new_request("a", prompt + unmoved[:emitted], 40, num_emitted=emitted, **params)
        elsewhere.run(*reference("llama").requests(5), moved)  # in other company
        assert unmoved[:emitted] + elsewhere.tokens["a"] == unmoved


def test_preemption_changes_no_sampled_token(engine, reference):
    calm, crowded = engine(), engine(kv_blocks=26, max_batch_tokens=64)
    requests = reference("llama").requests(12, **SAMPLED)
    assert calm.run(*requests) == crowded.run(*requests)
    assert calm.scheduler.load().preemptions == 0
    assert crowded.scheduler.load().preemptions > 0


def test_choices_of_one_seed_differ(engine, reference, new_request):
    import msgspec

    one = new_request("a", reference("llama").prompts[3], **SAMPLED)
    other = msgspec.structs.replace(one, request_id="b", choice=1)
    tokens = engine().run(one, other)
    assert tokens["a"] != tokens["b"]


def test_blocks_travel_to_another_engine(engine, reference):
    expected = reference("llama")
    source, target = engine(), engine(kv_blocks=100)
    source.run(*expected.requests(3))
    prompt = expected.prompts[2]
    hashes = block_hashes(prompt, 8)
    found = source.pool.match(hashes)
    assert len(found) == len(hashes) > 3
    block_ids = target.pool.allocate(len(found))
    ((there,),), ((here,),) = source.runner.kv_memory(), target.runner.kv_memory()
    here[block_ids] = there[found]
    target.pool.commit(block_ids, hashes, None)
    target.pool.release(block_ids)
    expected.check(target.run(*expected.requests(3)), 3)
    assert target.scheduler.load().prefix_hit_tokens >= len(hashes) * 8 - 8


@pytest.mark.parametrize("native", [True, False])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
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


def test_no_end_before_min_tokens(engine, reference, new_request):
    expected = reference("llama")
    prompt, output = expected.prompts[1], expected.output(1)
    stopped = engine().run(new_request("a", prompt, stop_token_ids=(output[2],)))["a"]
    assert stopped == output[: output.index(output[2]) + 1]
    kept_on = engine().run(new_request("a", prompt, stop_token_ids=(output[2],), min_tokens=6))["a"]
    assert len(kept_on) >= 6
    assert output[2] not in kept_on[:6]


def test_one_thread_a_process_unless_told_otherwise(engine):
    torch.set_num_threads(2)
    engine()
    assert torch.get_num_threads() == 1


def test_it_computes_on_its_core(checkpoint):
    def start():
        info = PagedRunner(PagedConfig(model=str(checkpoint("llama")), kv_blocks=8, device="cpu:0")).start()
        return info.num_blocks, len(os.sched_getaffinity(0))

    with ThreadPoolExecutor(1) as thread:  # what it is kept to ends with it
        assert thread.submit(start).result() == (8, 1)


def test_a_model_is_released_on_close(engine):
    paged = engine()
    paged.runner.close()
    with pytest.raises(AssertionError, match="after close"):
        paged.runner.kv_memory()


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


def test_stop_ids_past_the_vocabulary_count_for_nothing(engine, new_request):
    stops = {"min_tokens": 2, "stop_token_ids": (512, 1 << 40)}
    plain = engine().run(new_request("a", [2, 3, 4], 6))
    assert engine().run(new_request("a", [2, 3, 4], 6, **stops)) == plain


class CountingFence:
    def __init__(self):
        self.waits = 0

    def wait(self):
        self.waits += 1


def test_each_step_waits_for_its_device_once_also_one_that_samples_nothing_or_fails(
    engine, new_request, monkeypatch
):
    fence = CountingFence()
    paged = engine(max_batch_tokens=8, make_fence=lambda device: fence)
    paged.submit(new_request("a", range(2, 22), 2))
    for sampled in (0, 0, 1, 1):
        before = fence.waits
        plan = paged.scheduler.plan()
        assert plan.samples.sum() == sampled
        paged.scheduler.commit(plan, paged.runner.run(plan, paged.scheduler.table))
        assert fence.waits == before + 1

    paged.submit(new_request("b", range(30, 40), 2))
    plan = paged.scheduler.plan()
    monkeypatch.setattr(paged.runner._loaded.model, "logits", lambda *args: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        paged.runner.run(plan, paged.scheduler.table)
    assert fence.waits == before + 2
