"""An engine whose steps are sums that are done by hand."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from penstock.perf.model_shape import Parallel


@dataclass
class LinearEngine:
    """A device that takes `step_s` a step, 0.1 ms a prompt token and `sequence_s` a sequence; tensor parallelism divides them."""

    parallel: Parallel = field(default_factory=Parallel)
    step_s: float = 0.010
    sequence_s: float = 1e-4
    kv_capacity_tokens: int = 1_000_000
    kv_bytes_per_token: float = 1000.0
    tokens_per_step: float = 1.0
    verified_tokens: int = 1

    def kv_held_tokens(self, tokens: float) -> float:
        return tokens

    def mixed_step_s(
        self, chunks: Sequence[tuple[float, float]], batch: float, _context_tokens: float
    ) -> float:
        seconds = self.step_s + 1e-4 * sum(new for new, _ in chunks) + self.sequence_s * batch
        return seconds / self.parallel.tp

    def prefill_batch_s(self, chunks: Sequence[tuple[float, float]]) -> float:
        return self.mixed_step_s(chunks, 0, 0)

    def decode_step_s(self, batch: float, context_tokens: float) -> float:
        return self.mixed_step_s((), batch, context_tokens)
