"""How large an engine's steps have to be for prompts to be computed about as fast as they can."""

from penstock.core.types.instances import Prices
from penstock.perf.least_squares import num_pairs

_SIZES = tuple(64 << power for power in range(9))
_ABOUT = 0.95


def saturating_tokens(prices: Prices) -> int:
    """Find the fewest tokens in a step, of 64, 128, ... 16,384, that keep an engine as busy as any number does.

    With that many of one prompt, 5 % of the best rate of tokens is missing at most. Fewer pay a step's own cost too often;
    more gain nothing, and hold up whoever is next, and what moves to a decode worker step by step, for longer.
    """
    rates = {size: size / _seconds(prices, size) for size in _SIZES}
    return next(size for size, rate in rates.items() if rate >= _ABOUT * max(rates.values()))


def _seconds(prices: Prices, tokens: int) -> float:
    pairs_s = num_pairs(tokens, 0) * prices.prefill_pair_s
    step_s = prices.prefill_step_s + tokens * prices.prefill_token_s + pairs_s
    return step_s or tokens * 1e-9  # an engine that takes no time is as busy with any step
