"""The payload of a KvHandle between a prefill server and a decode server of the same kind.

vLLM: the prefill's answer has `kv_transfer_params`, which go into the decode request as they are. SGLang: both requests
get one bootstrap host, port and room, and run at the same time.
"""

import random
from typing import Any
from urllib.parse import urlsplit

import msgspec

from penstock.core.errors import RequestError, StepFailed
from penstock.core.types.requests import KvHandle
from penstock.engine.openai.config import ServerConfig

KV_TTL_S = 60.0
"""Time in which the decode worker must fetch the KV; vLLM's own limit is longer (VLLM_NIXL_ABORT_REQUEST_TIMEOUT, 480 s)."""
VLLM_PREFILL: dict[str, Any] = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}
"""`kv_transfer_params` of a prefill for another worker, as vLLM's NIXL connector takes them."""
_ROOMS = 1 << 63


def vllm_handle(answer: bytes, num_tokens: int) -> KvHandle:
    """Read the answer of a vLLM prefill.

    Raises:
        StepFailed: it has no `kv_transfer_params`.
    """
    try:
        params = _prefilled.decode(answer).kv_transfer_params
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise StepFailed(f"the prefill server's answer is none of vLLM's ({error})") from error
    if not params:
        raise StepFailed(
            "the prefill server gave no kv_transfer_params; start it with --kv-transfer-config, kv_role kv_producer or kv_both"
        )
    return KvHandle.native(msgspec.json.encode({"kv_transfer_params": params}), num_tokens, KV_TTL_S)


def sglang_handle(url: str, config: ServerConfig, num_tokens: int, rng: random.Random) -> KvHandle:
    """Choose a bootstrap room at an SGLang prefill server."""
    host = config.bootstrap_host or urlsplit(url).hostname or ""
    room = {
        "bootstrap_host": host,
        "bootstrap_port": config.bootstrap_port,
        "bootstrap_room": rng.randrange(_ROOMS),
    }
    return KvHandle.native(msgspec.json.encode(room), num_tokens, KV_TTL_S)


def fields_of(payload: bytes) -> dict[str, Any]:
    """Give the fields that a payload adds to a request.

    Raises:
        RequestError: it is not of this engine.
    """
    try:
        return msgspec.json.decode(payload, type=dict[str, Any])
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise RequestError(f"kv: the payload is not of engine openai ({error})", param="kv") from error


class _Prefilled(msgspec.Struct):
    kv_transfer_params: dict[str, Any] | None = None


_prefilled = msgspec.json.Decoder(_Prefilled)
