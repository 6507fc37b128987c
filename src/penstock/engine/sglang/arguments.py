"""From an engine spec to SGLang's `ServerArgs`."""

import json
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from penstock.core.cuda import worker_gpus
from penstock.core.errors import ConfigError, EngineError, PenstockError
from penstock.core.types.instances import Role
from penstock.engine.kv_events.subscriber import PublisherAddress
from penstock.engine.launch import EngineLaunch
from penstock.engine.launch_host import LaunchHost, gloo_environment, own_address
from penstock.engine.spec import EngineSpec
from penstock.engine.streams.package import Package, check_arguments, expect_gpu, first_line, supported

PACKAGE = Package(
    engine="sglang",
    module="sglang",
    versions=((0, 5, 12), (0, 6)),
    install="pip install 'sglang>=0.5.12,<0.6'",
)
WRITTEN_FOR = "SGLang 0.5.23"
"""Where the installed version's names are unknown, arguments have the names of this one."""
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
}
"""Arguments that Penstock sets, and what to do instead."""
_OF_NODES = dict.fromkeys(("nnodes", "node_rank", "dist_init_addr"), "nodes does")
"""The same of a role with `nodes`; without it, SGLang's own launcher may start the other nodes."""
_DTYPES = ("auto", "float32", "bfloat16", "float16")
_KV_DTYPES = {"fp8": "fp8_e4m3", "bfloat16": "bfloat16", "auto": "auto"}
_MODES = {Role.AGGREGATED: "null", Role.PREFILL: "prefill", Role.DECODE: "decode"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Arguments:
    """Arguments of `sglang.Engine`, and what the adapter needs of them.

    Attributes:
        server: by the names of `ServerArgs`.
        bootstrap: host and port of a prefill worker's bootstrap server, where decode workers learn of its KV.
        events: where rank 0 publishes its KV events; None: it has no prefix cache, or nobody could read them.
    """

    server: dict[str, Any]
    bootstrap: tuple[str, int | str] | None
    events: PublisherAddress | None = None


def engine_launch(spec: EngineSpec, host: LaunchHost) -> EngineLaunch:
    """Describe the start of `sglang.Engine`; needs neither SGLang nor a checkpoint.

    Raises:
        ConfigError: Penstock sets an argument of the graph, or SGLang cannot have a setting.
    """
    if "device" not in spec.args:
        expect_gpu("sglang", spec.device)
    made = make_arguments(spec, frozenset(), host)
    return EngineLaunch(
        call="sglang.Engine",
        version=WRITTEN_FOR,
        arguments=made.server,
        environment=environment(spec, host),
        kv_events=made.events,
    )


def environment(spec: EngineSpec, host: LaunchHost) -> dict[str, str]:
    """Give the variables to set for the processes of a worker over several nodes, as far as the user has not set them."""
    nodes = spec.nodes
    if nodes is None:
        return {}
    ours = {"SGLANG_HOST_IP": nodes.address, **gloo_environment(host, nodes.address)}
    return {name: value for name, value in ours.items() if name not in host.variables}


def make_arguments(spec: EngineSpec, known: frozenset[str], host: LaunchHost) -> Arguments:
    """Make the arguments of an engine, and check those of the graph.

    Args:
        spec: the engine.
        known: arguments that the installed SGLang has (`server_arg_names`); empty: those of `WRITTEN_FOR`.
        host: gives ports and directories.

    Raises:
        ConfigError: SGLang has no argument of a name, or Penstock sets it.
    """
    given = dict(spec.args)
    refused = OURS if spec.nodes is None else OURS | _OF_NODES
    check_arguments("sglang", given, known, refused, "SGLang's server arguments")
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
    bootstrap = None
    if spec.role is Role.PREFILL:
        if "disaggregation_bootstrap_port" not in given:
            given["disaggregation_bootstrap_port"] = host.ports("bootstrap port")[0]
        elif not str(given["disaggregation_bootstrap_port"]).isdecimal():
            port = given["disaggregation_bootstrap_port"]
            raise ConfigError(
                f"engine_args.disaggregation_bootstrap_port: must be a port number, got {port!r}"
            )
        address = given.get("host") or host.read("address of the host", own_address)
        bootstrap = (str(address), given["disaggregation_bootstrap_port"])
    has_cache = not given.get("disable_radix_cache", False)
    if spec.role is Role.DECODE:
        has_cache = has_cache and bool(given.get("disaggregation_decode_enable_radix_cache", False))
    leads = spec.nodes is None or spec.nodes.rank == 0  # and has the rank that publishes KV events
    publishes = has_cache and leads and host.has_module("zmq")
    events = events_address(spec.data_parallel, host) if publishes else None
    tokens, requests = spec.max_batch_tokens, spec.max_running_requests
    shared = spec.data_parallel if is_attention_dp(spec) else 1  # then SGLang divides its limits by the ranks
    ours = {
        "model_path": spec.model,
        "skip_tokenizer_init": True,
        "incremental_streaming_output": True,
        "stream_output": True,  # its name before incremental_streaming_output
        "page_size": spec.block_size,
        "context_length": spec.context_length,
        "dtype": spec.dtype if spec.dtype in _DTYPES else "auto",  # fp8 and int4 are the checkpoint's own
        "kv_cache_dtype": _KV_DTYPES.get(spec.kv_dtype),
        **_parallel(spec, known),
        **_nodes(spec),
        "base_gpu_id": _first_gpu(spec, host),
        "max_running_requests": requests and requests * shared,
        "chunked_prefill_size": tokens and tokens * shared,
        "max_total_tokens": spec.kv_blocks and spec.kv_blocks // spec.data_parallel * spec.block_size,
        "disaggregation_mode": _MODES[spec.role],
        "kv_events_config": events and json.dumps(_events_config(events)),
        "log_level": "warning",
    }
    names = known or ours.keys()
    if "incremental_streaming_output" in names:
        ours.pop("stream_output")
    server = {**supported(ours, names), **given}
    return Arguments(server=server, bootstrap=bootstrap, events=events)


def is_attention_dp(spec: EngineSpec) -> bool:
    """Whether the data-parallel ranks share the experts: then they are one group, else they are copies of the engine."""
    return spec.data_parallel > 1 and spec.expert_parallel > 1


def _parallel(spec: EngineSpec, known: frozenset[str]) -> dict[str, Any]:
    """Spread the engine over `tensor_parallel` x `pipeline_parallel` x `data_parallel` devices.

    In SGLang the ranks of data-parallel attention are part of `tp_size`; copies of the engine are `dp_size`.
    """
    ranks = spec.data_parallel
    sizes = {
        "tp_size": spec.tensor_parallel,
        "pp_size": spec.pipeline_parallel,
        "ep_size": spec.expert_parallel,
    }
    if not is_attention_dp(spec):
        return {**sizes, "dp_size": ranks}
    sizes["tp_size"] *= ranks
    if not known or "attn_dp_size" in known:
        return {**sizes, "attn_dp_size": ranks}
    return {**sizes, "dp_size": ranks, "enable_dp_attention": True}


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
        endpoint=f"tcp://127.0.0.1:{ports[0]}", replay_endpoint=f"tcp://127.0.0.1:{ports[ranks]}"
    )


def _events_config(address: PublisherAddress) -> dict[str, Any]:
    """Make SGLang's `kv_events_config`."""
    config: dict[str, Any] = {"publisher": "zmq", "topic": ""}
    if address.endpoint.startswith("tcp:"):
        config["bind"] = True  # else it would connect
    return {**config, "endpoint": address.endpoint, "replay_endpoint": address.replay_endpoint}


def start_error(spec: EngineSpec, error: Exception) -> PenstockError:
    """Describe why `sglang.Engine` did not start. A process that ends then may have lost another node, and is no wrong setting."""
    why = first_line(error)
    if spec.nodes is not None and isinstance(error, RuntimeError):
        return EngineError(
            f"engine sglang: cannot start {spec.model}: {why}; SGLang's own lines above say more"
        )
    return ConfigError(
        f"engine sglang: cannot start {spec.model}: {why}; SGLang's own lines above say more, and engine_args sets its arguments"
    )


def server_arg_names(sglang: ModuleType) -> frozenset[str]:
    """List the fields of the installed `ServerArgs`, a dataclass in older versions; empty if they cannot be read."""
    arguments = getattr(getattr(sglang, "Engine", None), "server_args_class", None)
    for fields in ("__struct_fields__", "__dataclass_fields__"):
        if names := getattr(arguments, fields, None):
            return frozenset(names)
    return frozenset()
