"""TensorRT-LLM's own server as a child of the worker: `trtllm-serve`, from an engine spec.

Names are those of the LLM API of TensorRT-LLM 1.1, which the server takes as a file. The tests run a fake of the server: nobody has
run it on a GPU here.
"""

import json
import os
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from penstock.core.cuda import CUDA_VISIBLE_DEVICES, worker_gpus
from penstock.core.errors import ConfigError
from penstock.core.types.instances import Role
from penstock.engine.launch import EngineLaunch, EnginePackage, LaunchHost, ThisHost, expect_gpu, refuse_own
from penstock.engine.openai.child import ServerCommand
from penstock.engine.spec import EngineSpec

PACKAGE = EnginePackage(
    engine="trtllm",
    module="tensorrt_llm",
    install="pip install tensorrt-llm --extra-index-url https://pypi.nvidia.com",
    distributions=("tensorrt-llm", "tensorrt_llm"),
)
WRITTEN_FOR = "TensorRT-LLM 1.1"
PROGRAM = "trtllm-serve"
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


def trtllm_launch(spec: EngineSpec, host: LaunchHost) -> EngineLaunch:
    """Describe the start of the server; needs neither TensorRT-LLM nor a checkpoint.

    Raises:
        ConfigError: Penstock sets an argument of the graph, or TensorRT-LLM cannot have a setting.
    """
    expect_gpu("trtllm", spec.device)
    return EngineLaunch(
        call=PROGRAM,
        version=WRITTEN_FOR,
        arguments=_arguments(spec),
        environment=_visible_devices(spec, host.variables),
    )


def trtllm_command(launch: EngineLaunch, host: ThisHost) -> ServerCommand:
    """Make the command of a described start, and write its file of arguments.

    Raises:
        ConfigError: the server is not installed.
    """
    beside = os.pathsep.join((str(Path(sys.executable).parent), host.variables.get("PATH", os.defpath)))
    program = shutil.which(PROGRAM, path=beside)
    if program is None:
        raise ConfigError(
            f"engine trtllm: there is no {PROGRAM}; run `{PACKAGE.install}` in the environment of Penstock's workers"
        )
    arguments = dict(launch.arguments)
    model = arguments.pop("model")
    file = Path(host.directory("penstock-trtllm-")) / "arguments.yaml"
    file.write_text(json.dumps(arguments))  # which is YAML too
    port = host.ports("port of the server")[0]
    return ServerCommand(
        engine="trtllm",
        words=(
            program,
            model,
            "--host",
            "127.0.0.1",
            "--port",
            str(port),
            "--extra_llm_api_options",
            str(file),
        ),
        url=f"http://127.0.0.1:{port}",
        environment=launch.environment,
    )


def publishes_events(launch: EngineLaunch) -> bool:
    """Say whether a described server has KV events to tell."""
    cache = launch.arguments["kv_cache_config"]
    return bool(cache["enable_block_reuse"] and cache["event_buffer_max_size"])


def _arguments(spec: EngineSpec) -> dict[str, Any]:
    """Make the arguments of TensorRT-LLM's `LLM`."""
    given = dict(spec.args)
    refuse_own("trtllm", given, OURS)
    if spec.data_parallel > 1 and spec.tensor_parallel > 1:
        raise ConfigError(
            f"data_parallel: engine trtllm gives each rank of data-parallel attention one GPU, so tensor_parallel must be"
            f" 1, got {spec.tensor_parallel}; multiply data_parallel instead, or start more workers"
        )
    if spec.adapters:
        raise ConfigError(
            f"adapters: engine trtllm serves none yet, got {', '.join(spec.adapters)}; leave them out"
        )
    kv_cache = given.get("kv_cache_config", {})
    if not isinstance(kv_cache, Mapping):
        raise ConfigError(f"engine_args.kv_cache_config: must be a mapping, got {kv_cache!r}")
    for name, field in _KV_CACHE_OURS.items():
        if name in kv_cache:
            raise ConfigError(
                f"engine_args.kv_cache_config.{name}: Penstock sets it for engine trtllm; set {field}"
            )
    ranks = spec.data_parallel
    ours = {
        "model": spec.model,
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
        # it has no context-only requests
        "disable_overlap_scheduler": True if spec.role is Role.PREFILL else None,
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


def _visible_devices(spec: EngineSpec, present: Mapping[str, str]) -> dict[str, str]:
    """Leave the server the worker's GPUs alone: TensorRT-LLM counts its ranks from GPU 0.

    Raises:
        ConfigError: CUDA_VISIBLE_DEVICES has too few GPUs.
    """
    kind, _, index = spec.device.partition(":")
    if kind != "cuda":
        return {}
    names = worker_gpus("trtllm", int(index or 0), spec.local_devices, present)
    return {CUDA_VISIBLE_DEVICES: ",".join(names)}


def _said(arguments: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in arguments.items() if value is not None}
