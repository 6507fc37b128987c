"""What is beyond chance in few samples."""

import math
from statistics import NormalDist

from penstock.runtime.observations import Digest

_CHANCE = 0.001
"""Rounds ask every few seconds: what happens in one of a hundred happens every few minutes."""
_MANY = 100
"""From so many expected ones on, a binomial distribution is a normal one."""
_DEVIATIONS = 4.0
"""One in thirty thousand values of a normal distribution is so many deviations above its mean."""


def surely_above(per_s: float, seconds: float, expected_per_s: float, spread: float = 1.0) -> bool:
    """Tell whether a rate seen over `seconds` would hardly ever be seen by chance at `expected_per_s`.

    `spread` is the mean square over the squared mean of what each arrival counts: of work, requests are as few as their lengths differ.
    """
    seen, expected = per_s * seconds / spread, expected_per_s * seconds / spread
    return seen > expected + _DEVIATIONS * math.sqrt(max(expected, 1.0)) + 1


def missed_quantile(digest: Digest, target: float, percentile: float, *, others: int = 0) -> float | None:
    """Give what the value at `percentile` is at least, if that misses the target beyond chance.

    The value itself says too much: of fifty requests, the 99th percentile is the worst one.

    Args:
        digest: the values.
        target: what they should not exceed.
        percentile: the share of values that should not, 0 to 100.
        others: further values, which do not.

    Returns:
        The largest bucket's middle that the percentile is below in one of a thousand cases only; None if even the target is not.
    """
    count = digest.count + others
    share, above, surely = 1 - percentile / 100, 0, None
    for value, number in sorted(digest.values(), reverse=True):
        if value <= target:
            break
        above += number
        if _odds_of_more(above, count, share) < _CHANCE:
            surely = value
            break
    return surely


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
