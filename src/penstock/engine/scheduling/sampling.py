"""Sampling parameters that engines accept, and the noise keys of sampled positions.

Frontends may allow less; these limits protect a batch from one request. They are wider than any use, and narrow enough
that no 32-bit float or 64-bit integer computed from them overflows.
"""

from typing import Any

import numpy as np
from msgspec.structs import replace
from numpy.typing import NDArray

from penstock.core.errors import RequestError
from penstock.core.types.requests import SamplingParams

LOGPROBS_MAX = 100
PROMPT_LOGPROBS_MAX = 20  # as many rows as a step has tokens have to fit into a frame
BIAS_MAX = 1000
_RANGES: dict[str, tuple[float, float]] = {
    "temperature": (0, 1000),
    "min_p": (0, 1),
    "presence_penalty": (-100, 100),
    "frequency_penalty": (-100, 100),
    "repetition_penalty": (0.001, 1000),
    "seed": (-(1 << 63), (1 << 63) - 1),
    "logprobs": (0, LOGPROBS_MAX),
    "prompt_logprobs": (0, PROMPT_LOGPROBS_MAX),
    "prompt_logprobs_from": (0, (1 << 31) - 1),
}


def checked_sampling(sampling: SamplingParams, *, vocab_size: int, context_length: int) -> SamplingParams:
    """Check the parameters, and clip those beyond what has an effect.

    `top_k` is clipped to the vocabulary and `min_tokens` to the context; stop ids outside the vocabulary are dropped.

    Raises:
        RequestError: a value is out of its range.
    """
    for name, (low, high) in _RANGES.items():
        value = getattr(sampling, name)
        if value is not None and not low <= value <= high:  # NaN is in no range
            raise _refusal(name, f">= {low} and <= {high}", value)
    if not 0 < sampling.top_p <= 1:
        raise _refusal("top_p", "> 0 and <= 1", sampling.top_p)
    if sampling.top_k is not None and sampling.top_k < 1:
        raise _refusal("top_k", ">= 1, or none", sampling.top_k)
    if sampling.min_tokens < 0:
        raise _refusal("min_tokens", ">= 0", sampling.min_tokens)
    _check_tokens(sampling, vocab_size)
    stops = sampling.stop_token_ids
    if stops and min(stops) < 0:
        raise _refusal("stop_token_ids", ">= 0", min(stops))
    top_k = sampling.top_k if sampling.top_k is None else min(sampling.top_k, vocab_size)
    min_tokens = min(sampling.min_tokens, context_length)
    if stops and max(stops) >= vocab_size:
        stops = tuple(token_id for token_id in stops if token_id < vocab_size)
    if (top_k, min_tokens, stops) == (sampling.top_k, sampling.min_tokens, sampling.stop_token_ids):
        return sampling
    return replace(sampling, top_k=top_k, min_tokens=min_tokens, stop_token_ids=stops)


def _check_tokens(sampling: SamplingParams, vocab_size: int) -> None:
    biased = tuple(token_id for token_id, _ in sampling.logit_bias)
    for token_ids in (sampling.allowed_token_ids, biased, *sampling.bad_words):
        lowest, highest = min(token_ids, default=0), max(token_ids, default=0)
        if not 0 <= lowest <= highest < vocab_size:
            raise _refusal(
                "logit_bias, allowed_token_ids, bad_words: token ids",
                f">= 0 and < {vocab_size}",
                lowest if lowest < 0 else highest,
            )
    for _, bias in sampling.logit_bias:
        if not -BIAS_MAX <= bias <= BIAS_MAX:  # NaN is in no range
            raise _refusal("logit_bias", f">= {-BIAS_MAX} and <= {BIAS_MAX}", bias)
    if not all(sampling.bad_words):
        raise _refusal("bad_words", "of one token or more", 0)


def position_keys(keys: NDArray[np.uint64], positions: NDArray[np.integer[Any]]) -> NDArray[np.uint64]:
    """Derive (n,) noise keys of output positions from (n,) keys of requests."""
    return mix64(keys + positions.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15))


def mix64(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Scatter consecutive numbers over all 64 bits.

    Source: SplitMix64's finaliser; Steele, Lea and Flood, "Fast splittable pseudorandom number generators", 2014.
    """
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def _refusal(name: str, expected: str, value: float) -> RequestError:
    return RequestError(f"{name}: must be {expected}, got {value}", param=name)
