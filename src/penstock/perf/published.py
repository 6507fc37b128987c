"""Fits a latency model to a few coefficients, which workers publish and routers use.

A router estimates a request's time on a thousand workers in a few array operations. For that, prefill and decode step
times must be sums of costs. `Prices.error` is the error of this.
"""

from collections.abc import Iterator

import numpy as np

from penstock.core.errors import ConfigError
from penstock.core.types.events import Tier
from penstock.core.types.instances import Prices
from penstock.perf.latency import LatencyModel
from penstock.perf.least_squares import fit_non_negative, num_pairs

_NEW_TOKENS = tuple(256 << k for k in range(7))
"""Shorter prompts take the time of reading the weights, which a decode step in the same batch reads anyway."""
_CACHED_TOKENS = (0, 1 << 10, 1 << 12, 1 << 14, 1 << 16)
_BATCHES = (1, 4, 16, 32, 64, 128, 256)
_CONTEXTS = (256, 1 << 10, 1 << 12, 1 << 14)
_ONBOARDED_BYTES = 1e9  # large, so that a transfer's fixed cost is negligible


def publish(latency: LatencyModel, *, context_length: int) -> Prices:
    """Fit coefficients to a latency model by least squares of the relative error, over feasible prompts and batches.

    Args:
        latency: the model; a tier it does not support stays None.
        context_length: longest prompt and sequence, in tokens.
    """
    prompts = list(_prompts(context_length))
    batches = list(_batches(latency, context_length))
    prefill_rows = [(1.0, new, num_pairs(new, cached)) for new, cached in prompts]
    decode_rows = [(1.0, batch, batch * context) for batch, context in batches]
    prefill_s = [latency.prefill_s(new, cached) for new, cached in prompts]
    decode_s = [latency.decode_step_s(batch, batch * context) for batch, context in batches]
    prefill = fit_non_negative(prefill_rows, prefill_s)
    decode = fit_non_negative(decode_rows, decode_s)
    errors = np.concatenate(
        [
            np.array(prefill_rows) @ prefill / prefill_s - 1,
            np.array(decode_rows) @ decode / decode_s - 1,
        ]
    )
    return Prices(
        prefill_step_s=prefill[0],
        prefill_token_s=prefill[1],
        prefill_pair_s=prefill[2],
        decode_step_s=decode[0],
        decode_sequence_s=decode[1],
        decode_token_s=decode[2],
        onboard_token_s=tuple(_onboard_token_s(latency)),
        error=float(np.abs(errors).mean()),
    )


def _prompts(context_length: int) -> Iterator[tuple[int, int]]:
    """Yield (new, cached) tokens; at least three lengths even for a short context, to fit a line."""
    lengths = [n for n in _NEW_TOKENS if n < context_length]
    for new in sorted({*lengths, *(max(context_length * part // 4, 1) for part in (1, 2, 4))}):
        for cached in _CACHED_TOKENS:
            if new + cached <= context_length:
                yield new, cached


def _batches(latency: LatencyModel, context_length: int) -> Iterator[tuple[int, int]]:
    """Yield (batch, context per sequence) whose KV fits; (1, 1) always comes first."""
    room = latency.kv_capacity_tokens or float("inf")
    yield 1, 1
    for batch in _BATCHES:
        for context in _CONTEXTS:
            if context <= context_length and batch * latency.kv_held_tokens(context) <= room:
                yield batch, context


def _onboard_token_s(latency: LatencyModel) -> Iterator[float]:
    if not latency.kv_bytes_per_token:
        return
    tokens = _ONBOARDED_BYTES / latency.kv_bytes_per_token
    for tier in Tier:
        try:
            yield latency.onboard_s(_ONBOARDED_BYTES, tier) / tokens
        except ConfigError:  # a profile without a roofline has no tiers
            return
