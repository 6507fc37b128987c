"""Connections to workers: made, lost, made again, and given up."""

import asyncio
from functools import partial

from structlog.testing import capture_logs

from penstock.core.errors import ProtocolError
from penstock.router.config import RouterConfig
from penstock.router.dispatch.dispatcher import Dispatcher
from penstock.router.workers.member import Condition
from penstock.sim.loop.loop import run_virtual
from tests.support.cluster import MemoryCluster
from tests.support.manual_engine import ManualEngine
from tests.support.scene import HASHES, run_scenario, settle, stored, view


def test_a_broken_connection_is_made_again_and_content_asked_for_anew():
    async def scene(cluster: MemoryCluster, dispatcher: Dispatcher, engines: dict[str, ManualEngine]) -> None:
        engines["w1"].step(events=[stored(HASHES)])
        await settle()
        (server,) = cluster.plane._servers.values()
        server.links[0].break_off("the cable was pulled", tell_service=True)
        await settle()
        assert (
            view(dispatcher, "w1").condition is not Condition.READY or view(dispatcher, "w1").connections == 2
        )
        await asyncio.sleep(1.0)
        back = view(dispatcher, "w1")
        assert (back.condition, back.connections, back.problem) == (Condition.READY, 2, None)
        assert back.indexed_blocks == 5

    run_scenario(scene, num_workers=1)


def test_a_worker_of_another_language_is_shown_with_its_problem():
    async def main() -> None:
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

    run_virtual(main())


def test_a_lost_worker_is_warned_of_once():
    async def scene(cluster: MemoryCluster, dispatcher: Dispatcher, engines: dict[str, ManualEngine]) -> None:
        with capture_logs() as logs:
            cluster.kill("w1")
            await asyncio.sleep(3.0)
        events = [(log["event"], log["log_level"]) for log in logs if log.get("worker") == "w1"]
        assert events[:2] == [("worker_lost", "warning"), ("worker_unreachable", "debug")]
        assert "try another worker" not in logs[0]["error"]
        assert not [event for event in events[1:] if event[1] == "warning"]

    run_scenario(scene)


def test_an_unreachable_worker_is_tried_with_growing_pauses():
    async def main() -> None:
        config = RouterConfig(reconnect_s_max=5.0)
        async with MemoryCluster(lease_ttl_s=1000) as cluster, cluster.dispatcher(config) as dispatcher:
            await cluster.start("w1", ManualEngine())
            await asyncio.sleep(0.01)
            failures = dispatcher._shared.metrics.connect_failures.labels("unreachable")
            cluster.kill("w1")
            await asyncio.sleep(1.0)
            early = failures._value.get()
            assert 3 <= early <= 8
            await asyncio.sleep(100.0)
            assert 20 <= failures._value.get() - early <= 45
            assert "nobody listens" in view(dispatcher, "w1").problem

    run_virtual(main())


def test_a_worker_that_hangs_up_again_and_again_is_not_called_in_a_tight_loop():
    async def main() -> None:
        async with MemoryCluster() as cluster, cluster.dispatcher() as dispatcher:
            connect = cluster.plane.connect

            async def connect_and_break(instance: object, sink: object) -> object:
                connection = await connect(instance, sink)
                asyncio.get_running_loop().call_later(
                    0.001, partial(connection._link.break_off, "moody", tell_service=True)
                )
                return connection

            cluster.plane.connect = connect_and_break
            await cluster.start("w1", ManualEngine())
            await asyncio.sleep(100.0)
            assert 20 <= view(dispatcher, "w1").connections <= 50

    run_virtual(main())
