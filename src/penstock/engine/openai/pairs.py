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
from penstock.engine.openai.apis.api import Api
from penstock.engine.openai.apis.completions import Completions
from penstock.engine.openai.apis.sglang import SglangGenerate
from penstock.engine.openai.config import ServerConfig

KV_TTL_S = 60.0
"""Time in which the decode worker must fetch the KV; vLLM's own limit is longer (VLLM_NIXL_ABORT_REQUEST_TIMEOUT, 480 s)."""
PARAMS = "kv_transfer_params"
"""The field of vLLM's requests and answers."""
ONE_TOKEN: dict[str, Any] = {"max_tokens": 1, "min_tokens": 1}
"""Fields of a request for a prefill: its token is the decode server's to give."""
VLLM_PREFILL: dict[str, Any] = ONE_TOKEN | {
    PARAMS: {
        "do_remote_decode": True,
        "do_remote_prefill": False,
        "remote_engine_id": None,
        "remote_block_ids": None,
        "remote_host": None,
        "remote_port": None,
    }
}
"""Fields of a prefill for another worker, as vLLM's NIXL connector takes them."""
_WHOLE: dict[str, Any] = {"stream": False, "stream_options": None, "max_completion_tokens": None}
"""Fields of a prefill request whose answer is short, whatever the client asked for."""
SGLANG_TRIAL: dict[str, Any] = {"bootstrap_host": "2.2.2.2", "bootstrap_room": 0}
"""Fields of a request that one SGLang server of a pair answers alone: its `FAKE_BOOTSTRAP_HOST`, as in its own health checks."""
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
    return KvHandle.native(msgspec.json.encode({PARAMS: params}), num_tokens, KV_TTL_S)


def sglang_handle(url: str, config: ServerConfig, num_tokens: int, rng: random.Random) -> KvHandle:
    """Make the handle of a bootstrap room at an SGLang prefill server."""
    return KvHandle.native(msgspec.json.encode(sglang_room(url, config, rng)), num_tokens, KV_TTL_S)


def sglang_room(url: str, config: ServerConfig, rng: random.Random) -> dict[str, Any]:
    """Choose a bootstrap room at an SGLang prefill server; both requests have these fields."""
    return {
        "bootstrap_host": config.bootstrap_host or urlsplit(url).hostname or "",
        "bootstrap_port": config.bootstrap_port,
        "bootstrap_room": rng.randrange(_ROOMS),
    }


def transfer_kind(api: Api) -> str | None:
    """Name how a server with this API transfers KV; None: not at all, as far as is known here."""
    if isinstance(api, SglangGenerate):
        return "http-sglang-1"
    return "http-vllm-1" if isinstance(api, Completions) and api.dialect == "vllm" else None


def http_transfer(
    url: str, api: Api, config: ServerConfig, rng: random.Random
) -> tuple[dict[str, Any], dict[str, Any], tuple[str, ...]]:
    """Make the fields of one transfer from a prefill server, for a gateway that asks both servers over their OpenAI API.

    Returns:
        fields of the prefill request, fields of the decode request, and fields that go from the prefill's answer into the decode
        request. None as a value replaces the client's own.
    """
    if isinstance(api, SglangGenerate):
        room = sglang_room(url, config, rng)
        return _WHOLE | ONE_TOKEN | room, room, ()
    return _WHOLE | VLLM_PREFILL, {}, (PARAMS,)


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
