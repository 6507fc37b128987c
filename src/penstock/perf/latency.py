"""The interface of latency models: seconds of engine steps and of loads from lower tiers."""

from collections.abc import Sequence
from typing import Protocol

from penstock.core.types.events import Tier


class LatencyModel(Protocol):
    """Latency estimates of one engine. Pure: equal arguments give equal results."""

    @property
    def kv_bytes_per_token(self) -> float:
        """KV bytes of one more token of a long context: in the layers that have no sliding window, if any has none."""
        ...

    @property
    def kv_capacity_tokens(self) -> int:
        """Tokens of `kv_bytes_per_token` that fit into the engine's memory."""
        ...

    def kv_held_tokens(self, tokens: float) -> float:
        """Tokens of `kv_bytes_per_token` that a request of `tokens` tokens holds, sliding windows included."""
        ...

    def prefill_s(self, new_tokens: int, cached_tokens: int = 0) -> float:
        """Seconds to prefill `new_tokens` of one prompt after `cached_tokens` found in the cache."""
        ...

    def prefill_batch_s(self, chunks: Sequence[tuple[int, int]]) -> float:
        """Seconds of one step with several (new, cached) prompts."""
        ...

    def decode_step_s(self, batch: int, context_tokens: int) -> float:
        """Seconds of one decode step of `batch` sequences; `context_tokens` is the sum of their lengths."""
        ...

    def mixed_step_s(self, chunks: Sequence[tuple[int, int]], batch: int, context_tokens: int) -> float:
        """Seconds of one step with prefill chunks and decode, as with chunked prefill."""
        ...

    def onboard_s(self, num_bytes: float, tier: Tier) -> float:
        """Seconds to load blocks from a lower tier into the device."""
        ...
