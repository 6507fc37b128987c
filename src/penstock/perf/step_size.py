"""The smallest prefill step at full utilization."""

from penstock.core.types.instances import Prices
from penstock.perf.least_squares import num_pairs

_SIZES = tuple(64 << power for power in range(9))
_ABOUT = 0.95


def saturating_tokens(prices: Prices) -> int:
    """Find the smallest step, of 64, 128, ... 16,384 tokens, with about the best token rate.

    Its rate is at most 5 % below the best. Smaller steps pay the fixed cost of a step too often. Larger ones gain nothing,
    and delay the next prompt and the KV transfer, which goes step by step.
    """
    rates = {size: size / _seconds(prices, size) for size in _SIZES}
    return next(size for size, rate in rates.items() if rate >= _ABOUT * max(rates.values()))


def _seconds(prices: Prices, tokens: int) -> float:
    pairs_s = num_pairs(tokens, 0) * prices.prefill_pair_s
    step_s = prices.prefill_step_s + tokens * prices.prefill_token_s + pairs_s
    return step_s or tokens * 1e-9  # an engine with zero step time has the same rate at any size
