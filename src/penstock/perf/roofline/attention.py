"""Attention proper: pairs of queries and keys while prompts are computed, reading the KV while decoding."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Attention:
    """All layers of one model on one engine.

    windows:               (tokens or None, layers that see so many)
    flops_per_pair:        of one layer's heads
    decode_flops_per_pair: the same for decoding: MLA works on the latent vectors themselves
    kv_elements_per_token: of one layer
    devices:               that share the heads
    kv_shards:             devices that hold different parts of one sequence's KV
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
        """Price so many (query, key) pairs, counted over the layers."""
        return pairs * self.flops_per_pair / self.devices / self.flops_per_s

    def decode_s(self, queries: float, batch: float, context_tokens: float) -> float:
        """Price reading the batch's KV once; MLA's arithmetic on latents can outweigh it."""
        if batch <= 0:
            return 0.0
        tokens = 0.0
        for window, count in self.windows:
            tokens += count * (context_tokens if window is None else min(context_tokens, batch * window))
        kv_bytes = tokens * self.kv_elements_per_token * self.kv_element_bytes / self.kv_shards
        flops = tokens * queries / batch * self.decode_flops_per_pair / self.devices
        return max(kv_bytes / self.kv_bytes_per_s, flops / self.flops_per_s)


def causal_pairs(new: int, cached: int, window: int | None) -> float:
    """Count the keys that `new` queries after `cached` tokens see."""
    end = cached + new
    if window is None or end <= window:
        return new * cached + new * (new + 1) / 2
    growing = max(0, window - cached)  # queries that still see all that is before them
    return growing * cached + growing * (growing + 1) / 2 + (new - growing) * window
