"""Which latency targets are missed now, and for which workers the late requests waited."""

from penstock.planner.estimate.significance import missed_quantile
from penstock.planner.estimate.slo import Slo
from penstock.planner.observe.observation import Demand

Missed = tuple[float | None, float | None, float | None]
"""TTFT of requests that wait for prefill or aggregated workers, TTFT of those that wait for decode workers, and ITL."""


def missed(demand: Demand, slo: Slo) -> Missed:
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
