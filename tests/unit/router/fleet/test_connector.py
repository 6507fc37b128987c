"""Connections to workers: made, lost, made again, and given up."""

import asyncio

import pytest
from structlog.testing import capture_logs

from penstock.core.errors import ProtocolError
from penstock.router.config import RouterConfig
from penstock.router.fleet.member import Condition
from tests.support.cluster import MemoryCluster
from tests.support.manual_engine import ManualEngine
from tests.support.scene import HASHES, scenario, settle, stored, view


@scenario(num_workers=1)
async def test_a_broken_connection_is_made_again_and_content_asked_for_anew(cluster, dispatcher, engines):
    engines["w1"].step(events=[stored(HASHES)])
    await settle()
    cluster.cut("w1")
    await asyncio.sleep(1.0)
    back = view(dispatcher, "w1")
    assert (back.condition, back.connections, back.problem) == (Condition.READY, 2, None)
    assert back.indexed_blocks == 5


@pytest.mark.virtual
async def test_a_worker_of_another_language_is_shown_with_its_problem():
    async with MemoryCluster() as cluster:
        tries = []

        async def connect(instance: object, sink: object) -> None:
            tries.append(asyncio.get_running_loop().time())
            raise ProtocolError("hash version 2, expected 1; update the older side")

        cluster.plane.connect = connect
        async with cluster.dispatcher() as dispatcher:
            await cluster.start("w1", ManualEngine())
            await asyncio.sleep(60)
            shown = view(dispatcher, "w1")
            assert shown.condition is Condition.CONNECTING
            assert "hash version 2" in shown.problem
            assert 12 <= len(tries) <= 25  # patient: it needs a restart


@scenario()
async def test_a_lost_worker_is_warned_of_once(cluster, dispatcher, engines):
    with capture_logs() as logs:
        cluster.kill("w1")
        await asyncio.sleep(3.0)
    events = [(log["event"], log["log_level"]) for log in logs if log.get("worker") == "w1"]
    assert events[:2] == [("worker_lost", "warning"), ("worker_unreachable", "debug")]
    assert "try another worker" not in logs[0]["error"]
    assert not [event for event in events[1:] if event[1] == "warning"]


@pytest.mark.virtual
async def test_an_unreachable_worker_is_tried_with_growing_pauses():
    config = RouterConfig(reconnect_s_max=5.0)
    async with MemoryCluster(lease_ttl_s=1000) as cluster, cluster.dispatcher(config) as dispatcher:
        await cluster.start("w1", ManualEngine())
        await asyncio.sleep(0.01)
        cluster.kill("w1")
        await asyncio.sleep(1.0)
        early = cluster.figure("connect_failures_total", reason="unreachable")
        assert 3 <= early <= 8
        await asyncio.sleep(100.0)
        assert 20 <= cluster.figure("connect_failures_total", reason="unreachable") - early <= 45
        assert "nobody listens" in view(dispatcher, "w1").problem
