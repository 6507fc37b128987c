"""The TensorRT-LLM adapter over a fake of the package: start, refusals, disaggregation, aborts."""

from contextlib import asynccontextmanager, nullcontext

import pytest
from msgspec.structs import replace

from penstock.core.errors import ConfigError
from penstock.core.types.instances import Role
from penstock.core.types.requests import FinishReason, KvHandle
from penstock.engine.spec import EngineSpec
from penstock.engine.trtllm import engine as adapter
from penstock.engine.trtllm.arguments import argument_names, make_arguments
from penstock.seams import KvBlocks, NativeKvTransfer
from penstock.testing.engines.probe import EngineProbe, make_request
from penstock.testing.loop import run_async
from tests.fakes import tensorrt_llm as fake
from tests.fakes.scheduler import installed


@pytest.fixture
def trtllm(monkeypatch):
    fake.CALLS.clear()
    fake.CONTEXTS.clear()
    fake.ABORTED.clear()
    monkeypatch.setattr(adapter, "check_gpu", lambda *_: 0)
    names = ("tensorrt_llm", "tensorrt_llm.executor.result", "tensorrt_llm.llmapi")
    with (
        installed(names[0], fake, "1.1.0"),
        installed(names[1], fake, "1.1.0"),
        installed(names[2], fake, "1.1.0") as module,
    ):
        yield module


def spec(**changes) -> EngineSpec:
    return EngineSpec(
        **{"model": "tiny", "block_size": 8, "context_length": 256, "vocab_size": 256} | changes
    )


def start(of: EngineSpec) -> None:
    async def main() -> None:
        engine = adapter.TrtllmEngine(of)
        try:
            await engine.start()
        finally:
            await engine.close()

    run_async(main())


@pytest.mark.parametrize(
    ("version", "why"),
    [
        (None, r"tensorrt_llm is not installed; run `pip install 'tensorrt-llm>="),
        ("1.0.0", r"supports >=1\.1,<2; run"),
        ("2.0.0rc1", r"supports >=1\.1,<2; run"),
        ("1.1.0", "hardware cpu"),
    ],
)
def test_what_is_missing_is_one_line(version, why) -> None:
    package = nullcontext() if version is None else installed("tensorrt_llm", fake, version)
    with package, pytest.raises(ConfigError, match=why) as refused:
        start(spec())
    assert "\n" not in refused.value.message


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"args": {"kv_cache_conf": {}}}, r"engine_args\.kv_cache_conf: .* did you mean 'kv_cache_config'\?"),
        ({"args": {"max_seq_len": 4096}}, r"engine_args\.max_seq_len: Penstock sets it.*set context_length"),
        ({"args": {"kv_cache_config": {"tokens_per_block": 64}}}, r"tokens_per_block: .* set block_size"),
        ({"tensor_parallel": 2, "data_parallel": 2}, r"tensor_parallel must be 1, got 2"),
    ],
)
def test_wrong_arguments_are_refused_with_the_fix(trtllm, changes, why) -> None:
    with pytest.raises(ConfigError, match=why):
        start(spec(**changes))


def test_the_graph_reaches_the_arguments(trtllm) -> None:
    graph = spec(
        data_parallel=8,
        expert_parallel=8,
        kv_dtype="fp8",
        kv_blocks=800,
        role=Role.PREFILL,
        max_batch_tokens=4096,
        max_running_requests=128,
        args={"kv_cache_config": {"free_gpu_memory_fraction": 0.7}, "moe_config": {"backend": "WIDEEP"}},
    )
    arguments = make_arguments(graph, argument_names(trtllm))
    assert (arguments["tensor_parallel_size"], arguments["moe_expert_parallel_size"]) == (8, 8)
    assert arguments["enable_attention_dp"]
    assert (arguments["max_num_tokens"], arguments["max_batch_size"]) == (4096, 128), "of each rank"
    cache = arguments["kv_cache_config"]
    assert (cache["tokens_per_block"], cache["max_tokens"], cache["dtype"]) == (8, 800, "fp8")
    assert (cache["free_gpu_memory_fraction"], cache["enable_block_reuse"]) == (0.7, True)
    assert arguments["cache_transceiver_config"] == {"backend": "DEFAULT"}
    assert arguments["disable_overlap_scheduler"] is True
    plain = make_arguments(spec(), argument_names(trtllm))
    assert not plain.keys() & {"cache_transceiver_config", "enable_attention_dp", "max_batch_size"}


@asynccontextmanager
async def disaggregated():
    prefill, decode = (
        adapter.TrtllmEngine(spec(role=Role.PREFILL)),
        adapter.TrtllmEngine(spec(role=Role.DECODE)),
    )
    async with EngineProbe(prefill) as source, EngineProbe(decode) as target:
        yield source, target


async def prefilled_handle(source: EngineProbe, request) -> KvHandle:
    source.submit(replace(request, prefill_only=True))
    while True:
        for delta in (await source.step()).deltas:
            assert delta.token_ids == b"", "the decode worker sends the first token"
            assert delta.finish_reason is FinishReason.LENGTH
            assert delta.kv is not None
            return delta.kv


async def test_kv_goes_from_a_prefill_to_a_decode_engine(trtllm) -> None:
    async with disaggregated() as (source, target), EngineProbe(adapter.TrtllmEngine(spec())) as alone:
        assert isinstance(source.engine, NativeKvTransfer)
        assert not isinstance(source.engine, KvBlocks)
        assert source.engine.kv_transfer_kind() == target.engine.kv_transfer_kind() == "trtllm-context-1"
        request = make_request("a", range(100, 140), max_tokens=12)
        (expected,) = await alone.run(request)
        kv = await prefilled_handle(source, request)
        (answer,) = await target.run(replace(request, kv=kv))
        assert answer.token_ids == expected.token_ids
        assert not fake.CONTEXTS, "the decode engine took the KV"
        given = fake.CALLS[-1]["disaggregated"]
        assert (given.request_type, given.first_gen_tokens) == ("generation_only", expected.token_ids[:1])
        while source.engine.load().running_requests:
            await source.step()
        assert source.engine.load().prefilled_tokens == 40


async def test_a_request_goes_to_its_rank(trtllm) -> None:
    with installed("tensorrt_llm.scheduling_params", fake, "1.1.0"):
        async with EngineProbe(adapter.TrtllmEngine(spec(data_parallel=2, kv_blocks=80))) as probe:
            assert probe.info.data_parallel == 2
            requests = [make_request(name, range(40), max_tokens=4) for name in "ab"]
            await probe.run(replace(requests[0], rank=1), requests[1])
            said = [call["scheduling"] for call in fake.CALLS[-2:]]
            assert sorted(each.attention_dp_rank for each in said) == [0, 1]
            assert {each.attention_dp_relax for each in said} == {False}
            assert [rank.generated_tokens for rank in probe.engine.load().ranks] == [4, 4]
