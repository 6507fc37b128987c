"""A router that starts beside full workers chooses among them before it knows their blocks, and then knows all of them."""

import asyncio

import pytest

from tests.support.filled_worker import full_workers, start_router

WORKERS, BLOCKS = 2, 100_000
TIMEOUT_S = 120.0

pytestmark = pytest.mark.slow


def test_a_new_router_does_not_wait_for_snapshots():
    async def scenario():
        async with asyncio.timeout(TIMEOUT_S), full_workers(WORKERS, BLOCKS) as instances:
            started = await start_router(instances, BLOCKS)
        assert started.blocks_when_ready < WORKERS * BLOCKS / 2
        assert started.ready_s < started.whole_s
        assert started.turn_cpu_s_max < 1.0, "it answers meanwhile"

    asyncio.run(scenario())
