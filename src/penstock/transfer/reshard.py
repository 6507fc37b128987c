"""Which bytes of another worker's KV make up one's own, where their layouts differ."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Self

import numpy as np
from numpy.typing import ArrayLike, NDArray

from penstock.core.descriptors import Descriptors, OffsetArray
from penstock.core.errors import TransferRefused
from penstock.core.types.kv import DIMENSIONS, REGION_DIMENSIONS, KvLayout, RankLayout
from penstock.transfer.regions.ranges import coalesce

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


_SHARED_FIELDS = (
    "num_layers",
    "num_kv_heads",
    "head_dim",
    "planes",
    "dtype",
    "element_bytes",
    "block_size",
)
_CELLS_MAX = 1 << 24


@dataclass(frozen=True, slots=True, eq=False)
class Side:
    """Where one rank has the ranges of a block.

    Attributes:
        rank: in the worker's layout.
        num_blocks: in its pool.
        block_stride: bytes from one block to the next.
        num_regions: the rank has.
        regions: (n,) uint64, which of the rank's regions.
        offsets: (n,) uint64 bytes, of block 0.
    """

    rank: int
    num_blocks: int
    block_stride: int
    num_regions: int
    regions: OffsetArray
    offsets: OffsetArray

    def descriptors(
        self, block_ids: ArrayLike, region_ids: Sequence[int], lengths: OffsetArray, *, by_range: bool
    ) -> Descriptors:
        """List the ranges of these blocks, `lengths` long: all of a block together, or all blocks of a range."""
        blocks = np.atleast_1d(np.asarray(block_ids))
        if blocks.ndim != 1 or (len(blocks) and blocks.dtype.kind not in "iu"):
            raise ValueError(f"block ids: shape {blocks.shape}, dtype {blocks.dtype}; expected (n,) integers")
        if len(blocks) and not 0 <= int(blocks.min()) <= int(blocks.max()) < self.num_blocks:
            wrong = next(block for block in blocks.tolist() if not 0 <= block < self.num_blocks)
            raise TransferRefused(f"rank {self.rank}: block {wrong}, of {self.num_blocks} that its pool has")
        if len(region_ids) != self.num_regions:
            raise TransferRefused(
                f"rank {self.rank}: {len(region_ids)} regions, its layout has {self.num_regions}; give all, in order"
            )
        shifts = blocks.astype(np.uint64) * np.uint64(self.block_stride)
        ids = np.array(region_ids, np.uint64)[self.regions.astype(np.intp)]
        if by_range:
            offsets, ids = self.offsets[:, None] + shifts[None, :], np.repeat(ids, len(blocks))
        else:
            offsets, ids = shifts[:, None] + self.offsets[None, :], np.tile(ids, len(blocks))
        return Descriptors(ids, offsets.reshape(-1), lengths)


@dataclass(frozen=True, slots=True, eq=False)
class RankMove:
    """What one rank of the target takes from one rank of the source, of each block.

    Attributes:
        source: where it is.
        target: where it goes.
        lengths: (n,) uint64 bytes, of either side; neighbours are merged.
    """

    source: Side
    target: Side
    lengths: OffsetArray

    @property
    def block_bytes(self) -> int:
        """Bytes that it moves for each block."""
        return int(self.lengths.sum())

    def descriptors(
        self,
        source_blocks: ArrayLike,
        target_blocks: ArrayLike,
        *,
        source_regions: Sequence[int],
        target_regions: Sequence[int],
    ) -> tuple[Descriptors, Descriptors]:
        """List the ranges of blocks, to be posted: the source's and the target's, one for one.

        Args:
            source_blocks: (n,) block ids.
            target_blocks: (n,) block ids; block i of the source becomes block i of these.
            source_regions: region ids of the source rank, as many as its layout has, in the order of the dimensions left
                of the bar: of the first layer all, then of the second, for `layer kv |`.
            target_regions: likewise of the target rank.

        Raises:
            TransferRefused: a block is not in its pool, or there are more or fewer regions than the layout has.
            ValueError: block ids are no integers, or more on one side.
        """
        source_blocks, target_blocks = np.asarray(source_blocks), np.asarray(target_blocks)
        count = source_blocks.size
        if count != target_blocks.size:
            raise ValueError(f"{count} source blocks for {target_blocks.size} of the target")
        strides = (self.source.block_stride, self.target.block_stride)
        # where a range fills the way to the next block, consecutive blocks are neighbours: list these together
        by_range = strides[0] == strides[1] and bool((self.lengths == np.uint64(strides[0])).any())
        lengths = np.repeat(self.lengths, count) if by_range else np.tile(self.lengths, count)
        return (
            self.source.descriptors(source_blocks, source_regions, lengths, by_range=by_range),
            self.target.descriptors(target_blocks, target_regions, lengths, by_range=by_range),
        )


@dataclass(frozen=True, slots=True, eq=False)
class ReshardPlan:
    """All that moves between two workers for a block: every byte of the target's ranks, once each."""

    moves: tuple[RankMove, ...]

    def into(self, target_rank: int) -> list[RankMove]:
        """List what a rank of the target takes."""
        return [move for move in self.moves if move.target.rank == target_rank]


def mismatch(source: KvLayout, target: KvLayout) -> str | None:
    """Say in a line why blocks of one worker cannot become blocks of the other; None if they can."""
    try:
        _check(source, target)
        _places("source", source)
        _places("target", target)
        _owners(source, target)
    except TransferRefused as error:
        return error.message
    return None


def plan(source: KvLayout, target: KvLayout) -> ReshardPlan:
    """Find out which ranges of the source's blocks make up the target's blocks.

    Where several ranks of the source hold the same heads, the target's ranks are spread over them.

    Args:
        source: of the worker that has the blocks.
        target: of the one that needs them.

    Raises:
        TransferRefused: they do not fit; the text ends with what `mismatch` says.
    """
    try:
        _check(source, target)
        sources, targets = _places("source", source), _places("target", target)
        owners = _owners(source, target)
    except TransferRefused as error:
        raise TransferRefused(f"KV layouts do not fit: {error.message}") from error
    moves = [
        _move(source, target, sources[owner], targets[rank], owned == owner)
        for rank, owned in enumerate(owners)
        for owner in np.unique(owned).tolist()
    ]
    return ReshardPlan(tuple(moves))


def region_bytes(layout: KvLayout, rank: int) -> tuple[int, ...]:
    """Say how long each of a rank's regions has to be, in the order that `RankMove.descriptors` takes them.

    Raises:
        TransferRefused: the layout contradicts itself.
    """
    strides = Strides.of(layout, layout.ranks[rank])
    return (strides.region_bytes,) * strides.num_regions


@dataclass(frozen=True, slots=True)
class _Place:
    index: int
    rank: RankLayout
    strides: Strides


def _check(source: KvLayout, target: KvLayout) -> None:
    for field in _SHARED_FIELDS:
        theirs, ours = getattr(source, field), getattr(target, field)
        if theirs != ours:
            raise TransferRefused(
                f"{field} is {theirs!r} at the source and {ours!r} at the target; it has to be the same"
            )
    for side, layout in (("source", source), ("target", target)):
        if not layout.ranks or len(layout.ranks) * layout.num_layers * layout.num_kv_heads > _CELLS_MAX:
            raise TransferRefused(
                f"{side}: {len(layout.ranks)} ranks of {layout.num_layers} layers and {layout.num_kv_heads} heads;"
                f" expected at least one, and a product of at most {_CELLS_MAX}"
            )


def _places(side: str, layout: KvLayout) -> list[_Place]:
    found = []
    for index, rank in enumerate(layout.ranks):
        try:
            found.append(_Place(index, rank, Strides.of(layout, rank)))
        except TransferRefused as error:
            raise TransferRefused(f"{side} rank {index}: {error.message}") from error
    return found


def _owners(source: KvLayout, target: KvLayout) -> list[NDArray[np.intp]]:
    """Choose for each rank of the target, and each (layer, head) that it holds, the rank of the source to take it from."""
    holds = np.zeros((len(source.ranks), source.num_layers, source.num_kv_heads), np.int32)
    for index, rank in enumerate(source.ranks):
        holds[index][np.ix_(rank.layers, rank.heads)] = 1
    holders = holds.cumsum(0)  # how many ranks up to this one hold it
    owners = []
    for index, rank in enumerate(target.ranks):
        counts = holders[np.ix_(range(len(source.ranks)), rank.layers, rank.heads)]
        if not counts[-1].all():
            layer, head = (int(found[0]) for found in np.nonzero(counts[-1] == 0))
            raise TransferRefused(
                f"target rank {index} holds layer {rank.layers[layer]} of head {rank.heads[head]}, which no rank of the"
                " source has"
            )
        owners.append((counts > index * counts[-1] // len(target.ranks)).argmax(0))
    return owners


def _move(
    source: KvLayout, target: KvLayout, taken: _Place, given: _Place, owned: NDArray[np.bool_]
) -> RankMove:
    """List what goes from one rank to another: the heads of tokens of `owned`, a mask over the target's (layers, heads)."""
    layer, head = (found[:, None, None] for found in np.nonzero(owned))
    plane, token = np.arange(target.planes)[None, :, None], np.arange(target.block_size)[None, None, :]
    their_layers = _positions(taken.rank.layers, source.num_layers)[np.array(given.rank.layers)[layer]]
    their_heads = _positions(taken.rank.heads, source.num_kv_heads)[np.array(given.rank.heads)[head]]
    here, there = given.strides, taken.strides
    shape = np.broadcast_shapes(layer.shape, plane.shape, token.shape)
    columns = (
        here.offsets(layer, plane, token, head),
        there.offsets(their_layers, plane, token, their_heads),
        here.regions(layer, plane),
        there.regions(their_layers, plane),
    )
    to, at, to_region, at_region = (np.broadcast_to(column, shape).reshape(-1) for column in columns)
    order = np.lexsort((to, to_region))  # neighbours on both sides follow each other at the target
    lengths = np.full(len(order), target.head_dim * target.element_bytes, np.uint64)
    to, at, lengths, to_region, at_region = coalesce(
        to[order], at[order], lengths, to_region[order], at_region[order]
    )
    return RankMove(_side(taken, at_region, at), _side(given, to_region, to), lengths)


def _positions(held: tuple[int, ...], total: int) -> IndexArray:
    """Say for each of `total` where among those held it is."""
    positions = np.zeros(total, np.intp)
    positions[list(held)] = np.arange(len(held))
    return positions


def _side(place: _Place, regions: OffsetArray, offsets: OffsetArray) -> Side:
    strides = place.strides
    return Side(
        place.index,
        strides.num_blocks,
        strides.byte_steps["block"],
        strides.num_regions,
        regions,
        offsets,
    )
