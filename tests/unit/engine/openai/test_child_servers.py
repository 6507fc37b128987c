"""Servers of SGLang and TensorRT-LLM as children: their arguments, refusals, start, and end. Fakes take what the engines document."""

import asyncio
import json
import stat
import sys
from contextlib import asynccontextmanager
from itertools import count
from pathlib import Path

import pytest
from msgspec.structs import replace

from penstock.core.errors import ConfigError, EngineError, RequestError
from penstock.core.types.events import BlockStored
from penstock.core.types.instances import CLIENT_SALT, Role
from penstock.core.types.requests import FinishReason
from penstock.demo import MODEL_DIR
from penstock.engine.launch import SymbolicHost, ThisHost
from penstock.engine.openai.child import ChildServerEngine, flags
from penstock.engine.openai.make import make_sglang, make_trtllm
from penstock.engine.openai.sglang_server import sglang_launch
from penstock.engine.openai.trtllm_server import trtllm_launch
from penstock.engine.spec import EngineSpec, NodeGroup
from tests.support.driven_engine import PROMPT, make_request, started
from tests.support.engine_servers import engine_path, sglang_arguments


def spec(**changes) -> EngineSpec:
    fields = {"model": str(MODEL_DIR), "block_size": 8, "context_length": 256, "vocab_size": 256}
    return EngineSpec(**fields | changes)


CPU = {"device": "cpu"}


def nodes(rank: int, size: int = 2) -> NodeGroup:
    return NodeGroup(
        size=size, rank=rank, master_addr="10.0.0.1", master_port=4711, address=f"10.0.0.{rank + 1}"
    )


@pytest.mark.parametrize(
    ("changes", "args", "why"),
    [
        ({}, {}, r"hardware cpu.*roles\.aggregated\.hardware=h100"),
        ({}, CPU | {"tp_size": 2}, r"engine_args\.tp_size: Penstock sets it.*set tensor_parallel"),
        ({"nodes": nodes(0)}, CPU | {"node_rank": 1}, r"node_rank: Penstock sets it.*; nodes does"),
        (
            {"tensor_parallel": 3, "pipeline_parallel": 2, "nodes": nodes(0, 4)}, CPU,
            "tensor_parallel 3 and pipeline_parallel 2 on 4 nodes; set",
        ),
        (
            {"role": Role.PREFILL}, CPU | {"disaggregation_bootstrap_port": "x"},
            "disaggregation_bootstrap_port: must be a port number, got 'x'",
        ),
    ],
)  # fmt: skip
def test_what_sglang_cannot_have_is_refused_with_the_fix(changes, args, why) -> None:
    with pytest.raises(ConfigError, match=why):
        sglang_launch(spec(**changes, args=args), SymbolicHost())


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"device": "cpu"}, "hardware cpu"),
        ({"args": {"max_seq_len": 4096}}, r"engine_args\.max_seq_len: Penstock sets it.*set context_length"),
        ({"args": {"kv_cache_config": {"tokens_per_block": 64}}}, r"tokens_per_block: .* set block_size"),
        ({"tensor_parallel": 2, "data_parallel": 2}, r"tensor_parallel must be 1, got 2"),
    ],
)
def test_what_trtllm_cannot_have_is_refused_with_the_fix(changes, why) -> None:
    with pytest.raises(ConfigError, match=why):
        trtllm_launch(spec(**{"device": "cuda:0"} | changes), SymbolicHost())


def test_the_graph_reaches_sglangs_command_line() -> None:
    graph = spec(
        data_parallel=8, expert_parallel=8, kv_dtype="fp8", dtype="fp8", kv_blocks=800, max_batch_tokens=2048,
        args={"mem_fraction_static": 0.8, "lora_paths": ["a=/a", "b=/b"]}, device="cuda:4",
    )  # fmt: skip
    launch = sglang_launch(graph, SymbolicHost())
    given = sglang_arguments(flags(launch.arguments))
    assert (given.tp_size, given.dp_size, given.ep_size, given.base_gpu_id) == ("8", "8", "8", "4")
    assert given.enable_dp_attention
    assert given.chunked_prefill_size == str(8 * 2048), "SGLang divides it by the ranks"
    assert (given.dtype, given.kv_cache_dtype) == ("auto", "fp8_e4m3")
    assert (given.page_size, given.max_total_tokens) == ("8", "800")
    assert (given.mem_fraction_static, given.lora_paths) == ("0.8", ["a=/a", "b=/b"])
    assert given.max_running_requests is None, "SGLang chooses what the graph leaves open"
    assert (given.disaggregation_mode, given.host, given.api_key) == ("null", "127.0.0.1", None)
    copies = sglang_launch(spec(tensor_parallel=4, data_parallel=2, args=CPU), SymbolicHost()).arguments
    assert (copies["tp_size"], copies["dp_size"]) == (4, 2)
    prefill = sglang_launch(spec(role=Role.PREFILL, args=CPU), SymbolicHost()).arguments
    assert (prefill["host"], prefill["api_key"]) == ("<address of the host>", "<API key>")
    follower = sglang_launch(spec(tensor_parallel=2, nodes=nodes(1), args=CPU), SymbolicHost())
    assert [follower.arguments[name] for name in ("nnodes", "node_rank", "dist_init_addr")] == [2, 1, "10.0.0.1:4711"]  # fmt: skip
    assert follower.kv_events is None, "the leader's first rank publishes"


def test_sglangs_kv_events_stay_on_this_machine() -> None:
    host = ThisHost()
    one = sglang_launch(spec(args=CPU), host)
    config = json.loads(one.arguments["kv_events_config"])
    assert one.kv_events is not None
    assert config["endpoint"] == one.kv_events.endpoint
    directory = Path(config["endpoint"].removeprefix("ipc://")).parent
    assert stat.S_IMODE(directory.stat().st_mode) == 0o700
    host.close()
    assert not directory.exists()
    config = json.loads(sglang_launch(spec(data_parallel=4, args=CPU), host).arguments["kv_events_config"])
    assert config["endpoint"].startswith("tcp://127.0.0.1:")
    assert config["bind"] is True, "else SGLang would connect"
    assert int(config["replay_endpoint"].rpartition(":")[2]) == int(config["endpoint"].rpartition(":")[2]) + 4
    for cacheless in (spec(args=CPU | {"disable_radix_cache": True}), spec(role=Role.DECODE, args=CPU)):
        assert sglang_launch(cacheless, SymbolicHost()).kv_events is None


def test_the_graph_reaches_trtllms_arguments() -> None:
    graph = spec(
        data_parallel=8, expert_parallel=8, kv_dtype="fp8", kv_blocks=800, role=Role.PREFILL, max_batch_tokens=4096,
        max_running_requests=128, device="cuda:0",
        args={"kv_cache_config": {"free_gpu_memory_fraction": 0.7}, "moe_config": {"backend": "WIDEEP"}},
    )  # fmt: skip
    arguments = trtllm_launch(graph, SymbolicHost()).arguments
    assert (arguments["tensor_parallel_size"], arguments["moe_expert_parallel_size"]) == (8, 8)
    assert arguments["enable_attention_dp"]
    assert (arguments["max_num_tokens"], arguments["max_batch_size"]) == (4096, 128), "of each rank"
    cache = arguments["kv_cache_config"]
    assert (cache["tokens_per_block"], cache["max_tokens"], cache["dtype"]) == (8, 800, "fp8")
    assert (cache["free_gpu_memory_fraction"], cache["enable_block_reuse"]) == (0.7, True)
    assert arguments["cache_transceiver_config"] == {"backend": "DEFAULT"}
    assert arguments["disable_overlap_scheduler"] is True
    plain = trtllm_launch(spec(device="cuda:0"), SymbolicHost()).arguments
    assert not plain.keys() & {"cache_transceiver_config", "enable_attention_dp", "max_batch_size"}


# -- processes


@pytest.fixture
def programs(monkeypatch, tmp_path):
    for name, value in engine_path(tmp_path).items():
        monkeypatch.setenv(name, value)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield
    sys.modules.pop("sglang", None)


MAKERS = {"sglang": (make_sglang, {"args": CPU}), "trtllm": (make_trtllm, {"device": "cuda:0"})}


@asynccontextmanager
async def child(name: str, **changes):
    make, fields = MAKERS[name]
    engine = make(spec(**fields | {"context_length": 1024, "vocab_size": 4096} | changes))
    assert isinstance(engine, ChildServerEngine)
    async with started(engine) as case:
        yield case


@pytest.mark.parametrize(
    ("name", "why"), [("sglang", "sglang is not installed"), ("trtllm", "no trtllm-serve")]
)
def test_what_is_missing_is_one_line(monkeypatch, name, why) -> None:
    monkeypatch.setenv("PATH", "")
    make, fields = MAKERS[name]
    with pytest.raises(ConfigError, match=rf"{why}.*; run `pip install"):
        make(spec(**fields))


@pytest.mark.slow
@pytest.mark.usefixtures("programs")
@pytest.mark.parametrize("name", MAKERS)
async def test_a_server_is_started_answers_and_ends_with_its_engine(name) -> None:
    async with child(name, kv_blocks=40 if name == "sglang" else None) as case:
        end = await case.ask(max_tokens=12, ignore_eos=True)
        assert end.finish_reason is FinishReason.LENGTH
        assert len(case.tokens("a")) == 12
        info = await case.engine.start()
        assert (info.total_blocks, info.kv_events) == ({"sglang": 40, "trtllm": 64}[name], True)
        if name == "sglang":
            numbers = count()
            while not any(
                isinstance(event, BlockStored) for event in case.events
            ):  # once its socket is connected
                await case.ask(f"again-{next(numbers)}", max_tokens=2)
        process = case.engine._process._process
        assert process.poll() is None
    assert process.poll() is not None


@pytest.mark.slow
@pytest.mark.usefixtures("programs")
async def test_a_server_that_refuses_an_argument_says_which() -> None:
    engine = make_sglang(spec(args=CPU | {"no_such_thing": 1}))
    with pytest.raises(ConfigError, match=r"did not start: unrecognized arguments: --no-such-thing 1"):
        await engine.start()
    await engine.close()


@pytest.mark.slow
@pytest.mark.usefixtures("programs")
async def test_the_end_of_a_server_ends_the_engine() -> None:
    make, fields = MAKERS["trtllm"]
    engine = make(spec(**fields))
    await engine.start()

    async def read() -> None:
        async for _ in engine.steps():
            pass

    reading = asyncio.create_task(read())
    await asyncio.sleep(0.1)
    engine._process._process.kill()
    with pytest.raises(EngineError, match="its server ended: "):
        await asyncio.wait_for(reading, 60)
    await engine.close()


@pytest.mark.slow
@pytest.mark.usefixtures("programs")
async def test_a_request_goes_to_its_rank_and_one_without_to_the_emptiest() -> None:
    async with child("sglang", data_parallel=2, kv_blocks=80) as case:
        info = await case.engine.start()
        assert (info.data_parallel, info.total_blocks) == (2, 40)
        asked = [make_request(name, max_tokens=4, ignore_eos=True) for name in "abc"]
        for request in (*(replace(each, rank=1) for each in asked[:2]), asked[2]):
            case.engine.submit(request)
        for name in "abc":
            await case.ends(name)
        load = case.engine.load()
        assert [rank.generated_tokens for rank in load.ranks] == [4, 8]
        assert load.generated_tokens == 12


@pytest.mark.slow
@pytest.mark.usefixtures("programs")
async def test_a_salt_that_trtllm_cannot_separate_is_refused() -> None:
    async with child("trtllm") as case:
        with pytest.raises(RequestError, match="cache_salt"):
            case.engine.submit(replace(make_request("a", PROMPT), salt=b"model" + CLIENT_SALT + b"tenant"))
