"""KV transfers between engines whose KV lies otherwise: tensor parallelism, layers and their order."""

import asyncio
from itertools import product

import msgspec
import numpy as np
import pytest

from penstock.core.hashing import block_hashes
from penstock.core.types.instances import Role
from penstock.core.types.kv import KvLayout
from penstock.router.config import DisaggConfig, RouterConfig
from tests.support.cluster import MemoryCluster
from tests.support.kv_transfer import (
    BLOCK_SIZE,
    check_nothing_is_held,
    tiny_engine,
    tiny_laid_out_engine,
    tiny_request,
    whole_answer,
)

ALWAYS = RouterConfig(policy="least-loaded", disagg=DisaggConfig(remote_tokens_min=1))
MODEL = KvLayout(
    num_layers=3, num_kv_heads=4, head_dim=4, dtype="float16", element_bytes=2, block_size=BLOCK_SIZE
)
LATENT = msgspec.structs.replace(MODEL, num_kv_heads=1, planes=1, head_dim=20)
BY_LAYER = "layer | kv block token head"
APART = "layer kv | block head token"


def layout(model=MODEL, *, layers=None, **split):
    made = model.split(num_blocks=1, **split)
    if layers is None:
        return made
    ranks = tuple(msgspec.structs.replace(rank, layers=layers) for rank in made.ranks)
    return msgspec.structs.replace(made, ranks=ranks)


def block(engine, hashes):
    """A block as (layers, planes, tokens, heads, bytes of a head), found out head by head."""
    (block_id,) = engine.pool.match(hashes)[-1:]
    kv = engine._runner._laid_out
    model = kv.layout
    whole = np.zeros(
        (
            model.num_layers,
            model.planes,
            BLOCK_SIZE,
            model.num_kv_heads,
            model.head_dim * model.element_bytes,
        ),
        np.uint8,
    )
    for rank in kv.ranks:
        for (row, layer), (column, head) in product(enumerate(rank.rank.layers), enumerate(rank.rank.heads)):
            whole[layer, :, :, head] = rank.view[row, :, block_id, :, column]
    return whole


@pytest.mark.parametrize(
    ("source", "target"),
    [
        (layout(), layout(tp=4)),
        (layout(tp=8), layout(tp=2)),
        (layout(pp=3), layout(tp=2, pp=2)),
        (layout(layers=(2, 0, 1)), layout()),
        (layout(order=BY_LAYER), layout(order=APART, layers=(1, 2, 0))),
        (layout(tp=4, order=APART), layout(tp=2, pp=2, order=BY_LAYER)),
        (layout(LATENT, tp=2), layout(LATENT, pp=2)),
    ],
)
@pytest.mark.virtual
async def test_an_answer_is_exact_whatever_the_layouts(source, target):
    asked = [tiny_request("a", 50), tiny_request("b", 70, seed=3), tiny_request("c", 60)]
    async with MemoryCluster() as cluster, cluster.dispatcher(ALWAYS) as dispatcher:
        await cluster.start("p", tiny_laid_out_engine(source, 150), role=Role.PREFILL)
        await cluster.start("d", tiny_laid_out_engine(target), role=Role.DECODE)
        await dispatcher.looked()
        found = [(await whole_answer(dispatcher, one))[0] for one in asked]
        kv_transfer = cluster.worker("d").kv_transfer
        assert kv_transfer.incoming.failures == {}
        assert kv_transfer.incoming.fetched_blocks == 50 // 4 + 70 // 4 + 60 // 4 - 50 // 4
        assert cluster.engine("d").load().prefilled_tokens == 3, "the first token of each"
        for one in asked:
            hashes = block_hashes(one.token_ids, BLOCK_SIZE)
            for depth in range(1, len(hashes) + 1):
                here, there = (block(cluster.engine(name), hashes[:depth]) for name in "pd")
                assert here.any()
                np.testing.assert_array_equal(here, there)
        await asyncio.sleep(1)
        for name in "pd":
            check_nothing_is_held(cluster.worker(name), cluster.engine(name))
    async with MemoryCluster() as cluster, cluster.dispatcher() as dispatcher:
        await cluster.start("alone", tiny_engine())
        await dispatcher.looked()
        assert found == [(await whole_answer(dispatcher, one))[0] for one in asked]
