"""The workload and targets of a search."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Demand:
    """Token counts of each request, and latency targets."""

    input_tokens: int
    output_tokens: int
    ttft_s: float
    itl_s: float
    percentile: float = 90.0
    """Share of requests that must meet each target, in percent."""

    @property
    def context_tokens(self) -> float:
        """Mean context of a sequence during decode, in tokens."""
        return self.input_tokens + self.output_tokens / 2
