"""What is asked of a deployment."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Demand:
    """What every request asks, and how fast it must be answered."""

    input_tokens: int
    output_tokens: int
    ttft_s: float
    itl_s: float
    percentile: float = 90.0
    """Share of requests that must keep each, in percent."""

    @property
    def context_tokens(self) -> float:
        """Mean context of a sequence while it is decoded."""
        return self.input_tokens + self.output_tokens / 2
