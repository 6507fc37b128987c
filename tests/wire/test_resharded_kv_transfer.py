"""A KV transfer between engines of other tensor parallelism, over sockets and shared memory instead of within a loop."""

import pytest

from penstock.core.types.instances import Role
from penstock.core.types.kv.layout import KvLayout
from penstock.router.config import DisaggConfig, RouterConfig
from penstock.transfer import TransferAgent, TransferConfig
from tests.support.cluster import MemoryCluster
from tests.support.kv_transfer import BLOCK_SIZE, tiny_laid_out_engine, tiny_request, whole_answer

MODEL = KvLayout(
    num_layers=3, num_kv_heads=4, head_dim=4, dtype="float16", element_bytes=2, block_size=BLOCK_SIZE
)


@pytest.mark.parametrize("transport", ["shm", pytest.param("tcp", marks=pytest.mark.nightly)])
async def test_blocks_of_two_ranks_become_those_of_four(transport):
    config = TransferConfig(listen=("unix",), transports=(transport,))
    router = RouterConfig(policy="least-loaded", disagg=DisaggConfig(remote_tokens_min=1))
    async with MemoryCluster() as cluster, cluster.dispatcher(router) as dispatcher:
        for name, role, tp in (("p", Role.PREFILL, 2), ("d", Role.DECODE, 4)):
            await cluster.start(
                name,
                tiny_laid_out_engine(MODEL.split(num_blocks=1, tp=tp)),
                role=role,
                agent=TransferAgent(name, config),
            )
        await dispatcher.looked()
        tokens, *_ = await whole_answer(dispatcher, tiny_request("a", 50, 5))
        kv_transfer = cluster.worker("d").kv_transfer
        assert (len(tokens), kv_transfer.incoming.failures, kv_transfer.incoming.fetched_blocks) == (
            5,
            {},
            12,
        )
        assert kv_transfer.exchange.transports == (transport,)
        assert cluster.engine("d").load().prefilled_tokens == 1
