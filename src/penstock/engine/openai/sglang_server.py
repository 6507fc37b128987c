"""SGLang's own server as a child of the worker: `python -m sglang.launch_server`, from an engine spec.

Names are those of SGLang 0.5.23; those that newer versions have renamed are the older ones, which both take. The tests run a fake
of the server: nobody has run it on a GPU here.
"""

import json
import secrets
import sys
import time
import urllib.request
from collections.abc import Callable
from typing import Any

from penstock.core.cuda import worker_gpus
from penstock.core.errors import ConfigError, EngineError
from penstock.core.types.instances import Role
from penstock.engine.kv_events.subscriber import PublisherAddress
from penstock.engine.launch import (
    EngineLaunch,
    EnginePackage,
    LaunchHost,
    ThisHost,
    expect_gpu,
    gloo_environment,
    own_address,
    refuse_own,
)
from penstock.engine.openai.child import ServerCommand, ServerProcess, flags, start_error
from penstock.engine.spec import EngineSpec

PACKAGE = EnginePackage(engine="sglang", module="sglang", install="pip install sglang")
WRITTEN_FOR = "SGLang 0.5.23"
OURS = {
    "model_path": "give the model to `penstock serve`",
    "tokenizer_path": "frontends tokenize",
    "skip_tokenizer_init": "frontends tokenize",
    "incremental_streaming_output": "the adapter reads increments",
    "stream_output": "the adapter reads increments",
    "page_size": "set block_size",
    "context_length": "set context_length",
    "tp_size": "set tensor_parallel",
    "pp_size": "set pipeline_parallel",
    "dp_size": "set data_parallel",
    "ep_size": "set expert_parallel",
    "attn_dp_size": "set data_parallel and expert_parallel",
    "enable_dp_attention": "set data_parallel and expert_parallel",
    "base_gpu_id": "the supervisor assigns GPUs",
    "disaggregation_mode": "the worker's role is its mode",
    "kv_events_config": "workers publish KV events",
    "port": "the worker chooses a free one",
    "api_key": "the worker chooses one",
    "enable_metrics": "the worker reads them",
}
"""Arguments that Penstock sets, and what to do instead."""
_OF_NODES = dict.fromkeys(("nnodes", "node_rank", "dist_init_addr"), "nodes does")
"""The same of a role with `nodes`; without it, SGLang's own launcher may start the other nodes."""
_DTYPES = ("auto", "float32", "bfloat16", "float16")
_KV_DTYPES = {"fp8": "fp8_e4m3", "bfloat16": "bfloat16", "auto": "auto"}
_MODES = {Role.AGGREGATED: "null", Role.PREFILL: "prefill", Role.DECODE: "decode"}
_LOOPBACK = "127.0.0.1"
_POLL_S = 0.2
_HEALTH_S = 5.0


def sglang_launch(spec: EngineSpec, host: LaunchHost) -> EngineLaunch:
    """Describe the start of the server; needs neither SGLang nor a checkpoint.

    Raises:
        ConfigError: Penstock sets an argument of the graph, or SGLang cannot have a setting.
    """
    if "device" not in spec.args:
        expect_gpu("sglang", spec.device)
    arguments, events = _arguments(spec, host)
    return EngineLaunch(
        call="python -m sglang.launch_server",
        version=WRITTEN_FOR,
        arguments=arguments,
        environment=_environment(spec, host),
        kv_events=events,
    )


def sglang_command(launch: EngineLaunch) -> ServerCommand:
    """Make the command of a described start.

    Raises:
        ConfigError: SGLang is not installed.
    """
    PACKAGE.need()
    arguments = launch.arguments
    return ServerCommand(
        engine="sglang",
        words=(sys.executable, "-m", "sglang.launch_server", *flags(arguments)),
        url=f"http://{arguments['host']}:{arguments['port']}",
        environment=launch.environment,
        api_key=arguments.get("api_key"),
        spans_nodes="node_rank" in arguments,
    )


def sglang_follows(spec: EngineSpec, ready: Callable[[], None]) -> None:
    """Run SGLang's launcher for this node's ranks of a worker over several nodes; block until it ends.

    Args:
        spec: the engine, with `nodes`.
        ready: called once the ranks have loaded their parts: then the launcher answers health checks.

    Raises:
        ConfigError: SGLang is missing.
        EngineError: the launcher has ended.
    """
    command = sglang_command(sglang_launch(spec, ThisHost()))
    process = ServerProcess(command)
    process.start()
    while not process.ended.done():
        try:
            with urllib.request.urlopen(f"{command.url}/health", timeout=_HEALTH_S):  # noqa: S310 - http
                break
        except OSError:
            time.sleep(_POLL_S)
    else:
        raise start_error(command, process.ended.result())
    process.has_answered()
    ready()
    raise EngineError(f"sglang: its launcher of this node ended: {process.ended.result()}")


def _arguments(spec: EngineSpec, host: LaunchHost) -> tuple[dict[str, Any], PublisherAddress | None]:
    """Make the server's arguments by the names of `ServerArgs`, and the address of its KV events; None: it publishes none."""
    given = dict(spec.args)
    refuse_own("sglang", given, OURS if spec.nodes is None else OURS | _OF_NODES)
    if spec.kv_dtype not in _KV_DTYPES and "kv_cache_dtype" not in given:
        raise ConfigError(
            f"kv_dtype: engine sglang has {', '.join(_KV_DTYPES)}, got {spec.kv_dtype!r}; or set"
            " engine_args.kv_cache_dtype"
        )
    if spec.adapters and "lora_paths" not in given:
        raise ConfigError(
            f"engine_args.lora_paths: engine sglang needs the directories of the adapters {', '.join(spec.adapters)}, as in"
            f" {{lora_paths: [{spec.adapters[0]}=/path]}}"
        )
    address = str(given.get("host") or _LOOPBACK)
    if spec.role is Role.PREFILL:
        bootstrap = given.setdefault("disaggregation_bootstrap_port", host.ports("bootstrap port")[0])
        if "disaggregation_bootstrap_port" in spec.args and not str(bootstrap).isdecimal():
            raise ConfigError(
                f"engine_args.disaggregation_bootstrap_port: must be a port number, got {bootstrap!r}"
            )
        if "host" not in given:  # its bootstrap server is there too, where decode workers of other hosts ask
            address = host.read("address of the host", own_address)
    has_cache = not given.get("disable_radix_cache", False)
    if spec.role is Role.DECODE:
        has_cache = has_cache and bool(given.get("disaggregation_decode_enable_radix_cache", False))
    leads = spec.nodes is None or spec.nodes.rank == 0  # and has the rank that publishes KV events
    publishes = has_cache and leads and host.has_module("zmq")
    events = events_address(spec.data_parallel, host) if publishes else None
    tokens, requests = spec.max_batch_tokens, spec.max_running_requests
    shared = (
        spec.data_parallel if _is_attention_dp(spec) else 1
    )  # then SGLang divides its limits by the ranks
    key = None if address == _LOOPBACK else host.read("API key", lambda: secrets.token_hex(16))
    ours = {
        "model_path": spec.model,
        "host": address,
        "port": host.ports("port of the server")[0],
        "api_key": key,
        "enable_metrics": True,
        "skip_tokenizer_init": True,
        "stream_output": True,
        "page_size": spec.block_size,
        "context_length": spec.context_length,
        "dtype": spec.dtype if spec.dtype in _DTYPES else "auto",  # fp8 and int4 are the checkpoint's own
        "kv_cache_dtype": _KV_DTYPES.get(spec.kv_dtype),
        **_parallel(spec),
        **_nodes(spec),
        "base_gpu_id": _first_gpu(spec, host),
        "max_running_requests": requests and requests * shared,
        "chunked_prefill_size": tokens and tokens * shared,
        "max_total_tokens": spec.kv_blocks and spec.kv_blocks // spec.data_parallel * spec.block_size,
        "disaggregation_mode": _MODES[spec.role],
        "kv_events_config": events and json.dumps(_events_config(events)),
        "log_level": "warning",
    }
    return {name: value for name, value in ours.items() if value is not None} | given, events


def _environment(spec: EngineSpec, host: LaunchHost) -> dict[str, str]:
    """Give the variables to set for the processes of a worker over several nodes, as far as the user has not set them."""
    nodes = spec.nodes
    if nodes is None:
        return {}
    ours = {"SGLANG_HOST_IP": nodes.address, **gloo_environment(host, nodes.address)}
    return {name: value for name, value in ours.items() if name not in host.variables}


def _is_attention_dp(spec: EngineSpec) -> bool:
    """Say whether the data-parallel ranks share the experts: then they are one group, else they are copies of the engine."""
    return spec.data_parallel > 1 and spec.expert_parallel > 1


def _parallel(spec: EngineSpec) -> dict[str, Any]:
    """Spread the engine over `tensor_parallel` x `pipeline_parallel` x `data_parallel` devices.

    In SGLang the ranks of data-parallel attention are part of `tp_size`; copies of the engine are `dp_size`.
    """
    ranks = spec.data_parallel
    sizes: dict[str, Any] = {
        "tp_size": spec.tensor_parallel,
        "pp_size": spec.pipeline_parallel,
        "ep_size": spec.expert_parallel,
        "dp_size": ranks,
    }
    if _is_attention_dp(spec):
        sizes |= {"tp_size": spec.tensor_parallel * ranks, "enable_dp_attention": True}
    return sizes


def _nodes(spec: EngineSpec) -> dict[str, Any]:
    """Spread the engine over nodes: whole pipeline stages on each, or a stage over several.

    Raises:
        ConfigError: the nodes would have unequal parts, which SGLang does not notice: it would wait for ranks that no node starts.
    """
    nodes = spec.nodes
    if nodes is None:
        return {}
    stages = spec.pipeline_parallel
    per_stage, unequal = (
        (nodes.size // stages, nodes.size % stages) if nodes.size > stages else (1, stages % nodes.size)
    )
    if unequal or spec.tensor_parallel % per_stage:
        raise ConfigError(
            f"nodes: engine sglang puts whole pipeline stages on a node, or a stage on several nodes in equal parts, got"
            f" tensor_parallel {spec.tensor_parallel} and pipeline_parallel {stages} on {nodes.size} nodes; set tensor_parallel"
            f" to a multiple of {nodes.size} and pipeline_parallel to 1, or pipeline_parallel to a multiple of {nodes.size}"
        )
    host = f"[{nodes.master_addr}]" if ":" in nodes.master_addr else nodes.master_addr
    return {"nnodes": nodes.size, "node_rank": nodes.rank, "dist_init_addr": f"{host}:{nodes.master_port}"}


def _first_gpu(spec: EngineSpec, host: LaunchHost) -> int:
    """Give the index of the worker's first GPU; 0 where `engine_args` name another kind of device.

    Raises:
        ConfigError: the worker's GPUs are not visible.
    """
    kind, _, index = spec.device.partition(":")
    if kind != "cuda" or "device" in spec.args:
        return 0
    worker_gpus("sglang", first := int(index or 0), spec.local_devices, host.variables)
    return first


def events_address(ranks: int, host: LaunchHost) -> PublisherAddress:
    """Choose where KV events go, out of reach of other machines.

    One rank publishes at a socket in a private directory. Several add their rank to a port, and bind the loopback address.
    """
    if ranks == 1:
        directory = host.directory("penstock-sglang-")
        return PublisherAddress(
            endpoint=f"ipc://{directory}/events", replay_endpoint=f"ipc://{directory}/replay"
        )
    ports = host.ports("KV events port", 2 * ranks)
    return PublisherAddress(
        endpoint=f"tcp://{_LOOPBACK}:{ports[0]}", replay_endpoint=f"tcp://{_LOOPBACK}:{ports[ranks]}"
    )


def _events_config(address: PublisherAddress) -> dict[str, Any]:
    """Make SGLang's `kv_events_config`."""
    config: dict[str, Any] = {"publisher": "zmq", "topic": ""}
    if address.endpoint.startswith("tcp:"):
        config["bind"] = True  # else it would connect
    return {**config, "endpoint": address.endpoint, "replay_endpoint": address.replay_endpoint}
