"""Which worker counts what tenants use: the same one for all frontends, and another one when it does not answer."""

import asyncio

import pytest

from penstock.core.errors import Unavailable
from penstock.core.types.load import PeerCount, TenantCount
from penstock.router.workers.tenant_counts import ANSWER_S_MAX, PASSED_OVER_S
from tests.support.scene import scenario


@scenario()
async def test_the_worker_with_the_lowest_id_counts_and_a_silent_one_is_passed_over(
    cluster, dispatcher, engines
):
    loop = asyncio.get_running_loop()
    async with cluster.dispatcher() as other:
        await other.looked()
        for link in cluster.links("w1"):
            link.count_tenants = lambda *_: None
        start_s = loop.time()
        with pytest.raises(Unavailable, match="worker w1 has not counted what tenants use: no answer"):
            await dispatcher.count_tenants({"t": TenantCount(requests=1)})
        assert loop.time() - start_s == pytest.approx(ANSWER_S_MAX)
        for link in cluster.links("w1"):
            del link.count_tenants
        assert await dispatcher.count_tenants({"t": TenantCount(requests=2, inflight=1)}) == {}
        assert await other.count_tenants({}) == {}, "another worker counted"
        await asyncio.sleep(PASSED_OVER_S)
        assert await dispatcher.count_tenants({"t": TenantCount(requests=3, inflight=1)}) == {}
        assert await other.count_tenants({}) == {"t": PeerCount(inflight=1, frontends=1)}
        for name in ("w1", "w2", "w3"):
            cluster.kill(name)
        await asyncio.sleep(0.01)
        with pytest.raises(Unavailable, match="no worker is connected that counts"):
            await dispatcher.count_tenants({})
