"""Times of posting, registering and preparing alone, and the size of metadata."""

import statistics
import time

from benchmarks.transfer.contenders import OPS, Ours
from benchmarks.transfer.shapes import POOL_BYTES, SHAPES, Shape
from penstock.transfer import Arena, TransferAgent, TransferConfig

_TIMES = 101
_TINY = Shape("2048x16B", 2048, 16)
_MANY = Shape("8192x32KiB", 8192, 32 << 10)


async def overheads(shm: Ours | None) -> dict[str, float]:
    """Measure them; what needs two processes by `shm`, where that works."""
    figures = await _of_an_agent()
    if shm is not None:
        prepared = shm.prepare(SHAPES[1])
        posts = []
        for number in range(_TIMES):
            began_s = time.perf_counter()
            handle = prepared.post(OPS[number % 2])
            posts.append(time.perf_counter() - began_s)
            await handle.wait()
        figures["post_prepared_2048_us"] = statistics.median(posts) * 1e6
        figures["post_to_done_2048x16B_us"] = statistics.median(await shm.move(OPS[0], _TINY, _TIMES)) * 1e6
    return figures


async def _of_an_agent() -> dict[str, float]:
    config = TransferConfig(listen=("memory", "unix", "tcp://127.0.0.1:0"))
    async with TransferAgent("measured", config) as agent:
        with Arena.create(POOL_BYTES) as arena, Arena.create(POOL_BYTES) as other:
            here, there = _MANY.blocks()
            seconds = []
            for _ in range(9):
                began_s = time.perf_counter()
                local, remote = agent.register(arena), agent.register(other)
                agent.prepare(local.blocks(here, _MANY.size_bytes), remote.blocks(there, _MANY.size_bytes))
                seconds.append(time.perf_counter() - began_s)
                length = len(agent.metadata([local]))
                await agent.deregister(local)
                await agent.deregister(remote)
    return {
        "register_prepare_8192_ms": statistics.median(seconds) * 1e3,
        "metadata_one_slab_bytes": length,
    }
