"""From an engine spec to SGLang's `ServerArgs`."""

import json
import socket
import tempfile
from dataclasses import dataclass
from importlib.util import find_spec
from types import ModuleType
from typing import Any

from penstock.core.errors import ConfigError
from penstock.core.types.instances import Role
from penstock.engine.kv_events.subscriber import PublisherAddress
from penstock.engine.spec import EngineSpec
from penstock.engine.streams.package import Package, check_arguments, supported

PACKAGE = Package(
    engine="sglang",
    module="sglang",
    versions=((0, 5, 12), (0, 6)),
    install="pip install 'sglang>=0.5.12,<0.6'",
)
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
        scratch: directory of sockets, for the engine to remove; None without any.
    """

    server: dict[str, Any]
    bootstrap: tuple[str, int] | None
    events: PublisherAddress | None = None
    scratch: str | None = None


def make_arguments(spec: EngineSpec, sglang: ModuleType, gpu: int) -> Arguments:
    """Make the arguments of an engine, and check those of the graph.

    Raises:
        ConfigError: SGLang has no argument of a name, or Penstock sets it.
    """
    given = dict(spec.args)
    known = server_arg_names(sglang)
    check_arguments("sglang", given, known, OURS, "SGLang's server arguments")
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
        port = given.setdefault("disaggregation_bootstrap_port", free_port())
        bootstrap = (given.get("host") or own_address(), int(port))
    has_cache = not given.get("disable_radix_cache", False)
    if spec.role is Role.DECODE:
        has_cache = has_cache and bool(given.get("disaggregation_decode_enable_radix_cache", False))
    published, events, scratch = None, None, None
    if has_cache and find_spec("zmq") is not None:
        published, events, scratch = _events(spec.data_parallel)
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
        "base_gpu_id": gpu,
        "max_running_requests": requests and requests * shared,
        "chunked_prefill_size": tokens and tokens * shared,
        "max_total_tokens": spec.kv_blocks and spec.kv_blocks // spec.data_parallel * spec.block_size,
        "disaggregation_mode": _MODES[spec.role],
        "kv_events_config": published and json.dumps(published),
        "log_level": "warning",
    }
    names = known or ours.keys() - {"stream_output"}
    if "incremental_streaming_output" in names:
        ours.pop("stream_output")
    server = {**supported(ours, names), **given}
    return Arguments(server=server, bootstrap=bootstrap, events=events, scratch=scratch)


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
    if "attn_dp_size" in known:
        return {**sizes, "attn_dp_size": ranks}
    return {**sizes, "dp_size": ranks, "enable_dp_attention": True}


def _events(ranks: int) -> tuple[dict[str, Any], PublisherAddress, str | None]:
    """Choose where KV events go, out of reach of other machines.

    One rank publishes at a socket in a private directory. Several add their rank to a port, and bind the loopback address.

    Returns:
        SGLang's `kv_events_config`, the address to read from, and the directory to remove.
    """
    config: dict[str, Any] = {"publisher": "zmq", "topic": ""}
    if ranks == 1:
        scratch = tempfile.mkdtemp(prefix="penstock-sglang-")
        address = PublisherAddress(
            endpoint=f"ipc://{scratch}/events", replay_endpoint=f"ipc://{scratch}/replay"
        )
    else:
        scratch = None
        first = free_port(2 * ranks)
        address = PublisherAddress(
            endpoint=f"tcp://127.0.0.1:{first}", replay_endpoint=f"tcp://127.0.0.1:{first + ranks}"
        )
        config["bind"] = True  # else it would connect
    return (
        {**config, "endpoint": address.endpoint, "replay_endpoint": address.replay_endpoint},
        address,
        scratch,
    )


def server_arg_names(sglang: ModuleType) -> frozenset[str]:
    """List the fields of the installed `ServerArgs`, a dataclass in older versions; empty if they cannot be read."""
    arguments = getattr(getattr(sglang, "Engine", None), "server_args_class", None)
    for fields in ("__struct_fields__", "__dataclass_fields__"):
        if names := getattr(arguments, fields, None):
            return frozenset(names)
    return frozenset()


def free_port(count: int = 1) -> int:
    """Find a TCP port that is free, with the `count` - 1 ports above it."""
    for _ in range(100):
        with socket.socket() as first:
            first.bind(("", 0))
            port = int(first.getsockname()[1])
            if port + count <= 65_536 and all(_is_free(port + number) for number in range(1, count)):
                return port
    raise ConfigError(f"no {count} free TCP ports in a row; end other programs of this machine")


def own_address() -> str:
    """Find the address by which this machine reaches others; the loopback address without a network."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # RFC 5737: nobody; UDP sends nothing
        except OSError:
            return "127.0.0.1"
        return str(probe.getsockname()[0])


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind(("", port))
        except OSError:
            return False
        return True
