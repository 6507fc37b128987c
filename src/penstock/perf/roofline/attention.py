"""Seconds of attention without projections: query-key pairs in prefill, KV reads in decode."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Attention:
    """Attention of all layers of one engine.

    windows:               (window in tokens or None, number of such layers)
    flops_per_pair:        FLOPs per (query, key) pair and layer, all heads
    decode_flops_per_pair: the same in decode, where MLA works on latent vectors
    kv_elements_per_token: KV elements per token and layer
    devices:               devices over which the heads are split
    kv_shards:             devices over which one sequence's KV is split
    """

    windows: tuple[tuple[int | None, int], ...]
    flops_per_pair: int
    decode_flops_per_pair: int
    kv_elements_per_token: int
    kv_element_bytes: float
    devices: int
    kv_shards: int
    flops_per_s: float
    kv_bytes_per_s: float

    def prefill_s(self, pairs: float) -> float:
        """Seconds of `pairs` (query, key) pairs, summed over the layers."""
        return pairs * self.flops_per_pair / self.devices / self.flops_per_s

    def decode_s(self, queries: float, batch: float, context_tokens: float) -> float:
        """Seconds to read the batch's KV once, or of the arithmetic if larger, as with MLA."""
        if batch <= 0:
            return 0.0
        tokens = 0.0
        for window, count in self.windows:
            tokens += count * (context_tokens if window is None else min(context_tokens, batch * window))
        kv_bytes = tokens * self.kv_elements_per_token * self.kv_element_bytes / self.kv_shards
        flops = tokens * queries / batch * self.decode_flops_per_pair / self.devices
        return max(kv_bytes / self.kv_bytes_per_s, flops / self.flops_per_s)


def causal_pairs(new: int, cached: int, window: int | None) -> float:
    """Count the keys attended by `new` queries after `cached` tokens."""
    end = cached + new
    if window is None or end <= window:
        return new * cached + new * (new + 1) / 2
    growing = max(0, window - cached)  # queries whose window covers all earlier tokens
    return growing * cached + growing * (growing + 1) / 2 + (new - growing) * window
