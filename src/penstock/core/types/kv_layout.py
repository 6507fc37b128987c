"""Where a worker keeps KV: which layers and heads each of its ranks holds, and how they lie in memory.

Workers exchange it, so that one can work out which bytes of the other's blocks it needs (`penstock.transfer.reshard`).
"""

from typing import Self

import msgspec

from penstock.core.errors import ConfigError
from penstock.core.wire import Wire

DIMENSIONS = ("layer", "kv", "block", "token", "head")
REGION_DIMENSIONS = ("layer", "kv")
"""Those that may choose the region."""
BLOCK_FIRST = "| block layer kv token head"
"""One region, where a block of all layers is together, as in the paged engine."""


class RankLayout(Wire, frozen=True):
    """One rank's KV memory.

    Attributes:
        layers: the model's layers that it holds, as they follow each other in memory.
        heads: the model's KV heads that it holds, likewise.
        num_blocks: in its pool.
        order: the dimensions from the outermost to the innermost. Those left of the bar choose a region, those right
            of it lie within one; the elements of one head of one token are always innermost and together.
            `| block layer kv token head`: one region, a block of all layers together.
            `layer | kv block token head`: a region per layer, all keys before all values.
            `layer kv | block head token`: keys and values of each layer apart, heads before tokens.
        strides_bytes: of the dimensions right of the bar, where there are gaps; empty where there are none.
        offset_bytes: of the first byte in each region.
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
        num_layers: of the model.
        num_kv_heads: of the model; 1 where all heads share one latent vector (MLA).
        head_dim: elements of one head of one token; of the latent vector with what goes with it, for MLA.
        dtype: of the elements, as the engine calls it.
        element_bytes: of one.
        block_size: tokens in a block.
        ranks: in the engine's own order; several may hold the same heads.
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

    def split(self, *, num_blocks: int, tp: int = 1, pp: int = 1, order: str = BLOCK_FIRST) -> Self:
        """Lay the model out over `pp * tp` ranks, as engines do it.

        The first `tp` ranks hold the first layers. With more ranks than heads each head is on several.

        Args:
            num_blocks: in each rank's pool.
            tp: ranks that share the heads of a layer.
            pp: groups of ranks that share the layers; the first ones hold one more where it does not divide.
            order: see `RankLayout`.

        Raises:
            ConfigError: it cannot be divided so.
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
