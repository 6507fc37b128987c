"""What engines accept as sampling parameters. Frontends may allow less; this is what protects a batch from one request.

The limits are wider than any use, and narrow enough that 32-bit floats and 64-bit integers hold whatever is made of them.
"""

from msgspec.structs import replace

from penstock.core.errors import RequestError
from penstock.core.types.requests import SamplingParams

LOGPROBS_MAX = 100
_RANGES: dict[str, tuple[float, float]] = {
    "temperature": (0, 1000),
    "min_p": (0, 1),
    "presence_penalty": (-100, 100),
    "frequency_penalty": (-100, 100),
    "repetition_penalty": (0.001, 1000),
    "seed": (-(1 << 63), (1 << 63) - 1),
    "logprobs": (0, LOGPROBS_MAX),
}


def checked_sampling(sampling: SamplingParams, *, vocab_size: int, context_length: int) -> SamplingParams:
    """Check the parameters, and replace what asks for more than there is by its equal.

    `top_k` becomes at most the vocabulary, `min_tokens` at most the context; stop ids past the vocabulary, which
    are never sampled, go.

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


def _refusal(name: str, expected: str, value: float) -> RequestError:
    return RequestError(f"{name}: must be {expected}, got {value}", param=name)
