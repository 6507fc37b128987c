"""The requests for which capacity is decided."""

import msgspec

from penstock.core.types.instances import Role
from penstock.core.wire import Wire
from penstock.planner.estimate.slo import Slo
from penstock.runtime.observations import Digest


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

    def is_scant(self, slo: Slo) -> bool:
        """Tell whether the lengths are of fewer requests than the SLO's percentile can be told by."""
        counts = [each.count for each in (self.input_lengths, self.output_lengths)]
        return any(counts) and min(counts) < slo.samples_min
