"""Speculative decoding as steps of one token.

A real step drafts, verifies and yields several tokens per request. Schedulers count steps of one token; here each takes
its share of a real step. Batches then decode at the real speed, without drawing the number of accepted drafts.
"""

from collections.abc import Sequence

from penstock.core.types.events import Tier
from penstock.perf.model.parallel import Parallel
from penstock.perf.roofline.roofline import Roofline


def price_per_token(roofline: Roofline) -> "Roofline | SpeculativeModel":
    """Make a latency model whose decode steps yield one token per sequence."""
    return roofline if roofline.tokens_per_step == 1 else SpeculativeModel(roofline)


class SpeculativeModel:
    """A `LatencyModel` whose decode step is the roofline's divided by `tokens_per_step`. Immutable.

    A step with prompts also yields one token and is charged only that token's share of decoding. Sums over a run are
    right; each such step is too short by at most the rest of a decode step.
    """

    def __init__(self, roofline: Roofline) -> None:
        self._step = roofline
        self._part = 1 / roofline.tokens_per_step

    @property
    def parallel(self) -> Parallel:
        return self._step.parallel

    @property
    def verified_tokens(self) -> int:
        return self._step.verified_tokens

    @property
    def kv_bytes_per_token(self) -> float:
        return self._step.kv_bytes_per_token

    @property
    def kv_capacity_tokens(self) -> int:
        return self._step.kv_capacity_tokens

    def kv_held_tokens(self, tokens: float) -> float:
        return self._step.kv_held_tokens(tokens)

    def prefill_s(self, new_tokens: int, cached_tokens: int = 0) -> float:
        return self._step.prefill_s(new_tokens, cached_tokens)

    def prefill_batch_s(self, chunks: Sequence[tuple[int, int]]) -> float:
        return self._step.prefill_batch_s(chunks)

    def decode_step_s(self, batch: int, context_tokens: int) -> float:
        """Seconds of one token per sequence: a share of the real step."""
        return self._part * self._step.decode_step_s(batch, context_tokens)

    def mixed_step_s(self, chunks: Sequence[tuple[int, int]], batch: int, context_tokens: int) -> float:
        """Seconds of prompts and one token per sequence."""
        decode_s = self._step.decode_step_s(batch, context_tokens)
        return self._step.mixed_step_s(chunks, batch, context_tokens) - (1 - self._part) * decode_s

    def onboard_s(self, num_bytes: float, tier: Tier) -> float:
        return self._step.onboard_s(num_bytes, tier)
