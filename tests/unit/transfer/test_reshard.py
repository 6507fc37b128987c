"""Plans between workers of different layouts: how many ranges, from whom, what is refused, and a real move."""

from typing import Any

import msgspec
import numpy as np
import pytest

from penstock.core.errors import TransferRefused
from penstock.core.types.kv import KvLayout, RankLayout
from penstock.transfer import TransferAgent, TransferConfig, reshard

MODEL = KvLayout(num_layers=4, num_kv_heads=8, head_dim=16, dtype="float16", element_bytes=2, block_size=16)
LATENT = KvLayout(
    num_layers=4, num_kv_heads=1, head_dim=576, dtype="float16", element_bytes=2, block_size=16, planes=1
)
TOKENS_FIRST, HEADS_FIRST = "| block layer kv token head", "| block layer kv head token"
PER_LAYER = "layer | kv block token head"


def ranges(source: KvLayout, target: KvLayout) -> list[tuple[int, int, int]]:
    """(source rank, target rank, ranges of a block)."""
    return [
        (move.source.rank, move.target.rank, len(move.lengths)) for move in reshard.plan(source, target).moves
    ]


def replaced(layout: KvLayout, **fields: Any) -> KvLayout:
    """Change the first rank."""
    first, *others = layout.ranks
    return msgspec.structs.replace(layout, ranks=(msgspec.structs.replace(first, **fields), *others))


def test_heads_before_tokens_make_for_longer_ranges() -> None:
    def moved(order: str) -> list[tuple[int, int, int]]:
        return ranges(
            MODEL.split(num_blocks=9, tp=4, order=order), MODEL.split(num_blocks=9, tp=2, order=order)
        )

    pairs = [(0, 0), (1, 0), (2, 1), (3, 1)]
    assert moved(HEADS_FIRST) == [(*pair, 4 * 2) for pair in pairs]
    assert moved(TOKENS_FIRST) == [(*pair, 4 * 2 * 16) for pair in pairs]


def test_the_ranks_of_the_target_are_spread_over_those_that_hold_the_same() -> None:
    def pairs(source_tp: int, target_tp: int) -> list[tuple[int, int]]:
        plan = reshard.plan(
            LATENT.split(num_blocks=9, tp=source_tp), LATENT.split(num_blocks=9, tp=target_tp)
        )
        return [(move.source.rank, move.target.rank) for move in plan.moves]

    assert pairs(4, 2) == [(0, 0), (2, 1)]
    assert pairs(2, 4) == [(0, 0), (0, 1), (1, 2), (1, 3)]
    assert pairs(4, 4) == [(0, 0), (1, 1), (2, 2), (3, 3)]


async def test_consecutive_blocks_are_listed_so_that_they_merge() -> None:
    worker = MODEL.split(num_blocks=6, order=PER_LAYER)
    (move,) = reshard.plan(worker, worker).moves
    async with (
        TransferAgent("reader", TransferConfig(listen=("memory",), transports=("memory",))) as reader,
        TransferAgent("owner", TransferConfig(listen=("memory",), transports=("memory",))) as owner,
    ):
        sizes = reshard.region_bytes(worker, 0)
        ours = [reader.register(np.zeros(size, np.uint8)) for size in sizes]
        theirs = [owner.register(np.zeros(size, np.uint8)) for size in sizes]
        peer = await reader.connect(owner.metadata(theirs))
        there, here = move.descriptors(
            [1, 2, 3],
            [3, 4, 5],
            source_regions=[region.region_id for region in theirs],
            target_regions=[region.region_id for region in ours],
        )
        assert len(here) == 3 * 8
        assert len(reader.prepare(here, there, peer).pairs) == 8


def test_blocks_and_regions_that_are_not_there_are_refused() -> None:
    """With keys before values in a region, a block past the end of the keys would be one of the values."""
    worker = MODEL.split(num_blocks=6, order=PER_LAYER)
    (move,) = reshard.plan(worker, worker).moves
    regions = {"source_regions": range(4), "target_regions": range(4)}
    with pytest.raises(TransferRefused, match="rank 0: block 6, of 6 that its pool has"):
        move.descriptors([1, 6], [1, 2], **regions)
    with pytest.raises(TransferRefused, match="rank 0: block -1, of 6"):
        move.descriptors([1], [-1], **regions)
    with pytest.raises(TransferRefused, match="rank 0: 1 regions, its layout has 4; give all, in order"):
        move.descriptors([1], [1], source_regions=range(4), target_regions=[7])
    with pytest.raises(ValueError, match="2 source blocks for 1 of the target"):
        move.descriptors([1, 2], [1], **regions)
    with pytest.raises(ValueError, match="expected \\(n,\\) integers"):
        move.descriptors([0.5], [1], **regions)


@pytest.mark.parametrize(
    ("source", "target", "text"),
    [
        (
            MODEL,
            msgspec.structs.replace(MODEL, block_size=32),
            "block_size is 16 at the source and 32 at the target; it has to be the same",
        ),
        (
            MODEL,
            msgspec.structs.replace(MODEL, dtype="float8_e4m3fn", element_bytes=1),
            "dtype is 'float16' at the source and 'float8_e4m3fn' at the target; it has to be the same",
        ),
        (
            MODEL,
            LATENT,
            "num_kv_heads is 8 at the source and 1 at the target; it has to be the same",
        ),
    ],
)
def test_models_that_differ_are_refused(source: KvLayout, target: KvLayout, text: str) -> None:
    ours, theirs = target.split(num_blocks=1), source.split(num_blocks=1)
    assert reshard.mismatch(theirs, ours) == text
    with pytest.raises(TransferRefused) as refused:
        reshard.plan(theirs, ours)
    assert refused.value.message == f"KV layouts do not fit: {text}"


WORKER = MODEL.split(num_blocks=6, tp=2)


@pytest.mark.parametrize(
    ("wrong", "text"),
    [
        (msgspec.structs.replace(WORKER, ranks=()), "source: 0 ranks of 4 layers and 8 heads; expected at"),
        (msgspec.structs.replace(WORKER, ranks=WORKER.ranks[:1]), "target rank 1 holds layer 0 of head 4, "),
        (replaced(WORKER, layers=(0, 1, 2)), "target rank 0 holds layer 3 of head 0, which no rank of the"),
        (replaced(WORKER, layers=()), "source rank 0: layer: 0; must be >= 1"),
        (replaced(WORKER, layers=(0, 1, 1)), "source rank 0: layers: 0, 1, 1; each is expected once, and w"),
        (replaced(WORKER, heads=(0, 8)), "source rank 0: heads: 0, 8; each is expected once, and within 0"),
        (replaced(WORKER, num_blocks=0), "source rank 0: block: 0; must be >= 1"),
        (replaced(WORKER, num_blocks=1 << 62), "source rank 0: offset_bytes 0: a region from there would"),
        (replaced(WORKER, offset_bytes=-1), "source rank 0: offset_bytes -1: a region from there would end"),
        (replaced(WORKER, order="layer kv"), "source rank 0: order: 'layer kv'; expected layer, kv, block,"),
        (replaced(WORKER, order="block | layer kv token head"), "source rank 0: order: 'block | layer kv t"),
        (replaced(WORKER, strides_bytes=(1,)), "source rank 0: strides_bytes: 1 for the 5 dimensions bloc"),
        (
            replaced(WORKER, strides_bytes=(1 << 20, 4096, 2048, 128, 31)),
            "source rank 0: strides_bytes: 31 from one head to the next, which has 32 bytes: they would",
        ),
        (
            replaced(WORKER, strides_bytes=(1 << 20, 4096, 2048, -1, 32)),
            "source rank 0: strides_bytes: -1 from one token to the next, which has 128 bytes: they woul",
        ),
    ],
)
def test_layouts_that_contradict_themselves_are_refused(wrong: KvLayout, text: str) -> None:
    assert (reshard.mismatch(wrong, WORKER) or "").startswith(text)
    with pytest.raises(TransferRefused, match="KV layouts do not fit"):
        reshard.plan(wrong, WORKER)


def test_what_a_hostile_layout_can_cost_is_bounded() -> None:
    huge = msgspec.structs.replace(MODEL, block_size=1 << 40).split(num_blocks=1)
    assert "is more than 4194304 pieces" in (reshard.mismatch(huge, huge) or "")
    wide = msgspec.structs.replace(MODEL, num_layers=1 << 40)
    wide = msgspec.structs.replace(wide, ranks=(RankLayout(layers=(0,), heads=(0,), num_blocks=1),))
    assert "a product of at most 16777216" in (reshard.mismatch(wide, wide) or "")
