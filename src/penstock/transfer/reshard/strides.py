"""From a layout to bytes: which region, and where in it, each (layer, keys or values, block, token, head) lies."""

from dataclasses import dataclass
from math import prod
from typing import Self

import numpy as np
from numpy.typing import NDArray

from penstock.core.descriptors import OffsetArray
from penstock.core.errors import TransferRefused
from penstock.core.types.kv import DIMENSIONS, REGION_DIMENSIONS, KvLayout, RankLayout

IndexArray = NDArray[np.intp]

_PIECES_MAX = 1 << 22
"""Heads of tokens in a block of one rank; a layout with more is a mistake, or not meant well."""
_REGION_BYTES_MAX = 1 << 62
_BAR = "|"


@dataclass(frozen=True, slots=True)
class Strides:
    """One rank's memory. `region_steps` and `byte_steps` are by dimension; 0 where there is nothing to step to.

    Attributes:
        num_blocks: blocks in the rank's pool.
        num_regions: memory regions of the rank.
        region_bytes: size that each region needs.
        region_steps: regions from one layer to the next, and from keys to values.
        byte_steps: bytes from one to the next within a region.
        offset: of the first byte in a region.
    """

    num_blocks: int
    num_regions: int
    region_bytes: int
    region_steps: dict[str, int]
    byte_steps: dict[str, int]
    offset: int

    @classmethod
    def of(cls, layout: KvLayout, rank: RankLayout) -> Self:
        """Work out where a rank has what.

        Raises:
            TransferRefused: the layout contradicts itself.
        """
        extents = _extents(layout, rank)
        outer, inner = _dimensions(rank.order)
        steps, num_regions = dict.fromkeys(DIMENSIONS, 0), 1
        for dimension in reversed(outer):
            steps[dimension] = num_regions
            num_regions *= extents[dimension]
        byte_steps = dict.fromkeys(DIMENSIONS, 0)
        given = rank.strides_bytes
        if given and len(given) != len(inner):
            raise TransferRefused(
                f"strides_bytes: {len(given)} for the {len(inner)} dimensions {' '.join(inner)}; give one for each, or none"
            )
        end = layout.head_dim * layout.element_bytes
        for index in reversed(range(len(inner))):
            dimension, stride = inner[index], given[index] if given else end
            if extents[dimension] > 1 and stride < end:
                raise TransferRefused(
                    f"strides_bytes: {stride} from one {dimension} to the next, which has {end} bytes: they would overlap"
                )
            if extents[dimension] > 1:
                byte_steps[dimension] = stride
                end += (extents[dimension] - 1) * stride
        end += rank.offset_bytes
        if rank.offset_bytes < 0 or end > _REGION_BYTES_MAX:
            raise TransferRefused(
                f"offset_bytes {rank.offset_bytes}: a region from there would end at {end} bytes"
            )
        return cls(rank.num_blocks, num_regions, end, steps, byte_steps, rank.offset_bytes)

    def regions(self, layers: IndexArray, planes: IndexArray) -> OffsetArray:
        """Which region has this; indices broadcast."""
        found: OffsetArray = (layers * self.region_steps["layer"] + planes * self.region_steps["kv"]).astype(
            np.uint64
        )
        return found

    def offsets(
        self, layers: IndexArray, planes: IndexArray, tokens: IndexArray, heads: IndexArray
    ) -> OffsetArray:
        """Where in its region block 0 has this; indices broadcast."""
        steps = self.byte_steps
        found: OffsetArray = (
            self.offset
            + layers * steps["layer"]
            + planes * steps["kv"]
            + tokens * steps["token"]
            + heads * steps["head"]
        ).astype(np.uint64)
        return found


def _extents(layout: KvLayout, rank: RankLayout) -> dict[str, int]:
    """Count along each dimension, and check that there is something to count."""
    extents = {
        "layer": len(rank.layers),
        "kv": layout.planes,
        "block": rank.num_blocks,
        "token": layout.block_size,
        "head": len(rank.heads),
    }
    sizes = {"head_dim": layout.head_dim, "element_bytes": layout.element_bytes}
    for name, value in (extents | sizes).items():
        if value < 1:
            raise TransferRefused(f"{name}: {value}; must be >= 1")
    for name, held, total in (
        ("layers", rank.layers, layout.num_layers),
        ("heads", rank.heads, layout.num_kv_heads),
    ):
        if len(set(held)) != len(held) or min(held) < 0 or max(held) >= total:
            raise TransferRefused(
                f"{name}: {_some(held)}; each is expected once, and within 0 to {total - 1}"
            )
    if prod(extents.values()) // rank.num_blocks > _PIECES_MAX:
        raise TransferRefused(
            f"a block of {len(rank.layers)} layers x {layout.planes} x {layout.block_size} tokens x"
            f" {len(rank.heads)} heads is more than {_PIECES_MAX} pieces"
        )
    return extents


def _dimensions(order: str) -> tuple[list[str], list[str]]:
    """Read an order: what chooses a region, and what lies within one."""
    words = order.split()
    if sorted(words) != sorted((*DIMENSIONS, _BAR)):
        raise TransferRefused(f"order: {order[:80]!r}; expected {', '.join(DIMENSIONS)} and one |, each once")
    bar = words.index(_BAR)
    outer, inner = words[:bar], words[bar + 1 :]
    wrong = [word for word in outer if word not in REGION_DIMENSIONS]
    if wrong:
        raise TransferRefused(
            f"order: {order!r}: {wrong[0]} cannot choose a region; put it right of the |, only"
            f" {' and '.join(REGION_DIMENSIONS)} may be left of it"
        )
    return outer, inner


def _some(numbers: tuple[int, ...]) -> str:
    listed = ", ".join(str(number) for number in numbers[:8])
    return listed if len(numbers) <= 8 else f"{listed}, ... ({len(numbers)} of them)"
