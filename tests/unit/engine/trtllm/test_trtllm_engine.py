"""The TensorRT-LLM adapter over a fake of the package: start, refusals, disaggregation, aborts."""

import dataclasses
from contextlib import asynccontextmanager
from datetime import timedelta
from types import SimpleNamespace

import msgspec
import pytest
from msgspec.structs import replace

from penstock.core.errors import ConfigError, RequestError
from penstock.core.types.instances import Role
from penstock.core.types.requests import FinishReason, KvHandle, KvRetention, SamplingParams
from penstock.engine.launch_host import SymbolicHost
from penstock.engine.spec import EngineSpec
from penstock.engine.streams.backend import Call
from penstock.engine.trtllm import engine as adapter
from penstock.engine.trtllm.arguments import argument_names, engine_launch, make_arguments, visible_devices
from penstock.engine.trtllm.outputs import Context, read_result, sampling_arguments
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


def test_without_the_package_one_line_says_what_to_install() -> None:
    with pytest.raises(
        ConfigError, match=r"tensorrt_llm is not installed; run `pip install 'tensorrt-llm>="
    ) as refused:
        start(spec())
    assert "\n" not in refused.value.message


@pytest.mark.parametrize("version", ["0.21.0", "1.0.0", "2.0.0rc1"])
def test_another_version_is_refused(version) -> None:
    with (
        installed("tensorrt_llm", fake, version),
        pytest.raises(ConfigError, match=r"supports >=1\.1,<2; run"),
    ):
        start(spec())


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


@pytest.mark.parametrize(
    ("method", "error", "why"),
    [
        (
            "__init__",
            ValueError(
                "1 validation error for TorchLlmArgs\nkv_cache_config.fraction\n  Extra inputs\n more"
            ),
            r".*kv_cache_config\.fraction: Extra inputs",
        ),
        ("generate_async", RuntimeError("Executor worker failed"), "RuntimeError: Executor worker failed"),
    ],
)
def test_a_failed_start_is_one_line(trtllm, monkeypatch, method, error, why) -> None:
    def fail(self, *_, **__):
        raise error

    monkeypatch.setattr(fake.LLM, method, fail)
    with pytest.raises(ConfigError, match=f"cannot start tiny: {why}") as refused:
        start(spec())
    assert "\n" not in refused.value.message


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


def test_a_worker_sees_its_own_gpus_alone() -> None:
    for visible, expected in ((None, "4,5"), ("9,8,7,6,5,4", "5,4")):
        present = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
        found = visible_devices(spec(device="cuda:4", tensor_parallel=2), present)
        assert found == {"CUDA_VISIBLE_DEVICES": expected}
    assert visible_devices(spec(device="cpu"), {}) == {}
    with pytest.raises(ConfigError, match="needs GPUs 4 to 5, CUDA_VISIBLE_DEVICES has 2"):
        visible_devices(spec(device="cuda:4", tensor_parallel=2), {"CUDA_VISIBLE_DEVICES": "0,1"})


def test_a_start_has_the_arguments_of_the_description(trtllm, monkeypatch) -> None:
    given = {}
    init = fake.LLM.__init__
    monkeypatch.setattr(
        fake.LLM, "__init__", lambda self, **kwargs: given.update(kwargs) or init(self, **kwargs)
    )
    of = spec(
        role=Role.PREFILL, max_batch_tokens=512, args={"kv_cache_config": {"free_gpu_memory_fraction": 0.7}}
    )
    described = engine_launch(dataclasses.replace(of, device="cuda:0"), SymbolicHost())
    start(of)
    assert given == described.arguments
    assert engine_launch(spec(device="cuda:2"), SymbolicHost()).environment == {"CUDA_VISIBLE_DEVICES": "2"}


def _call(**sampling) -> Call:
    request = make_request("a", range(5), sampling=SamplingParams(max_tokens=9, **sampling))
    return Call(
        number=1,
        request=request,
        token_ids=[0],
        sampling=request.sampling,
        max_new_tokens=9,
        min_new_tokens=0,
    )


def test_greedy_requests_set_nothing_that_samples() -> None:
    greedy = sampling_arguments(_call(temperature=0.0, top_p=0.5, top_k=3, seed=1), (2, 4))
    assert not greedy.keys() & {"temperature", "top_p", "top_k", "min_p", "seed"}
    assert (greedy["end_id"], greedy["stop_token_ids"]) == (2, [4]), "a model may have several end tokens"
    assert sampling_arguments(_call(ignore_eos=True), (2, 4)).get("stop_token_ids") is None
    assert sampling_arguments(_call(), (2,))["temperature"] == 1.0, "without it TensorRT-LLM would be greedy"


def test_outputs_are_cumulative_and_logprobs_may_be_numbers() -> None:
    call = _call(logprobs=1)
    call.num_generated = 1
    output = fake.CompletionOutput(
        token_ids=[5, 6], logprobs=[-0.1, {6: fake.Logprob(-0.7), 9: fake.Logprob(-0.2)}]
    )
    read = read_result(SimpleNamespace(outputs=[output], cached_tokens=0), call, (2,))
    assert list(read.token_ids) == [6]
    (only,) = read.logprobs
    assert (only.token_id, only.logprob, only.top) == (6, -0.7, ((9, -0.2),))
    output.logprobs = [-0.1, -0.7]
    assert read_result(SimpleNamespace(outputs=[output]), call, ()).logprobs[0].logprob == -0.7


def test_a_handle_of_another_kind_is_computed_anew() -> None:
    assert Context.read(None) is None
    assert Context.read(KvHandle.native(b"\xc1nonsense", 3, 1.0)) is None
    context = Context(first_gen_tokens=[3], ctx_request_id=1, opaque_state=b"\x00\xff")
    assert Context.read(KvHandle.native(msgspec.msgpack.encode(context), 3, 1.0)) == context
    assert context.arguments(fake.Logprob) == {
        "first_gen_tokens": [3],
        "ctx_request_id": 1,
        "opaque_state": b"\x00\xff",
    }


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


def test_kv_goes_from_a_prefill_to_a_decode_engine(trtllm) -> None:
    async def main() -> None:
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

    run_async(main())


def test_the_first_tokens_logprobs_go_from_prefill_to_decode(trtllm) -> None:
    sampling = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True, logprobs=2)
    asking = make_request("a", range(100, 140), sampling=sampling)

    async def main() -> None:
        async with disaggregated() as (source, target), EngineProbe(adapter.TrtllmEngine(spec())) as alone:
            (expected,) = await alone.run(asking)
            without = make_request("b", range(100, 140), max_tokens=12)
            for prefilled, request_type in ((asking, "generation_only"), (without, None)):
                kv = await prefilled_handle(source, prefilled)
                (answer,) = await target.run(replace(asking, kv=kv))
                assert (answer.error, answer.token_ids) == (None, expected.token_ids)
                assert answer.logprobs == expected.logprobs
                given = fake.CALLS[-1]["disaggregated"]
                assert (given and given.request_type) == request_type, "without them it computes the prompt"

    run_async(main())


def test_logprobs_of_every_shape_survive_the_wire() -> None:
    positions = [-0.5, {3: fake.Logprob(-0.7, 1), 5: fake.Logprob(float("-inf"))}]
    for given in (positions, [positions]):
        context = Context.of(fake.DisaggregatedParams(first_gen_log_probs=given))
        read = Context.read(KvHandle.native(msgspec.msgpack.encode(context), 3, 1.0))
        assert read.arguments(fake.Logprob)["first_gen_log_probs"] == given
    malformed = msgspec.msgpack.encode({"first_gen_log_probs": ["x"]})
    assert Context.read(KvHandle.native(malformed, 3, 1.0)) is None


@pytest.mark.parametrize(
    ("asked", "priority", "ttl_s"),
    [
        (KvRetention(priority=7), 100, 60),
        (KvRetention(priority=-8), 0, None),
        (KvRetention(priority=0, ttl_s=5), 35, 5),
        (KvRetention(priority=2, ttl_s=1.5), 54, 1.5),
    ],
)
def test_retention_reaches_tensorrt_llm_on_its_scale(trtllm, asked, priority, ttl_s) -> None:
    async def main() -> None:
        async with EngineProbe(adapter.TrtllmEngine(spec())) as probe:
            await probe.run(make_request("a", range(100, 110)))
            assert fake.CALLS[-1]["retention"] is None
            await probe.run(replace(make_request("b", range(100, 110)), retention=asked))
            config = fake.CALLS[-1]["retention"]
            (prompt,) = config.token_range_retention_configs
            duration = None if ttl_s is None else timedelta(seconds=ttl_s)
            assert (prompt.token_start, prompt.token_end) == (0, None)
            assert (prompt.priority, prompt.duration_ms) == (priority, duration)
            assert (config.decode_retention_priority, config.decode_duration_ms) == (priority, duration)
            with pytest.raises(RequestError, match=r"kv_retention\.ttl_s: must be <= 3600"):
                probe.submit(replace(make_request("c", [1]), retention=KvRetention(priority=1, ttl_s=1e6)))

    run_async(main())


def test_without_kv_a_decode_engine_computes_the_prompt(trtllm) -> None:
    async def main() -> None:
        async with disaggregated() as (source, target):
            request = make_request("a", range(100, 140), max_tokens=12)
            (answer,) = await target.run(request)
            kv = await prefilled_handle(source, request)
            (again,) = await target.run(replace(request, kv=replace(kv, payload=b"\xc1")))
            assert answer.token_ids == again.token_ids
            fake.CONTEXTS.clear()  # as if the prefill worker had been lost
            (failed,) = await target.run(replace(request, kv=kv))
            assert failed.error is not None
            assert failed.error.code == "step_failed", "the router tries it elsewhere"

    run_async(main())


def test_an_abort_waits_for_kv_that_is_on_its_way(trtllm) -> None:
    async def main() -> None:
        async with disaggregated() as (source, target):
            request = make_request("a", range(100, 140), max_tokens=100)
            kv = await prefilled_handle(source, request)
            target.submit(replace(request, kv=kv))
            target.abort("a")
            assert not fake.ABORTED
            (other,) = await target.run(make_request("b", range(50), max_tokens=30))
            assert len(other.token_ids) == 30
            assert len(fake.ABORTED) == 1
            assert target.engine.load().running_requests == 0

    run_async(main())


def test_a_request_goes_to_its_rank(trtllm) -> None:
    async def main() -> None:
        with installed("tensorrt_llm.scheduling_params", fake, "1.1.0"):
            async with EngineProbe(adapter.TrtllmEngine(spec(data_parallel=2, kv_blocks=80))) as probe:
                assert probe.info.data_parallel == 2
                requests = [make_request(name, range(40), max_tokens=4) for name in "ab"]
                await probe.run(replace(requests[0], rank=1), requests[1])
                said = [call["scheduling"] for call in fake.CALLS[-2:]]
                assert sorted(each.attention_dp_rank for each in said) == [0, 1]
                assert {each.attention_dp_relax for each in said} == {False}
                assert [rank.generated_tokens for rank in probe.engine.load().ranks] == [4, 4]

    run_async(main())
