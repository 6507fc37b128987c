"""A worker's KV memory layout: the layers and heads of each rank, and their order in memory.

Workers exchange layouts; a reader derives from both which bytes of the other's blocks it needs (`penstock.transfer.reshard`).
"""

from typing import Self

import msgspec

from penstock.core.errors import ConfigError
from penstock.core.wire import Wire

DIMENSIONS = ("layer", "kv", "block", "token", "head")
REGION_DIMENSIONS = ("layer", "kv")
"""Dimensions that may select the region."""
BLOCK_FIRST = "| block layer kv token head"
"""One region; all layers of a block are contiguous, as in the paged engine."""


class RankLayout(Wire, frozen=True):
    """One rank's KV memory.

    Attributes:
        layers: model layers of this rank, in memory order.
        heads: KV heads of this rank, in memory order.
        num_blocks: size of the rank's pool.
        order: dimensions from the outermost to the innermost. Dimensions left of the bar select a region, dimensions right
            of the bar lie within it. The elements of one head of one token are always innermost and contiguous.
            `| block layer kv token head`: one region, all layers of a block contiguous.
            `layer | kv block token head`: a region per layer, all keys before all values.
            `layer kv | block head token`: a region for the keys and one for the values of each layer, heads before tokens.
        strides_bytes: strides of the dimensions right of the bar; empty if there are no gaps.
        offset_bytes: offset of the first byte in each region.
    """

    layers: tuple[int, ...]
    heads: tuple[int, ...]
    num_blocks: int
    order: str = BLOCK_FIRST
    strides_bytes: tuple[int, ...] = ()
    offset_bytes: int = 0


class KvLayout(Wire, frozen=True):
    """A worker's KV memory over all its ranks.

    Attributes:
        num_layers: layers of the model.
        num_kv_heads: KV heads of the model; 1 for MLA, where all heads share one latent vector.
        head_dim: elements of one head of one token; for MLA, of the latent vector plus its rotary part.
        dtype: the engine's name of the element type.
        element_bytes: size of one element.
        block_size: tokens in a block.
        ranks: in the engine's order; several ranks may hold the same heads.
        planes: 2 for keys and values, 1 for MLA.
    """

    num_layers: int
    num_kv_heads: int
    head_dim: int
    dtype: str
    element_bytes: int
    block_size: int
    ranks: tuple[RankLayout, ...] = ()
    planes: int = 2

    def of_a_block(self) -> Self:
        """Return the layout with one block for each rank: equal for workers whose blocks differ in number alone."""
        ranks = tuple(msgspec.structs.replace(rank, num_blocks=1) for rank in self.ranks)
        return msgspec.structs.replace(self, ranks=ranks)

    def split(self, *, num_blocks: int, tp: int = 1, pp: int = 1, order: str = BLOCK_FIRST) -> Self:
        """Lay the model out over `pp * tp` ranks, as engines do.

        The first `tp` ranks hold the first layers. With more ranks than heads, several ranks hold the same head.

        Args:
            num_blocks: blocks in each rank's pool.
            tp: tensor-parallel ranks, which split the heads of a layer.
            pp: pipeline stages, which split the layers; if that leaves a remainder, the first stages hold one more layer.
            order: see `RankLayout`.

        Raises:
            ConfigError: `tp` and the number of heads do not divide, or `pp` exceeds the number of layers.
        """
        if tp < 1 or max(tp, self.num_kv_heads) % min(tp, self.num_kv_heads):
            raise ConfigError(
                f"tp: {tp} ranks cannot share {self.num_kv_heads} KV heads; one must divide the other"
            )
        if not 1 <= pp <= self.num_layers:
            raise ConfigError(f"pp: must be 1 to {self.num_layers}, one layer each, got {pp}")
        each, more = divmod(self.num_layers, pp)
        starts = [group * each + min(group, more) for group in range(pp + 1)]
        held = max(self.num_kv_heads // tp, 1)
        ranks = (
            RankLayout(
                layers=tuple(range(starts[group], starts[group + 1])),
                heads=tuple(range(first, first + held)),
                num_blocks=num_blocks,
                order=order,
            )
            for group in range(pp)
            for first in (rank * self.num_kv_heads // tp for rank in range(tp))
        )
        return msgspec.structs.replace(self, ranks=tuple(ranks))
