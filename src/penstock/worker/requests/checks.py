"""Checks of a request that need no engine."""

import math
from collections.abc import Collection

from penstock.core.errors import RequestError, Unavailable
from penstock.core.types.instances import OPTIONAL_SAMPLING, EngineInfo
from penstock.core.types.requests import Request
from penstock.core.wire import num_tokens

_HASH_BYTES = 16


def check_request(request: Request, info: EngineInfo, adapters: Collection[str], worker: str) -> None:
    """Refuse a request that cannot be served here.

    Args:
        request: as it arrived.
        info: the engine's info.
        adapters: the worker's LoRA adapters.
        worker: the worker's name, for error texts.

    Raises:
        RequestError: the request is invalid for every worker of this model.
        Unavailable: another worker may be able to serve it.
    """
    if request.deadline_s is not None and math.isnan(request.deadline_s):
        raise RequestError("deadline_s: must be a number of seconds, or none, got nan")
    if request.adapter is not None and request.adapter not in adapters:
        raise Unavailable(f"{worker} does not have adapter {request.adapter!r}; try another worker")
    if request.sampling.structured is not None and not info.structured_outputs:
        raise RequestError(
            "response_format: the engine of this model does not constrain its output, as response_format, structured_outputs and a"
            ' required tool_choice ask for; expected {"type": "text"} or tool_choice "auto"; leave it out, or serve the model with an engine that does: paged or vllm',
            param="response_format",
        )
    if request.embeds and not info.embedding_size:
        raise RequestError(
            f"model: the engine of {request.model!r} makes no embeddings; serve the model with one that does, such as paged",
            param="model",
        )
    for name in OPTIONAL_SAMPLING:
        value = getattr(request.sampling, name)
        if name in info.sampling_fields or value is None or value == ():
            continue
        if name == "prompt_logprobs":
            raise RequestError(
                f"prompt_logprobs: got {value}, by this field or by logprobs with echo: the engine of model {request.model!r} gives"
                " no log-probabilities of prompts; leave it out, or serve the model with an engine that does: paged, mock or vllm",
                param=name,
            )
        raise RequestError(
            f"{name}: the engine of model {request.model!r} does not have it; leave it out, or serve the model with paged",
            param=name,
        )
    for item in () if request.media is None else request.media.items:
        if all(kind.modality != item.modality for kind in info.media):
            raise RequestError(
                f"messages: the engine of model {request.model!r} takes no {item.modality}; leave it out, or serve the model with"
                " an engine that does, such as vllm",
                param="messages",
            )
    expected = num_tokens(request.token_ids) // info.block_size
    if len(request.block_hashes) != expected * _HASH_BYTES:
        raise RequestError(
            f"block_hashes: got {len(request.block_hashes)} bytes, expected {expected} hashes of {_HASH_BYTES} bytes:"
            f" this worker has blocks of {info.block_size} tokens;"
            " use the model card it serves",
            param="block_hashes",
        )
