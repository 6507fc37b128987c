"""Prices of an engine that speculates, a token at a time.

A step drafts, verifies and yields several tokens of each request. Whoever counts steps of one token each, as
schedulers do, has them share its time: then every batch decodes as fast as it would, and nobody has to draw how many
drafts are accepted.
"""

from collections.abc import Sequence

from penstock.core.types.events import Tier
from penstock.perf.latency import LatencyModel, Link
from penstock.perf.roofline.roofline import Roofline


def price_per_token(roofline: Roofline) -> LatencyModel:
    """Price an engine by steps that give each sequence one token, whatever its own steps yield."""
    return roofline if roofline.tokens_per_step == 1 else SpeculativeModel(roofline)


class SpeculativeModel:
    """A `LatencyModel` whose decode steps of one token are so many parts of a roofline's step. Stateless.

    A step that also computes prompts gives one token, too, and of its decoding only that token's part is charged: over
    a run the sums are right, and each such step is too short by at most the rest of a decode step.
    """

    def __init__(self, roofline: Roofline) -> None:
        self._step = roofline
        self._part = 1 / roofline.tokens_per_step

    @property
    def kv_bytes_per_token(self) -> float:
        return self._step.kv_bytes_per_token

    @property
    def kv_capacity_tokens(self) -> int:
        return self._step.kv_capacity_tokens

    def prefill_s(self, new_tokens: int, cached_tokens: int = 0) -> float:
        return self._step.prefill_s(new_tokens, cached_tokens)

    def prefill_batch_s(self, chunks: Sequence[tuple[int, int]]) -> float:
        return self._step.prefill_batch_s(chunks)

    def decode_step_s(self, batch: int, context_tokens: int) -> float:
        """Give each sequence one token: a part of a step."""
        return self._part * self._step.decode_step_s(batch, context_tokens)

    def mixed_step_s(self, chunks: Sequence[tuple[int, int]], batch: int, context_tokens: int) -> float:
        """Compute prompts, and give each sequence one token."""
        decode_s = self._step.decode_step_s(batch, context_tokens)
        return self._step.mixed_step_s(chunks, batch, context_tokens) - (1 - self._part) * decode_s

    def transfer_s(self, num_bytes: float, link: Link) -> float:
        return self._step.transfer_s(num_bytes, link)

    def onboard_s(self, num_bytes: float, tier: Tier) -> float:
        return self._step.onboard_s(num_bytes, tier)
