"""vLLM in a prefill or decode role: vLLM's NixlConnector moves the KV from engine to engine."""

from collections.abc import Mapping
from importlib.util import find_spec
from typing import Any

import msgspec

from penstock.core.errors import ConfigError, RequestError
from penstock.core.log import get_logger
from penstock.core.types.requests import Delta, FinishReason, KvHandle, Request
from penstock.core.wire import NO_TOKENS
from penstock.engine.spec import EngineSpec
from penstock.engine.vllm.engine import VllmEngine
from penstock.engine.vllm.launch.arguments import installed_version
from penstock.engine.vllm.launch.nixl import lease_s, transfer_config
from penstock.engine.vllm.requests import Running

_PAYLOAD_VERSION = 1
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


class NixlVllmEngine(VllmEngine):
    """Implements `NativeKvTransfer` besides `Engine`: a prefill's KV is read by the decode worker's vLLM."""

    def __init__(self, spec: EngineSpec) -> None:
        """Make an engine.

        Raises:
            ConfigError: NIXL is not installed, or the graph's `kv_transfer_config` does not use it.
        """
        if find_spec("nixl") is None:
            wheels = "--no-deps nixl nixl-cu12" if spec.device.startswith("cpu") else "nixl"
            raise ConfigError(
                f"engine vllm: roles prefill and decode transfer KV by NIXL, which is not installed; run `pip install {wheels}`"
            )
        super().__init__(spec)
        self._ttl_s = lease_s(transfer_config(spec))
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

    def _sampling_arguments(self, request: Request) -> dict[str, Any]:
        params = self._transfer_params(request)
        extra = {} if params is None else {"extra_args": {"kv_transfer_params": params}}
        return super()._sampling_arguments(request) | extra

    def _delta(self, running: Running, output: Any) -> Delta:
        delta = super()._delta(running, output)
        request, stats, params = running.request, output.prefill_stats, output.kv_transfer_params
        if request.kv is not None and stats is not None and not running.has_output:
            counts = self._requests.counts[running.rank]
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
