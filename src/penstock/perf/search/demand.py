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
    cached_tokens: int = 0
    """Prompt tokens found in the prefix cache of whoever computes the prompt."""
    input_spread: float = 1.0
    """Mean square of the lengths of prompts over the square of their mean; 1 if all are equal."""
    output_spread: float = 1.0
    """Likewise of answers."""

    @property
    def context_tokens(self) -> float:
        """Mean context of a sequence during decode, in tokens."""
        return self.input_tokens + self.output_spread * self.output_tokens / 2
