"""From a call to SGLang's keyword arguments, and from its chunks to outputs."""

from collections.abc import Sequence
from typing import Any

from penstock.core.errors import Overloaded, PenstockError, RequestError, StepFailed
from penstock.core.types.requests import FinishReason, TokenLogprob
from penstock.engine.streams.backend import Call, Output, stop_tokens

_SEED_MASK = (1 << 31) - 1
_REASONS = {"stop": FinishReason.STOP, "length": FinishReason.LENGTH}


def generate_arguments(call: Call, rid: str, eos_token_ids: Sequence[int] = ()) -> dict[str, Any]:
    """Make the arguments of `Engine.async_generate`, with end-of-sequence tokens beside those that SGLang knows."""
    sampling = call.sampling
    params: dict[str, Any] = {
        "max_new_tokens": call.max_new_tokens,
        "min_new_tokens": call.min_new_tokens,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": -1 if sampling.top_k is None else sampling.top_k,
        "min_p": sampling.min_p,
        "presence_penalty": sampling.presence_penalty,
        "frequency_penalty": sampling.frequency_penalty,
        "repetition_penalty": sampling.repetition_penalty,
        "stop_token_ids": sampling.stops_with(eos_token_ids),
        "ignore_eos": sampling.ignore_eos,
    }
    if sampling.seed is not None:
        params["sampling_seed"] = (sampling.seed * 1_000_003 + call.request.choice) & _SEED_MASK
    return {
        "input_ids": call.token_ids,
        "sampling_params": params,
        "return_logprob": sampling.logprobs is not None,
        "top_logprobs_num": sampling.logprobs or 0,
        "lora_path": call.request.adapter,
        "cache_salt": call.salt,
        "priority": call.request.priority or None,
        "stream": True,
        "rid": rid,
    }


def read_chunk(chunk: dict[str, Any], call: Call, eos_token_ids: Sequence[int]) -> Output:
    """Translate a chunk of a stream.

    `completion_tokens` counts the whole output: the last ids of the chunk that it counts beyond those read are new, whether
    the chunk is an increment or the output so far.

    Raises:
        PenstockError: the engine ended the request with an error.
    """
    meta = chunk["meta_info"]
    finish = meta.get("finish_reason")
    if finish is not None and finish["type"] == "abort":
        raise _refusal(finish)
    new = max(0, meta["completion_tokens"] - call.num_generated)
    token_ids = list(chunk["output_ids"])[-new:] if new else []
    logprobs = _logprobs(meta, len(token_ids)) if call.sampling.logprobs is not None else ()
    reason = None if finish is None else _REASONS.get(finish["type"], FinishReason.LENGTH)
    if reason is FinishReason.STOP:
        matched = finish.get("matched")
        token_ids += stop_tokens(
            call, token_ids, matched if isinstance(matched, int) else None, eos_token_ids
        )
    return Output(
        token_ids=token_ids,
        finish_reason=reason,
        cached_tokens=meta.get("cached_tokens") or 0,
        logprobs=logprobs,
        preemptions=meta.get("num_retractions") or 0,
    )


def _logprobs(meta: dict[str, Any], count: int) -> Sequence[TokenLogprob]:
    """Read the last `count` of (logprob, token id, text), which are increments as the ids are."""
    if not count:
        return ()
    chosen = meta["output_token_logprobs"][-count:]
    tops = (meta.get("output_top_logprobs") or [])[-count:] or [None] * count
    return [
        TokenLogprob(token_id, logprob, tuple((other, value) for value, other, *_ in top or ()))
        for (logprob, token_id, *_), top in zip(chosen, tops, strict=True)
    ]


def _refusal(finish: dict[str, Any]) -> PenstockError:
    message, status = str(finish.get("message") or "aborted"), finish.get("status_code")
    status = int(status) if status is not None else None
    if status == 400:
        return RequestError(f"sglang refuses the request: {message}")
    if status in (429, 503):
        return Overloaded(f"sglang: {message}", retry_after_s=1.0)
    return StepFailed(f"sglang ended the request: {message}")
