"""One group of layers, and how many blocks of a prefix it needs."""

from dataclasses import dataclass
from enum import StrEnum


class GroupKind(StrEnum):
    """Which tokens a group's layers attend to, by the names of vLLM's KV events."""

    FULL = "full_attention"
    MLA = "mla_attention"
    SLIDING_WINDOW = "sliding_window"


@dataclass(frozen=True, slots=True)
class KvGroup:
    """Layers with one table of blocks.

    Attributes:
        kind: of their attention; MLA needs the same blocks as full attention, and has fewer bytes.
        layers: their names.
        bytes_per_token: KV of one token in all of these layers.
        window_tokens: a token attends to so many, itself included; None: to all before it.
    """

    kind: GroupKind
    layers: tuple[str, ...]
    bytes_per_token: int
    window_tokens: int | None = None

    def __post_init__(self) -> None:
        if (self.kind is GroupKind.SLIDING_WINDOW) != (self.window_tokens is not None):
            raise ValueError(
                f"window_tokens: {self.window_tokens} for {self.kind}; expected one for a sliding window alone"
            )

    def needed_blocks(self, block_size: int) -> int | None:
        """Count the last blocks of a prefix that have to be there before the next token; None: all of them."""
        return None if self.window_tokens is None else -(-(self.window_tokens - 1) // block_size)
