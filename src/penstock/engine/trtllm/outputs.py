"""From a call to TensorRT-LLM's sampling parameters, from its outputs to ours, and KV handles."""

from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Any

import msgspec

from penstock.core.types.requests import (
    KV_PRIORITY_MAX,
    KV_PRIORITY_MIN,
    FinishReason,
    KvHandle,
    KvRetention,
    TokenLogprob,
)
from penstock.core.wire import Wire
from penstock.engine.streams.backend import Call, Output, stop_tokens

_REASONS = {"stop": FinishReason.STOP, "length": FinishReason.LENGTH, "not_finished": FinishReason.LENGTH}
_SEED_MASK = (1 << 63) - 1
CONTEXT_FIELDS = (
    "first_gen_tokens", "ctx_request_id", "opaque_state", "draft_tokens", "disagg_request_id", "ctx_dp_rank",
    "ctx_info_endpoint",
)  # fmt: skip
"""Fields of `DisaggregatedParams` that go from the context to the generation request; older versions lack the last ones."""
FIRST_LOGPROBS = "first_gen_log_probs"
"""The field with the first token's logprobs. A version without it fails on generation requests that ask for logprobs."""
_Position = float | dict[int, tuple[float, int | None]]
"""Logprobs of one token: its own, or (logprob, rank) of several tokens by their ids."""

_PRIORITY, _PRIORITY_MAX = 35, 100
"""TensorRT-LLM's priority of a block without a hint, and its highest; the lowest is 0."""


class Context(Wire, frozen=True):
    """What a generation request needs of its context request: the payload of `KvHandle`, version 1."""

    first_gen_tokens: list[int] | None = None
    ctx_request_id: int | None = None
    opaque_state: bytes | None = None
    draft_tokens: list[int] | None = None
    disagg_request_id: int | None = None
    ctx_dp_rank: int | None = None
    ctx_info_endpoint: str | None = None
    first_gen_log_probs: list[_Position | list[_Position]] | None = None
    """By position, or by beam and position."""

    @classmethod
    def of(cls, params: Any) -> "Context":
        """Take the fields of a `DisaggregatedParams`."""
        logprobs = getattr(params, FIRST_LOGPROBS, None)
        return cls(
            **{name: getattr(params, name, None) for name in CONTEXT_FIELDS},
            first_gen_log_probs=None if logprobs is None else [_packed(each) for each in logprobs],
        )

    @classmethod
    def read(cls, kv: KvHandle | None) -> "Context | None":
        """Read a handle; None where there is none, or of another version: then the prompt is computed here."""
        if kv is None or not kv.payload:
            return None
        try:
            return msgspec.msgpack.decode(kv.payload, type=cls)
        except msgspec.MsgspecError:
            return None

    def arguments(self, logprob: Callable[..., Any]) -> dict[str, Any]:
        """Give the arguments of `DisaggregatedParams`.

        Args:
            logprob: TensorRT-LLM's class `Logprob`.
        """
        said = {name: value for name in CONTEXT_FIELDS if (value := getattr(self, name)) is not None}
        if self.first_gen_log_probs is not None:
            said[FIRST_LOGPROBS] = [_unpacked(each, logprob) for each in self.first_gen_log_probs]
        return said


def _packed(logprobs: Any) -> Any:
    """Make plain values of TensorRT-LLM's logprobs, whose positions are numbers or `Logprob`s by token id."""
    if isinstance(logprobs, Mapping):
        return {int(token_id): (float(found.logprob), found.rank) for token_id, found in logprobs.items()}
    if isinstance(logprobs, list | tuple):
        return [_packed(each) for each in logprobs]
    return float(logprobs)


def _unpacked(logprobs: Any, logprob: Callable[..., Any]) -> Any:
    if isinstance(logprobs, dict):
        return {token_id: logprob(logprob=value, rank=rank) for token_id, (value, rank) in logprobs.items()}
    if isinstance(logprobs, list):
        return [_unpacked(each, logprob) for each in logprobs]
    return logprobs


def retention_config(api: Any, retention: KvRetention, default_ttl_s: float) -> Any:
    """Make a `KvCacheRetentionConfig` for the prompt and its answer.

    Args:
        api: module `tensorrt_llm.llmapi`.
        retention: of a request.
        default_ttl_s: seconds that a priority above 0 lasts where the request does not say.
    """
    span = _PRIORITY_MAX - _PRIORITY if retention.priority > 0 else _PRIORITY
    steps = KV_PRIORITY_MAX if retention.priority > 0 else -KV_PRIORITY_MIN
    priority = _PRIORITY + round(retention.priority * span / steps)
    ttl_s = retention.ttl_s
    if ttl_s is None and retention.priority > 0:
        ttl_s = default_ttl_s
    duration = None if ttl_s is None else timedelta(seconds=ttl_s)
    prompt = api.KvCacheRetentionConfig.TokenRangeRetentionConfig(0, None, priority, duration)
    return api.KvCacheRetentionConfig([prompt], priority, duration)


def sampling_arguments(call: Call, eos_token_ids: Sequence[int]) -> dict[str, Any]:
    """Make the arguments of `SamplingParams`; what is neutral is left out, as it may choose another kernel.

    Without temperature, top-p and top-k sampling is greedy, so a temperature of 0 sets none of them.
    """
    sampling = call.sampling
    end = eos_token_ids[0] if eos_token_ids else -1
    stops = sampling.stops_with(eos_token_ids[1:])
    arguments: dict[str, Any] = {
        "end_id": end,
        "pad_id": max(end, 0),
        "max_tokens": call.max_new_tokens,
        "min_tokens": call.min_new_tokens or None,
        "stop_token_ids": stops or None,
        "include_stop_str_in_output": True,
        "ignore_eos": sampling.ignore_eos,
        "detokenize": False,
        "add_special_tokens": False,
        "presence_penalty": sampling.presence_penalty or None,
        "frequency_penalty": sampling.frequency_penalty or None,
        "repetition_penalty": None if sampling.repetition_penalty == 1 else sampling.repetition_penalty,
        "logprobs": None if sampling.logprobs is None else max(1, sampling.logprobs),
    }
    if sampling.temperature > 0:
        arguments |= {
            "temperature": sampling.temperature,
            "top_p": None if sampling.top_p == 1 else sampling.top_p,
            "top_k": sampling.top_k,
            "min_p": sampling.min_p or None,
        }
        if sampling.seed is not None:
            arguments["seed"] = (sampling.seed * 1_000_003 + call.request.choice) & _SEED_MASK
    return {name: value for name, value in arguments.items() if value is not None}


def read_result(result: Any, call: Call, eos_token_ids: Sequence[int]) -> Output | None:
    """Translate the state of a `RequestOutput`, whose tokens are the whole output so far; None once it is cancelled."""
    output = result.outputs[0]
    if output.finish_reason == "cancelled":
        return None
    token_ids = list(output.token_ids[call.num_generated :])
    reason = None
    if output.finish_reason is not None:
        reason = _REASONS.get(output.finish_reason, FinishReason.LENGTH)
    if reason is FinishReason.STOP:
        matched = output.stop_reason if isinstance(output.stop_reason, int) else None
        token_ids += stop_tokens(call, token_ids, matched, eos_token_ids)
    logprobs: Sequence[TokenLogprob] = ()
    if call.sampling.logprobs is not None:
        entries = output.logprobs[call.num_generated : call.num_generated + len(token_ids)]
        pairs = zip(token_ids, entries, strict=False)
        logprobs = [_logprob(token_id, entry, call.sampling.logprobs) for token_id, entry in pairs]
    return Output(
        token_ids=token_ids,
        finish_reason=reason,
        cached_tokens=getattr(result, "cached_tokens", 0) or 0,
        logprobs=logprobs,
    )


def _logprob(token_id: int, entry: Any, count: int) -> TokenLogprob:
    """Read one position: the chosen token's logprob, or those of several tokens by their ids."""
    if isinstance(entry, float | int):
        return TokenLogprob(token_id, float(entry))
    ranked = sorted(((each, found.logprob) for each, found in entry.items()), key=lambda pair: -pair[1])
    chosen = entry[token_id].logprob if token_id in entry else ranked[-1][1]
    return TokenLogprob(token_id, chosen, tuple(ranked[:count]))
