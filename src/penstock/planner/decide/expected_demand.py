"""The requests for which capacity is decided."""

from penstock.core.wire import Wire


class ExpectedDemand(Wire, frozen=True):
    """Requests of the next minutes, and what the deployment lacks now.

    Attributes:
        rate_per_s: requests per second at the upper edge of the forecast's band.
        input_tokens: mean prompt tokens of a request, cached ones included.
        output_tokens: mean output tokens of a request.
        cached_share: share of prompt tokens that come from a prefix cache, 0 to 1.
        queued: requests that wait in routers now.
        ttft_s: TTFT at the SLO's percentile now; None if no request was seen.
        itl_s: ITL at the SLO's percentile now; None if no request was seen.
        method: the forecast's method.
    """

    rate_per_s: float
    input_tokens: int
    output_tokens: int
    cached_share: float = 0.0
    queued: int = 0
    ttft_s: float | None = None
    itl_s: float | None = None
    method: str = ""
