"""How much KV a request holds: layers with a sliding window hold the last window, the others the whole context."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class KvFootprint:
    """KV of one request, counted in tokens of the layers over the whole context.

    Example: 18 layers with a window of 128 beside 18 without. A token of 18 layers is the unit, and a request of 1,000
    tokens holds 1,128.

    token_bytes: KV bytes of one token in the layers over the whole context; in all layers if each has a window
    windows:     (window in tokens, bytes of one token in its layers over `token_bytes`) for each size of window
    grows:       whether any layer is over the whole context
    """

    token_bytes: float
    windows: tuple[tuple[int, float], ...] = ()
    grows: bool = True

    def held_tokens(self, tokens: float) -> float:
        """Count what a request of `tokens` tokens holds, in tokens of the layers over the whole context."""
        if not self.windows:
            return tokens
        windows = sum(share * min(tokens, window) for window, share in self.windows)
        return tokens + windows if self.grows else windows
