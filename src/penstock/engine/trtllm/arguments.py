"""From an engine spec to the arguments of TensorRT-LLM's `LLM`."""

from collections.abc import Mapping
from types import ModuleType
from typing import Any

from penstock.core.cuda import CUDA_VISIBLE_DEVICES, worker_gpus
from penstock.core.errors import ConfigError
from penstock.core.types.instances import Role
from penstock.engine.launch import EngineLaunch
from penstock.engine.launch_host import LaunchHost
from penstock.engine.spec import EngineSpec
from penstock.engine.streams.package import Package, check_arguments, expect_gpu

PACKAGE = Package(
    engine="trtllm",
    module="tensorrt_llm",
    versions=((1, 1), (2,)),
    install="pip install 'tensorrt-llm>=1.1,<2' --extra-index-url https://pypi.nvidia.com",
    distributions=("tensorrt-llm", "tensorrt_llm"),
)
WRITTEN_FOR = "TensorRT-LLM 1.1"
OURS = {
    "model": "give the model to `penstock serve`",
    "tokenizer": "frontends tokenize",
    "skip_tokenizer_init": "frontends tokenize",
    "max_seq_len": "set context_length",
    "max_num_tokens": "set max_batch_tokens",
    "max_batch_size": "set max_running_requests",
    "tensor_parallel_size": "set tensor_parallel",
    "pipeline_parallel_size": "set pipeline_parallel",
    "moe_expert_parallel_size": "set expert_parallel",
    "enable_attention_dp": "set data_parallel",
    "stream_interval": "workers send every step",
}
"""Arguments that Penstock sets, and what to do instead."""
_DTYPES = ("auto", "float32", "bfloat16", "float16")
_EVENTS_MAX = 65_536
_KV_CACHE_OURS = {"tokens_per_block": "block_size", "max_tokens": "kv_blocks", "dtype": "kv_dtype"}


def engine_launch(spec: EngineSpec, host: LaunchHost) -> EngineLaunch:
    """Describe the start of TensorRT-LLM's `LLM`; needs neither TensorRT-LLM nor a checkpoint.

    Raises:
        ConfigError: Penstock sets an argument of the graph, or TensorRT-LLM cannot have a setting.
    """
    expect_gpu("trtllm", spec.device)
    return EngineLaunch(
        call="tensorrt_llm.llmapi.LLM",
        version=WRITTEN_FOR,
        arguments=make_arguments(spec, frozenset()),
        environment=visible_devices(spec, host.variables),
    )


def make_arguments(spec: EngineSpec, known: frozenset[str]) -> dict[str, Any]:
    """Make the arguments of `LLM`, and check those of the graph.

    Args:
        spec: the engine.
        known: arguments that the installed `LLM` has (`argument_names`); empty: unknown, and names are not checked.

    Raises:
        ConfigError: TensorRT-LLM has no argument of a name, Penstock sets it, or the parallelism has no equal there.
    """
    given = dict(spec.args)
    check_arguments("trtllm", given, known, OURS, "TensorRT-LLM's LLM API")
    if spec.data_parallel > 1 and spec.tensor_parallel > 1:
        raise ConfigError(
            f"data_parallel: engine trtllm gives each rank of data-parallel attention one GPU, so tensor_parallel must be"
            f" 1, got {spec.tensor_parallel}; multiply data_parallel instead, or start more workers"
        )
    if spec.adapters:
        raise ConfigError(
            f"adapters: engine trtllm serves none yet, got {', '.join(spec.adapters)}; leave them out"
        )
    kv_cache = _section(given, "kv_cache_config")
    for name, field in _KV_CACHE_OURS.items():
        if name in kv_cache:
            raise ConfigError(
                f"engine_args.kv_cache_config.{name}: Penstock sets it for engine trtllm; set {field}"
            )
    ranks = spec.data_parallel
    ours = {
        "model": spec.model,
        "skip_tokenizer_init": True,
        "dtype": spec.dtype if spec.dtype in _DTYPES else "auto",  # fp8 and nvfp4 are the checkpoint's own
        "max_seq_len": spec.context_length,
        "max_num_tokens": spec.max_batch_tokens,
        "max_batch_size": spec.max_running_requests,
        "tensor_parallel_size": spec.tensor_parallel * ranks,
        "pipeline_parallel_size": spec.pipeline_parallel,
        "moe_expert_parallel_size": spec.expert_parallel if spec.expert_parallel > 1 else None,
        "enable_attention_dp": ranks > 1 or None,
    }
    chosen = {
        "enable_chunked_prefill": True,  # else prompts beyond max_num_tokens are refused
        "enable_iter_perf_stats": True,
        "disable_overlap_scheduler": True
        if spec.role is Role.PREFILL
        else None,  # it has no context-only requests
        "cache_transceiver_config": None if spec.role is Role.AGGREGATED else {"backend": "DEFAULT"},
    }
    cache = {
        "enable_block_reuse": True,
        "event_buffer_max_size": _EVENTS_MAX,
        **kv_cache,
        "tokens_per_block": spec.block_size,
        "dtype": None if spec.kv_dtype == "auto" else spec.kv_dtype,
        "max_tokens": spec.kv_blocks and spec.kv_blocks // ranks * spec.block_size,
    }
    merged = {**chosen, **given, **ours, "kv_cache_config": _said(cache)}
    return _said(merged)


def argument_names(llmapi: ModuleType) -> frozenset[str]:
    """List the arguments of the installed `LLM`; empty if they cannot be read."""
    arguments = getattr(llmapi, "TorchLlmArgs", None)
    return frozenset(getattr(arguments, "model_fields", None) or ())


def visible_devices(spec: EngineSpec, present: Mapping[str, str]) -> dict[str, str]:
    """Give the variable that leaves a process the worker's GPUs alone: TensorRT-LLM counts its ranks from GPU 0.

    It has to be set before CUDA starts.

    Args:
        spec: the engine.
        present: the environment so far.

    Raises:
        ConfigError: CUDA_VISIBLE_DEVICES has too few GPUs.
    """
    kind, _, index = spec.device.partition(":")
    if kind != "cuda":
        return {}
    names = worker_gpus("trtllm", int(index or 0), spec.local_devices, present)
    return {CUDA_VISIBLE_DEVICES: ",".join(names)}


def _section(given: dict[str, Any], name: str) -> dict[str, Any]:
    value = given.get(name, {})
    if not isinstance(value, Mapping):
        raise ConfigError(f"engine_args.{name}: must be a mapping, got {value!r}")
    return dict(value)


def _said(arguments: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in arguments.items() if value is not None}
