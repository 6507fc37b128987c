"""What workers tell of the KV that they read, and what routers make of it: a slow link sends prompts to decode workers."""

import asyncio
from contextlib import AsyncExitStack

import numpy as np
import pytest

from penstock.core.ids import WorkerId
from penstock.core.types.instances import Role
from penstock.kv.measured import MeasuredSpeed
from penstock.perf.topology import NetworkPath, Topology
from penstock.router.config import DisaggConfig, RouterConfig
from penstock.worker.kv_transfer.reader import KvReads, PeerSource
from tests.support.cluster import MemoryCluster
from tests.support.kv_transfer import PRICES, SlowTransport, tiny_engine, tiny_request, whole_answer

BYTES_PER_S = 1e5
"""As the topology has it: the 64 bytes of a block take less than a tenth of what computing its 4 tokens does."""
LENGTH = 50


@pytest.mark.parametrize(("bytes_per_s", "ends_remote"), [(BYTES_PER_S, True), (BYTES_PER_S / 20, False)])
@pytest.mark.virtual
async def test_a_link_that_is_slower_than_was_said_keeps_prompts_where_they_are_answered(
    bytes_per_s, ends_remote
):
    router = RouterConfig(
        topology=Topology(same_host=NetworkPath(latency_s=0, bandwidth_bytes_per_s=BYTES_PER_S)),
        disagg=DisaggConfig(remote_tokens_min=1, kv_transfer_s=0),
    )
    async with MemoryCluster() as cluster, AsyncExitStack() as stack:
        for name, role in (("p", Role.PREFILL), ("d", Role.DECODE)):
            transport = SlowTransport(lambda num_bytes: num_bytes / bytes_per_s)
            await cluster.start(name, tiny_engine(800), role=role, prices=PRICES, transport=transport)
        dispatcher = await stack.enter_async_context(cluster.dispatcher(router))
        await dispatcher.looked()
        for number in range(12):  # whom prompts that are computed beside them hold up
            stream = dispatcher.open(tiny_request(f"stream{number}", 12, 380, seed=99 + number))
            await anext(await stack.enter_async_context(stream))
        await asyncio.sleep(0.2)  # until their worker has told of them
        remote = []
        for number in range(6):
            await whole_answer(dispatcher, tiny_request(f"r{number}", LENGTH, 3, seed=number))
            remote.append(dispatcher.explain(f"r{number}")[0].prefill.remote)
        (read,) = cluster.worker("d").kv_transfer.reads.latest
        assert read.prefill_worker == cluster.worker("p").instance.worker_id
        assert (read.transport, read.num_bytes / read.seconds) == ("memory", pytest.approx(bytes_per_s))
        seen = {view.name: view.load for view in dispatcher.workers()}
        assert [one.transport for one in seen["d"]["kv_reads"]] == ["memory"]
        assert (remote[1], remote[-1]) == (True, ends_remote), remote


def test_totals_by_prefill_worker_and_the_latest_of_them_are_told():
    reads = KvReads()
    assert reads.latest == ()
    for number in range(6):
        reads.add(WorkerId(number), "shm", 100, 1.0, 1.5)
    reads.add(WorkerId(3), "tcp", 10, 2.0, 2.25)
    assert [read.prefill_worker for read in reads.latest] == [2, 4, 5, 3]
    assert (reads.latest[-1].transport, reads.latest[-1].num_bytes, reads.latest[-1].seconds) == (
        "tcp",
        110,
        0.75,
    )


def test_prefill_workers_are_forgotten_past_a_bound():
    reads = KvReads()
    for number in range(257):
        reads.add(WorkerId(number), "shm", 100, 1.0, 1.5)
    reads.add(WorkerId(1), "shm", 1, 1.0, 1.5)
    assert reads.latest[-1].num_bytes == 101
    reads.add(WorkerId(0), "shm", 1, 1.0, 1.5)
    assert reads.latest[-1].num_bytes == 1, "it began anew"


@pytest.mark.parametrize(
    ("num_blocks", "block_bytes", "chunk_blocks"),
    [(100, 64 << 10, 256), (100, 5 << 20, 7), (1_000, 5 << 20, 63), (1, 64 << 20, 1), (0, 0, 16 << 20)],
)
def test_reads_are_of_16_mib_and_of_longer_prompts_16_in_all(num_blocks, block_bytes, chunk_blocks):
    hashes = np.zeros((num_blocks, 2), np.uint64)
    assert PeerSource(hashes, None, MeasuredSpeed(), block_bytes=block_bytes).chunk_blocks == chunk_blocks
