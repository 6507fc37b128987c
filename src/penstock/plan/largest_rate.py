"""The largest rate that a deployment sustains, searched with a few trials."""

import math
from collections.abc import Callable
from typing import NamedTuple


class Bracket(NamedTuple):
    """The ends of a search, in requests per second."""

    low: float
    """The largest rate that was kept; 0 where no rate was."""
    high: float
    """The smallest rate that was not kept; infinite where every rate was."""


def largest_rate(
    is_kept: Callable[[float], bool],
    start_per_s: float,
    *,
    step: float,
    precision: float,
    known_per_s: float = 0.0,
    least_per_s: float = 0.0,
    most_per_s: float = math.inf,
) -> Bracket:
    """Search the largest rate for which `is_kept` holds, if `is_kept` holds for all smaller rates.

    Args:
        is_kept: runs one trial at a rate.
        start_per_s: rate of the first trial.
        step: factor between trials until one rate is kept and one is not. Each later trial halves the bracket geometrically.
        precision: the search ends once `high <= low * (1 + precision)`.
        known_per_s: a rate that is known to be kept.
        least_per_s: no rate at or below this one is tried.
        most_per_s: no rate at or above this one is tried.
    """
    low, high, rate_per_s = known_per_s, math.inf, start_per_s
    while high > low * (1 + precision) and least_per_s < rate_per_s < most_per_s:
        if is_kept(rate_per_s):
            low = rate_per_s
        else:
            high = rate_per_s
        if not low:
            rate_per_s = high / step
        elif math.isinf(high):
            rate_per_s = low * step
        else:
            rate_per_s = math.sqrt(low * high)
    return Bracket(low, high)
