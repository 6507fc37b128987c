"""Blocks that were moved by a plan are those that copying element by element gives, whatever the layouts."""

from dataclasses import dataclass
from itertools import product
from math import prod
from typing import Any

import msgspec
import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from penstock.core.types.kv import DIMENSIONS, KvLayout, RankLayout
from penstock.core.wire import encode
from penstock.transfer import reshard

Bytes = NDArray[np.uint8]
GAP = 0xEE


@dataclass
class Memory:
    """A rank's regions as plain memory, and each region's view as (dimensions right of the bar..., head bytes)."""

    rank: RankLayout
    regions: list[Bytes]
    views: list[Bytes]
    outer: list[str]
    inner: list[str]
    extents: dict[str, int]

    @classmethod
    def of(cls, layout: KvLayout, index: int) -> "Memory":
        rank = layout.ranks[index]
        bar = rank.order.split().index("|")
        outer, inner = rank.order.split()[:bar], rank.order.split()[bar + 1 :]
        extents = dict(
            zip(
                DIMENSIONS,
                (len(rank.layers), layout.planes, rank.num_blocks, layout.block_size, len(rank.heads)),
                strict=True,
            )
        )
        shape = (*(extents[word] for word in inner), layout.head_dim * layout.element_bytes)
        strides = (*rank.strides_bytes, 1) if rank.strides_bytes else None
        sizes = reshard.region_bytes(layout, index)
        assert len(sizes) == prod(extents[word] for word in outer)
        regions = [np.full(size, GAP, np.uint8) for size in sizes]
        views = [np.ndarray(shape, np.uint8, region.data, rank.offset_bytes, strides) for region in regions]
        return cls(rank, regions, views, outer, inner, extents)

    def at(self, **index: int) -> Bytes:
        """One head of one token."""
        region = 0
        for word in self.outer:
            region = region * self.extents[word] + index[word]
        return self.views[region][tuple(index[word] for word in self.inner)]


@st.composite
def orders(draw: st.DrawFn) -> str:
    outer = draw(st.lists(st.sampled_from(["layer", "kv"]), unique=True))
    inner = draw(st.permutations([word for word in DIMENSIONS if word not in outer]))
    return " ".join([*outer, "|", *inner])


@st.composite
def ranks(draw: st.DrawFn, layout: KvLayout, layers: tuple[int, ...], heads: tuple[int, ...]) -> RankLayout:
    order = draw(orders())
    rank = RankLayout(
        layers=tuple(draw(st.permutations(layers))),
        heads=tuple(draw(st.permutations(heads))),
        num_blocks=draw(st.integers(3, 5)),
        order=order,
        offset_bytes=draw(st.integers(0, 3)),
    )
    if draw(st.booleans()):
        counts = (len(layers), layout.planes, rank.num_blocks, layout.block_size, len(heads))
        extents = dict(zip(DIMENSIONS, counts, strict=True))
        end, strides = layout.head_dim * layout.element_bytes, []
        for word in reversed(order.partition("|")[2].split()):
            strides.append(end + draw(st.sampled_from([0, 0, 1, 5])))
            end += (extents[word] - 1) * strides[-1]
        rank = msgspec.structs.replace(rank, strides_bytes=tuple(reversed(strides)))
    return rank


@st.composite
def workers(draw: st.DrawFn, model: KvLayout) -> KvLayout:
    """Split layers and heads anyhow, each part with its own order, gaps and pool, and hold some parts twice."""
    tp = draw(st.integers(1, 8))
    if tp >= model.num_kv_heads:
        per_rank = [(rank * model.num_kv_heads // tp,) for rank in range(tp)]
    else:
        cuts = sorted(
            draw(
                st.lists(
                    st.integers(1, model.num_kv_heads - 1), min_size=tp - 1, max_size=tp - 1, unique=True
                )
            )
        )
        heads = draw(st.permutations(range(model.num_kv_heads)))
        bounds = zip([0, *cuts], [*cuts, model.num_kv_heads], strict=True)
        per_rank = [tuple(heads[start:end]) for start, end in bounds]
    cut = draw(st.integers(1, model.num_layers))
    stages = [tuple(range(cut)), tuple(range(cut, model.num_layers))]
    parts = [(layers, heads) for layers, heads in product(stages, per_rank) if layers]
    return msgspec.structs.replace(model, ranks=tuple(draw(ranks(model, *part)) for part in parts))


@st.composite
def cases(draw: st.DrawFn) -> tuple[KvLayout, KvLayout]:
    model = KvLayout(
        num_layers=draw(st.integers(1, 4)),
        num_kv_heads=draw(st.sampled_from([1, 2, 4, 8])),
        head_dim=draw(st.integers(1, 2)),
        dtype="unknown",
        element_bytes=draw(st.sampled_from([1, 2])),
        block_size=draw(st.integers(1, 3)),
        planes=draw(st.integers(1, 2)),
    )
    return draw(workers(model)), draw(workers(model))


@given(cases(), st.data())
def test_every_byte_of_the_target_comes_once_and_from_the_right_place(
    case: tuple[KvLayout, KvLayout], data: Any
) -> None:
    source, target = (msgspec.msgpack.decode(encode(layout), type=KvLayout) for layout in case)
    rng = np.random.default_rng(data.draw(st.integers(0, 99)))
    count = data.draw(st.integers(0, 3))
    source_blocks = data.draw(st.permutations(range(3)))[:count]
    target_blocks = data.draw(st.permutations(range(3)))[:count]
    width = source.head_dim * source.element_bytes
    shape = (source.num_layers, source.planes, count, source.block_size, source.num_kv_heads, width)
    truth = rng.integers(0, 256, shape, np.uint8)

    def fill(memory: Memory, block_ids: list[int]) -> None:
        extents = (len(memory.rank.layers), source.planes, count, source.block_size, len(memory.rank.heads))
        for layer, plane, block, token, head in product(*map(range, extents)):
            memory.at(layer=layer, kv=plane, block=block_ids[block], token=token, head=head)[:] = truth[
                memory.rank.layers[layer], plane, block, token, memory.rank.heads[head]
            ]

    sources = [Memory.of(source, index) for index in range(len(source.ranks))]
    targets = [Memory.of(target, index) for index in range(len(target.ranks))]
    expected = [Memory.of(target, index) for index in range(len(target.ranks))]
    for memory in sources:
        fill(memory, source_blocks)
    for memory in expected:
        fill(memory, target_blocks)

    writes = [[np.zeros(len(region), np.uint8) for region in memory.regions] for memory in targets]
    plan = reshard.plan(source, target)
    for move in plan.moves:
        taken, given_to = sources[move.source.rank], targets[move.target.rank]
        reads, puts = move.descriptors(
            source_blocks,
            target_blocks,
            source_regions=range(len(taken.regions)),
            target_regions=range(len(given_to.regions)),
        )
        assert reads.total_bytes == puts.total_bytes == move.block_bytes * count
        for region, at, length, to_region, to in zip(
            *(column.tolist() for column in (reads.region_ids, reads.offsets, reads.lengths)),
            *(column.tolist() for column in (puts.region_ids, puts.offsets)),
            strict=True,
        ):
            given_to.regions[to_region][to : to + length] = taken.regions[region][at : at + length]
            writes[move.target.rank][to_region][to : to + length] += 1
    for index, memory in enumerate(targets):
        for got, wanted, written in zip(memory.regions, expected[index].regions, writes[index], strict=True):
            assert np.array_equal(got, wanted)
            assert written.max(initial=0) <= 1
        held = len(memory.rank.layers) * len(memory.rank.heads) * source.planes * source.block_size * width
        assert sum(int(written.sum()) for written in writes[index]) == held * count
        assert sum(move.block_bytes for move in plan.into(index)) == held
