"""The window that a worker sends to planners."""

import asyncio
import random

import pytest

from penstock.core.types.instances import Role
from penstock.sim.chaos_trial import _request, small_spec
from penstock.sim.cluster import SimCluster


@pytest.mark.virtual
async def test_a_window_tells_the_longest_wait_for_a_first_token():
    async with SimCluster(small_spec(), random.Random(1)) as cluster:
        worker = await cluster.start("worker-1", Role.AGGREGATED)
        dispatcher = cluster.dispatchers[0]
        await dispatcher.serving()
        assert worker.worker.observe().oldest_wait_s == 0.0
        worker.pace.stop()
        async with dispatcher.open(_request("a", [1, 2, 3], 4)) as stream:
            await asyncio.sleep(3.0)
            window = worker.worker.observe()
            assert window.oldest_wait_s == pytest.approx(3.0, abs=0.1)
            assert window.role is Role.AGGREGATED
            worker.pace.go_on()
            assert [delta async for delta in stream]
            assert worker.worker.observe().oldest_wait_s == 0.0
