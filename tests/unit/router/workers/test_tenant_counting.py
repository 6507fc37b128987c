"""Which worker counts what tenants use: the same one for all frontends, and another one when it does not answer."""

import asyncio
from collections.abc import Mapping

import pytest

from penstock.core.errors import Unavailable
from penstock.core.types.load import PeerCount, TenantCount
from penstock.router.dispatch.dispatcher import Dispatcher
from penstock.router.workers.tenant_counts import ANSWER_S_MAX, PASSED_OVER_S
from penstock.runtime.requests.memory import _Link
from tests.support.cluster import MemoryCluster
from tests.support.manual_engine import ManualEngine
from tests.support.scene import run_scenario


def test_the_connected_worker_with_the_lowest_id_counts_and_a_silent_one_is_passed_over(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[int] = []
    silent = {1}
    answer = _Link.count_tenants

    def count(link: _Link, counts: Mapping[str, TenantCount], call_id: int) -> None:
        asked.append(link.worker_id)
        if link.worker_id not in silent:
            answer(link, counts, call_id)

    monkeypatch.setattr(_Link, "count_tenants", count)

    async def scene(cluster: MemoryCluster, dispatcher: Dispatcher, _: dict[str, ManualEngine]) -> None:
        loop = asyncio.get_running_loop()
        async with cluster.dispatcher() as other:
            await other.looked()
            start_s = loop.time()
            with pytest.raises(Unavailable, match="worker w1 has not counted what tenants use: no answer"):
                await dispatcher.count_tenants({"t": TenantCount(requests=1)})
            assert loop.time() - start_s == pytest.approx(ANSWER_S_MAX)
            silent.clear()
            assert await dispatcher.count_tenants({"t": TenantCount(requests=2, inflight=1)}) == {}
            await other.count_tenants({})
            await asyncio.sleep(PASSED_OVER_S)
            assert await dispatcher.count_tenants({"t": TenantCount(requests=3, inflight=1)}) == {}
            expected = {"t": PeerCount(inflight=1, frontends=1)}
            assert await other.count_tenants({}) == expected
            assert asked == [1, 2, 1, 1, 1]
            cluster.kill("w1")
            await asyncio.sleep(0)
            await dispatcher.count_tenants({})
            cluster.kill("w2")
            cluster.kill("w3")
            await asyncio.sleep(0.01)
            with pytest.raises(Unavailable, match="no worker is connected that counts"):
                await dispatcher.count_tenants({})

    run_scenario(scene)
