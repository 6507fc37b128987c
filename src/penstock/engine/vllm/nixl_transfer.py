"""vLLM in a prefill or decode role: vLLM's NixlConnector moves the KV from engine to engine."""

import dataclasses
import errno
import socket
from collections.abc import Mapping
from importlib.util import find_spec
from typing import Any

import msgspec

from penstock.core.errors import ConfigError, RequestError
from penstock.core.log import get_logger
from penstock.core.types.instances import Role
from penstock.core.types.requests import Delta, FinishReason, KvHandle, Request
from penstock.core.wire import NO_TOKENS
from penstock.engine.spec import EngineSpec
from penstock.engine.vllm.engine import VllmEngine
from penstock.engine.vllm.launch.arguments import installed_version
from penstock.engine.vllm.requests import Running

LEASE_S = 60
"""Seconds that a prefill worker keeps blocks for a decode worker, whose vLLM renews the lease while the request waits."""
_PAYLOAD_VERSION = 1
_NIXL = ("NixlConnector", "NixlPullConnector")
_CPU_CONNECTOR = "penstock.engine.vllm.nixl_connector"
_HOST, _PORT = "VLLM_NIXL_SIDE_CHANNEL_HOST", "VLLM_NIXL_SIDE_CHANNEL_PORT"
_LOOPBACK = "127.0.0.1"
_PORTS_TRIED = 200
_NO_ADDRESS = (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT)
_PREFILL = {
    "do_remote_decode": True, "do_remote_prefill": False,
    "remote_engine_id": None, "remote_block_ids": None, "remote_host": None, "remote_port": None,
}  # fmt: skip
_log = get_logger()


class _Params(msgspec.Struct):
    """What vLLM needs to find the KV; the fields that Penstock checks."""

    remote_engine_id: str
    remote_request_id: str
    remote_host: str
    remote_port: int
    remote_block_ids: list[list[int]]
    remote_num_tokens: int
    tp_size: int


class _Payload(msgspec.Struct, array_like=True):
    version: int
    params: dict[str, Any]


def transfers_kv(spec: EngineSpec) -> bool:
    """Say whether an engine has to be able to send and receive KV: its worker has, or may change to, a role that does."""
    return bool({spec.role, *spec.schedulers} & {Role.PREFILL, Role.DECODE})


def pack_params(params: Mapping[str, Any]) -> bytes:
    """Make a handle's payload of the `kv_transfer_params` with which vLLM ends a prefill."""
    return msgspec.msgpack.encode(_Payload(_PAYLOAD_VERSION, dict(params)))


def unpack_params(payload: bytes) -> dict[str, Any]:
    """Give the `kv_transfer_params` of a decode request.

    Raises:
        ValueError: this is no payload of `pack_params`.
    """
    unpacked = msgspec.msgpack.decode(payload, type=_Payload)
    if unpacked.version != _PAYLOAD_VERSION:
        raise ValueError(f"version {unpacked.version}, expected {_PAYLOAD_VERSION}")
    msgspec.convert(unpacked.params, _Params)
    return unpacked.params | {"do_remote_prefill": True, "do_remote_decode": False}


def transfer_config(spec: EngineSpec) -> dict[str, Any]:
    """Give vLLM's `kv_transfer_config`: the graph's, or one for NixlConnector that may send and receive.

    Raises:
        ConfigError: the graph's has no NixlConnector.
    """
    given = spec.args.get("kv_transfer_config")
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


def transfer_environment(spec: EngineSpec, present: Mapping[str, str]) -> dict[str, str]:
    """Give the variables for NIXL. Variables that the user has set stay; each engine on a host gets its own ports.

    Args:
        spec: the engine.
        present: the environment so far.

    Raises:
        ConfigError: the host is no address of this machine, or there is no free port.
    """
    host = present.get(_HOST, _LOOPBACK)
    variables = {_HOST: host, _PORT: str(_free_ports(host, present.get(_PORT), spec.data_parallel))}
    if _is_cpu(spec):
        variables["UCX_TLS"] = "self,sm,tcp"
        if host == _LOOPBACK:
            variables["UCX_NET_DEVICES"] = "lo"
    return {name: value for name, value in variables.items() if name == _PORT or name not in present}


class NixlVllmEngine(VllmEngine):
    """Implements `NativeKvTransfer` besides `Engine`: a prefill's KV is read by the decode worker's vLLM."""

    def __init__(self, spec: EngineSpec) -> None:
        """Make an engine.

        Raises:
            ConfigError: NIXL is not installed, or the graph's `kv_transfer_config` does not use it.
        """
        if find_spec("nixl") is None:
            wheels = "--no-deps nixl nixl-cu12" if _is_cpu(spec) else "nixl"
            raise ConfigError(
                f"engine vllm: roles prefill and decode transfer KV by NIXL, which is not installed; run `pip install {wheels}`"
            )
        config = transfer_config(spec)
        super().__init__(dataclasses.replace(spec, args={**spec.args, "kv_transfer_config": config}))
        extra = [each.get("kv_connector_extra_config") or {} for each in (config, *_connectors(config))]
        self._ttl_s = float(
            next((one["kv_lease_duration"] for one in extra if "kv_lease_duration" in one), 30)
        )
        self._has_warned = False

    def kv_transfer_kind(self) -> str:
        """Name the transfer by vLLM's version, which must be equal, and by the device, since CPUs and GPUs lay out KV differently."""
        return f"vllm-{installed_version()[1]}-nixl-{_PAYLOAD_VERSION}-{self._spec.device.partition(':')[0]}"

    def check_sleep(self, level: int) -> None:  # noqa: ARG002 - at none
        raise RequestError(
            "engine vllm cannot sleep: NIXL has registered its KV memory, for roles prefill and decode; stop the worker to"
            " free its memory",
            http_status=409,
        )

    def _environment(self, present: Mapping[str, str]) -> dict[str, str]:
        return super()._environment(present) | transfer_environment(self._spec, present)

    def _sampling_arguments(self, request: Request) -> dict[str, Any]:
        params = self._transfer_params(request)
        extra = {} if params is None else {"extra_args": {"kv_transfer_params": params}}
        return super()._sampling_arguments(request) | extra

    def _delta(self, running: Running, output: Any) -> Delta:
        delta = super()._delta(running, output)
        request, stats, params = running.request, output.prefill_stats, output.kv_transfer_params
        if request.kv is not None and stats is not None and not running.has_output:
            counts = self._counts[running.rank]
            counts.prefix_hit_tokens -= stats.num_external_cached_tokens
            counts.kv_failures += stats.num_computed_tokens > 1
        if request.prefill_only and params and delta.finish_reason is FinishReason.LENGTH:
            handle = KvHandle.native(pack_params(params), params["remote_num_tokens"], self._ttl_s)
            return msgspec.structs.replace(delta, token_ids=NO_TOKENS, logprobs=(), kv=handle)
        return delta

    def _transfer_params(self, request: Request) -> dict[str, Any] | None:
        if request.prefill_only:
            return dict(_PREFILL)
        if request.kv is None:
            return None
        try:
            return unpack_params(request.kv.payload)
        except (ValueError, msgspec.MsgspecError) as error:
            if not self._has_warned:
                self._has_warned = True
                _log.warning(
                    "kv_handle_unreadable",
                    request_id=request.request_id,
                    reason=str(error),
                    then="recomputed",
                )
            return None


def _connectors(config: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """List the connectors of a `kv_transfer_config`, those of a MultiConnector singly."""
    children = (config.get("kv_connector_extra_config") or {}).get("connectors")
    return list(children) if config.get("kv_connector") == "MultiConnector" and children else [config]


def _is_cpu(spec: EngineSpec) -> bool:
    return spec.device.startswith("cpu")


def _free_ports(host: str, first: str | None, count: int) -> int:
    """Find `count` successive free ports, from `first` on if that is given; vLLM binds them a moment later."""
    for attempt in range(_PORTS_TRIED):
        port = _port(host, 0) if first is None else int(first) + attempt
        if port is not None and all(_port(host, port + rank) is not None for rank in range(count)):
            return port
    raise ConfigError(
        f"{_PORT}: no {count} successive free ports on {host} from {first or 'the ephemeral ones'} on; set another port"
    )


def _port(host: str, port: int) -> int | None:
    """Bind a port, 0 for any; give its number, None if it is taken."""
    try:
        with socket.create_server((host, port)) as server:
            number: int = server.getsockname()[1]
            return number
    except OSError as error:
        if isinstance(error, socket.gaierror) or error.errno in _NO_ADDRESS:
            raise ConfigError(
                f"{_HOST}: {host} is no address of this machine; set one that it has"
            ) from error
        return None
