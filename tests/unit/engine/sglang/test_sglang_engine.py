"""The SGLang adapter over a fake of the package: start, refusals, disaggregation, aborts."""

import json
import stat
from contextlib import asynccontextmanager, nullcontext
from pathlib import Path

import pytest
from msgspec.structs import replace

from penstock.core.errors import ConfigError, Overloaded
from penstock.core.types.instances import Role
from penstock.core.types.requests import FinishReason, KvHandle
from penstock.engine.launch_host import SymbolicHost, ThisHost
from penstock.engine.sglang.arguments import Arguments, make_arguments, server_arg_names
from penstock.engine.sglang.engine import SglangEngine
from penstock.engine.spec import EngineSpec, NodeGroup
from penstock.seams import NativeKvTransfer
from penstock.testing.engines.probe import EngineProbe, make_request
from penstock.testing.loop import run_async
from tests.fakes import sglang as fake
from tests.fakes.scheduler import installed


@pytest.fixture
def sglang():
    fake.CALLS.clear()
    fake.ROOMS.clear()
    with installed("sglang", fake, "0.5.23") as module:
        yield module


def spec(**changes) -> EngineSpec:
    fields = {
        "model": "tiny",
        "block_size": 8,
        "context_length": 256,
        "vocab_size": 256,
        "args": {"device": "cpu"},
    }
    return EngineSpec(**fields | changes)


def made(of: EngineSpec, host=None) -> Arguments:
    return make_arguments(of, server_arg_names(fake), host or SymbolicHost())


def start(of: EngineSpec) -> None:
    async def main() -> None:
        engine = SglangEngine(of)
        try:
            await engine.start()
        finally:
            await engine.close()

    run_async(main())


@pytest.mark.parametrize(
    ("version", "why"),
    [
        (None, r"sglang is not installed; run `pip install 'sglang>="),
        ("0.5.11.post2", r"supports >=0\.5\.12,<0\.6; run"),
        ("0.6.0rc1", r"supports >=0\.5\.12,<0\.6; run"),
    ],
)
def test_what_to_install_is_one_line(version, why) -> None:
    package = nullcontext() if version is None else installed("sglang", fake, version)
    with package, pytest.raises(ConfigError, match=why) as refused:
        start(spec())
    assert "\n" not in refused.value.message


def nodes(rank: int, size: int = 2, **changes) -> NodeGroup:
    fields = {"master_addr": "10.0.0.1", "master_port": 4711, "address": f"10.0.0.{rank + 1}"} | changes
    return NodeGroup(size=size, rank=rank, **fields)


@pytest.mark.parametrize(
    ("changes", "args", "why"),
    [
        ({}, {}, r"hardware cpu.*roles\.aggregated\.hardware=h100"),
        (
            {},
            {"device": "cpu", "mem_fraction": 0.8},
            r"engine_args\.mem_fraction: .* 'mem_fraction_static'\?",
        ),
        ({}, {"device": "cpu", "tp_size": 2}, r"engine_args\.tp_size: Penstock sets it.*set tensor_parallel"),
        (
            {"nodes": nodes(0)},
            {"device": "cpu", "node_rank": 1},
            r"node_rank: Penstock sets it.*; nodes does",
        ),
        (
            {"tensor_parallel": 3, "pipeline_parallel": 2, "nodes": nodes(0, 4)},
            {"device": "cpu"},
            "tensor_parallel 3 and pipeline_parallel 2 on 4 nodes; set",
        ),
        (
            {"role": Role.PREFILL},
            {"device": "cpu", "disaggregation_bootstrap_port": "x"},
            "disaggregation_bootstrap_port: must be a port number, got 'x'",
        ),
    ],
)
def test_wrong_arguments_are_refused_with_the_fix(sglang, changes, args, why) -> None:
    with pytest.raises(ConfigError, match=why):
        start(spec(**changes, args=args))


def test_the_graph_reaches_the_server_arguments(sglang) -> None:
    graph = spec(
        data_parallel=8, expert_parallel=8, kv_dtype="fp8", dtype="fp8", kv_blocks=800, max_batch_tokens=2048,
        args={"mem_fraction_static": 0.8}, device="cuda:4",
    )  # fmt: skip
    server = made(graph).server
    parallel = [server[name] for name in ("tp_size", "attn_dp_size", "ep_size", "base_gpu_id")]
    assert parallel == [8, 8, 8, 4]
    assert server["chunked_prefill_size"] == 8 * 2048, "SGLang divides it by the ranks"
    assert (server["dtype"], server["kv_cache_dtype"]) == ("auto", "fp8_e4m3")
    assert (server["page_size"], server["max_total_tokens"]) == (8, 800)
    assert server["mem_fraction_static"] == 0.8
    assert "max_running_requests" not in server, "SGLang chooses what the graph leaves open"
    assert server["disaggregation_mode"] == "null"
    copies = made(spec(tensor_parallel=4, data_parallel=2)).server
    assert (copies["tp_size"], copies["dp_size"]) == (4, 2)


def test_kv_events_stay_on_this_machine() -> None:
    host = ThisHost()
    one = made(spec(), host)
    config = json.loads(one.server["kv_events_config"])
    assert one.events is not None
    assert config["endpoint"] == one.events.endpoint
    directory = Path(config["endpoint"].removeprefix("ipc://")).parent
    assert stat.S_IMODE(directory.stat().st_mode) == 0o700
    host.close()
    assert not directory.exists()
    config = json.loads(made(spec(data_parallel=4), host).server["kv_events_config"])
    assert config["endpoint"].startswith("tcp://127.0.0.1:")
    assert config["bind"] is True, "else SGLang would connect"
    assert int(config["replay_endpoint"].rpartition(":")[2]) == int(config["endpoint"].rpartition(":")[2]) + 4
    cacheless = spec(args={"device": "cpu", "disable_radix_cache": True})
    assert made(cacheless).events is made(spec(role=Role.DECODE)).events is None


@asynccontextmanager
async def disaggregated():
    prefill, decode = SglangEngine(spec(role=Role.PREFILL)), SglangEngine(spec(role=Role.DECODE))
    async with EngineProbe(prefill) as source, EngineProbe(decode) as target:
        yield source, target


async def prefilled_handle(source: EngineProbe, request) -> KvHandle:
    source.submit(replace(request, prefill_only=True))
    while True:
        for delta in (await source.step()).deltas:
            assert delta.token_ids == b""
            assert delta.finish_reason is FinishReason.LENGTH
            assert delta.kv is not None
            return delta.kv


async def test_kv_goes_from_a_prefill_to_a_decode_engine_which_refuses_prompts_without_it(sglang) -> None:
    async with disaggregated() as (source, target), EngineProbe(SglangEngine(spec())) as alone:
        assert isinstance(source.engine, NativeKvTransfer)
        assert source.engine.kv_transfer_kind() == target.engine.kv_transfer_kind() == "sglang-bootstrap-1"
        request = make_request("a", range(100, 140), max_tokens=12)
        (expected,) = await alone.run(request)
        kv = await prefilled_handle(source, request)
        assert source.engine.load().queued_prefill_tokens == 40, "the prompt is still computed"
        for handle in (None, replace(kv, payload=json.dumps("not this kind").encode())):
            with pytest.raises(Overloaded, match="sglang: "):
                target.engine.submit(replace(request, kv=handle))
        (answer,) = await target.run(replace(request, kv=kv))
        assert answer.token_ids == expected.token_ids
        prefill, decode = fake.CALLS[-2:]
        for name in ("host", "port", "room"):
            assert prefill[f"bootstrap_{name}"] == decode[f"bootstrap_{name}"] is not None
        while source.engine.load().queued_prefill_tokens:
            await source.step()
        assert source.engine.load().prefilled_tokens == 40


async def test_a_request_goes_to_its_rank_and_one_without_to_the_emptiest(sglang) -> None:
    async with EngineProbe(SglangEngine(spec(data_parallel=2, kv_blocks=80))) as probe:
        info = probe.info
        assert (info.data_parallel, info.prompts_at_once, info.total_blocks) == (2, 1, 40)
        asked = [make_request(name, range(40), max_tokens=4) for name in "abc"]
        await probe.run(*(replace(request, rank=1) for request in asked[:2]), asked[2])
        assert sorted(call["routed_dp_rank"] for call in fake.CALLS[-3:]) == [0, 1, 1]
        ranks = probe.engine.load().ranks
        assert [rank.generated_tokens for rank in ranks] == [4, 8]
        assert probe.engine.load().generated_tokens == 12
