"""The seam of prices: how long an engine's steps and a byte's way take, in seconds."""

from collections.abc import Sequence
from enum import StrEnum
from typing import Protocol

from penstock.core.types.events import Tier


class Link(StrEnum):
    """What lies between two memories."""

    SCALE_UP = "scale_up"  # one NVLink domain
    SCALE_OUT = "scale_out"  # the network between domains
    HOST = "host"  # a device and its host's memory


class LatencyModel(Protocol):
    """Prices of one engine. Pure: the same question gives the same answer until a correction changes it."""

    @property
    def kv_bytes_per_token(self) -> float: ...

    @property
    def kv_capacity_tokens(self) -> int:
        """Tokens whose KV fits into the engine's memory."""
        ...

    def prefill_s(self, new_tokens: int, cached_tokens: int = 0) -> float:
        """Compute one prompt's `new_tokens` after `cached_tokens` that need no work."""
        ...

    def prefill_batch_s(self, chunks: Sequence[tuple[int, int]]) -> float:
        """Compute several (new, cached) prompts in one step."""
        ...

    def decode_step_s(self, batch: int, context_tokens: int) -> float:
        """Give each of `batch` sequences its next token; `context_tokens` is the sum over them."""
        ...

    def mixed_step_s(self, chunks: Sequence[tuple[int, int]], batch: int, context_tokens: int) -> float:
        """Do both in one step, as chunked prefill does."""
        ...

    def transfer_s(self, num_bytes: float, link: Link) -> float: ...

    def onboard_s(self, num_bytes: float, tier: Tier) -> float:
        """Bring blocks from a lower tier into the device."""
        ...
