"""An API server dies, forgets and hangs under streams: no token is wrong, none is lost, and workers are registered again."""

import asyncio

import pytest

from penstock.deploy.secret import SECRET_VARIABLE
from tests.support.faulty_registry import (
    PROMPT,
    TOKENS,
    ready_ids,
    registry_is_connected,
    registry_is_lost,
    streams,
)
from tests.support.kubernetes.thread import ApiServerThread

pytestmark = pytest.mark.slow
LEASE_S = 1.0


def test_streams_and_new_requests_go_on_without_the_api_server(deploy, monkeypatch, tmp_path):
    monkeypatch.setenv(SECRET_VARIABLE, "a secret of the test")

    async def scenario(site):
        undisturbed, _ = await site.tell(PROMPT, max_tokens=TOKENS)
        few, _ = await site.tell(PROMPT, max_tokens=5)
        before = await ready_ids(site)
        assert len(before) == 2
        for fault in ("dead", "emptied", "hung"):
            await site.until(lambda: registry_is_connected(site))
            async with streams(site, undisturbed):
                if fault == "hung":
                    cluster.do(cluster.server.pause)
                else:
                    cluster.call(cluster.server.stop)
                try:
                    await site.until(lambda: registry_is_lost(site))
                    await asyncio.sleep(3 * LEASE_S)
                    assert (await site.tell(PROMPT, max_tokens=5))[0] == few
                    if fault == "emptied":
                        cluster.do(cluster.server.store.forget)
                finally:
                    if fault == "hung":
                        cluster.do(cluster.server.resume)
                    else:
                        cluster.call(cluster.server.start)
                await site.until(lambda: registry_is_connected(site))
                await asyncio.sleep(3 * LEASE_S)
            assert await ready_ids(site) == before, f"{fault}: nobody was removed or started again"
        site.kill("worker-1")

        async def replaced():
            return len(now := await ready_ids(site)) == 2 and now != before

        await site.until(replaced)
        assert (await site.tell(PROMPT, max_tokens=5))[0] == few

    with ApiServerThread() as cluster:
        monkeypatch.setenv("KUBECONFIG", str(cluster.write_config(tmp_path / "config")))
        runtime = {"discovery": "kubernetes", "registry": {"lease_ttl_s": LEASE_S}}
        deploy(scenario, workers=2, role={"mock": {"speedup": 0.5}}, runtime=runtime, timeout_s=200.0)
