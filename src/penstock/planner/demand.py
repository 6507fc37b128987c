"""Latency targets, the demand that capacity is decided for, and which targets are missed beyond chance."""

import math
from statistics import NormalDist

import msgspec

from penstock.core.types.instances import Role
from penstock.core.wire import Wire
from penstock.planner.observation import ObservedDemand
from penstock.runtime.observations import Digest


class SloTargets(Wire, frozen=True):
    """`percentile` percent of requests meet each target, in seconds."""

    ttft_s: float
    itl_s: float
    percentile: float = 99.0

    @property
    def samples_min(self) -> int:
        """Requests of which one is beyond the percentile: fewer tell nothing of it."""
        return max(1, round(100 / (100 - self.percentile)))


class ExpectedDemand(Wire, frozen=True):
    """Requests of the next minutes, and what the deployment lacks now.

    Attributes:
        rate_per_s: requests per second at the upper edge of the forecast's band.
        rates: by role, requests of the mean lengths per second that are as much work as is expected at the band's upper edge: where
            more requests come as they get shorter, that is less than `rate_per_s`, which counts for other roles.
        input_tokens: mean prompt tokens of a request, cached ones included.
        output_tokens: mean output tokens of a request.
        cached_share: share of prompt tokens that come from a prefix cache, 0 to 1.
        queued: requests that wait in routers and workers now.
        ttft_s: TTFT at the SLO's percentile now, of requests that wait for prefill or aggregated workers; None if it is met, or too
            few requests were seen to tell.
        itl_s: ITL likewise.
        ttft_factor: measured over predicted TTFT at that percentile; `itl_factor` likewise.
        warm: workers of each role that both are of; others start, or began a moment ago.
        method: the forecast's method.
        input_lengths: distribution of prompt tokens of late; empty if all are taken as equal.
        output_lengths: likewise of output tokens.
        start_s: seconds until a worker that is added now serves.
        decode_ttft_s: TTFT as `ttft_s`, of requests that wait for decode workers.
    """

    rate_per_s: float
    input_tokens: int
    output_tokens: int
    cached_share: float = 0.0
    queued: int = 0
    ttft_s: float | None = None
    itl_s: float | None = None
    ttft_factor: float = 1.0
    itl_factor: float = 1.0
    warm: dict[Role, int] = msgspec.field(default_factory=dict)
    method: str = ""
    input_lengths: Digest = Digest()
    output_lengths: Digest = Digest()
    rates: dict[Role, float] = msgspec.field(default_factory=dict)
    start_s: float = 0.0
    decode_ttft_s: float | None = None

    def rate_of(self, role: Role) -> float:
        """Give the requests per second to provide for in a role."""
        return self.rates.get(role, self.rate_per_s)

    @property
    def spread(self) -> float:
        """Mean square over squared mean of the work of a request, of the lengths that differ most."""
        return max(self.input_lengths.spread, self.output_lengths.spread)

    def is_scant(self, slo: SloTargets) -> bool:
        """Tell whether the lengths are of fewer requests than the SLO's percentile can be told by."""
        counts = [each.count for each in (self.input_lengths, self.output_lengths)]
        return any(counts) and min(counts) < slo.samples_min


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


Missed = tuple[float | None, float | None, float | None]
"""TTFT of requests that wait for prefill or aggregated workers, TTFT of those that wait for decode workers, and ITL."""


def missed(demand: ObservedDemand, slo: SloTargets) -> Missed:
    """Give what each latency is at least at the SLO's percentile; None where its target is met, or may be by chance.

    The percentile is of all requests. A TTFT that is missed by all together, and by neither alone, is charged to the workers
    that more of the late ones waited for.
    """
    decode, percentile = demand.decode_ttft_s, slo.percentile
    other = demand.ttft_s.minus(decode)
    itl_s = missed_quantile(demand.itl_s, slo.itl_s, percentile)
    ttft_s = missed_quantile(other, slo.ttft_s, percentile, others=decode.count)
    decode_ttft_s = missed_quantile(decode, slo.ttft_s, percentile, others=other.count)
    if ttft_s is None and decode_ttft_s is None and decode.count:
        both_s = missed_quantile(demand.ttft_s, slo.ttft_s, percentile)
        if decode.above(slo.ttft_s) > other.above(slo.ttft_s):
            decode_ttft_s = both_s
        else:
            ttft_s = both_s
    return ttft_s, decode_ttft_s, itl_s
