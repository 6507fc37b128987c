"""Load or compute: how much of a prefix is loaded, and when a load is late."""

from collections import Counter
from collections.abc import Callable, Sequence
from typing import TypeVar

ComputeSeconds = Callable[[int, int], float | None]
"""Predicts the seconds to compute so many tokens after so many cached ones; None before anything was measured."""
_Source = TypeVar("_Source")
_LATE_FACTOR = 4.0
_LATE_MARGIN_S = 0.25


def worth_loading(
    runs: Sequence[tuple[_Source, int, int]],
    load_s: Callable[[_Source, int], float],
    compute_s: ComputeSeconds,
    *,
    known_tokens: int,
    cached_tokens: int,
    wait_s: float = 0.0,
) -> int:
    """Return how many leading runs to load for the earliest end; all of them before a prompt was ever computed.

    Sources load at the same time, and each of them its runs one after another.

    Args:
        runs: source, number of blocks, and tokens that need not be computed, of consecutive runs of a prefix.
        load_s: predicts the seconds until a source has loaded so many blocks.
        compute_s: how long the engine computes.
        known_tokens: all tokens of the request.
        cached_tokens: tokens before the first run.
        wait_s: seconds until the engine would begin to compute; what is loaded by then costs nothing.
    """
    best, best_s = 0, compute_s(known_tokens - cached_tokens, cached_tokens)
    num_blocks: Counter[_Source] = Counter()
    slowest_s = 0.0
    for count, (source, blocks, tokens) in enumerate(runs, 1):
        num_blocks[source] += blocks
        slowest_s = max(slowest_s, load_s(source, num_blocks[source]) - wait_s)
        cached_tokens += tokens
        rest_s = compute_s(known_tokens - cached_tokens, cached_tokens)
        if best_s is None or rest_s is None:
            return len(runs)
        if slowest_s + rest_s < best_s:
            best, best_s = count, slowest_s + rest_s
    return best


def late_after_s(load_s: float) -> float:
    """Return the seconds after which a load that was predicted to take `load_s` is given up."""
    return _LATE_MARGIN_S + _LATE_FACTOR * load_s
