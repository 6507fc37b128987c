"""What is beyond chance in few samples."""

import math
from statistics import NormalDist

from penstock.runtime.observations.windows import Digest

_CHANCE = 0.001
"""Rounds ask every few seconds: what happens in one of a hundred happens every few minutes."""
_MANY = 100
"""From so many expected ones on, a binomial distribution is a normal one."""
_DEVIATIONS = 4.0
"""One in thirty thousand values of a normal distribution is so many deviations above its mean."""


def surely_above(per_s: float, seconds: float, expected_per_s: float) -> bool:
    """Tell whether a rate seen over `seconds` would hardly ever be seen by chance at `expected_per_s`."""
    expected = expected_per_s * seconds
    return per_s * seconds > expected + _DEVIATIONS * math.sqrt(max(expected, 1.0)) + 1


def missed_quantile(digest: Digest, target: float, percentile: float) -> float | None:
    """Give the value at `percentile` if it misses the target beyond chance.

    Returns:
        None if it is met, or if as many values above the target are seen in one of a thousand cases where it is met.
    """
    if not digest.count:
        return None
    value = digest.quantile(percentile / 100)
    assert value is not None, "not empty"
    if value <= target:
        return None
    odds = _odds_of_more(digest.above(target), digest.count, 1 - percentile / 100)
    return value if odds < _CHANCE else None


def _odds_of_more(found: int, count: int, share: float) -> float:
    """Give the odds of at least `found` of `count`, each with the odds `share`."""
    if found <= 0:
        return 1.0
    if (mean := count * share) > _MANY:
        return 1 - NormalDist(mean, math.sqrt(mean * (1 - share))).cdf(found - 0.5)
    below = sum(
        math.exp(
            math.lgamma(count + 1)
            - math.lgamma(k + 1)
            - math.lgamma(count - k + 1)
            + k * math.log(share)
            + (count - k) * math.log1p(-share)
        )
        for k in range(found)
    )
    return max(0.0, 1 - below)
