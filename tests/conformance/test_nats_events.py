"""Events by a real NATS: the suite, and a server that is killed, stopped, or written to by others."""

import asyncio
import random
from contextlib import asynccontextmanager
from functools import partial
from types import SimpleNamespace

import pytest
from prometheus_client import CollectorRegistry
from structlog.testing import capture_logs

from penstock.core.types.events import AllBlocksCleared, EventBatch
from penstock.core.types.load import Broadcast, RankNews
from penstock.runtime.config import BroadcastConfig, DiscoveryConfig, PlaneConfig
from penstock.runtime.events.nats import BroadcastMetrics, NatsCarrier, seal
from penstock.runtime.handshake import Identity
from penstock.runtime.nats import NatsConnection
from penstock.testing.planes.calls import CallsSuite
from penstock.testing.planes.event_plane import EventPlaneSuite, Follower
from penstock.testing.planes.harness import SECRET, TcpPlaneHarness
from penstock.testing.planes.request_plane import Scene
from penstock.testing.planes.scripted_worker import RecordingSink, scripted_request
from tests.support.registries import Nats

pytestmark = [pytest.mark.slow, pytest.mark.needs("nats-server")]
REPAIR_S = 0.2
CONNECTION = DiscoveryConfig(lease_ttl_s=3.0, connect_timeout_s=10.0)


def carrier(url, identity, metrics=None):
    """Make a carrier; a partial of it can be sent to workers' processes."""
    return NatsCarrier(
        [url],
        identity,
        namespace="suite",
        rng=random.Random(1),
        config=BroadcastConfig(repair_interval_s=REPAIR_S),
        connection=CONNECTION,
        metrics=metrics,
    )


class NatsHarness(TcpPlaneHarness):
    """A server for each test beside the workers' processes."""

    def __init__(self, config=None, events=None):
        self.server = Nats()
        super().__init__(config, events, carrier=partial(carrier, self.server.url))

    async def __aenter__(self):
        await self._stack.enter_async_context(self.server)
        return await super().__aenter__()


class TestNatsEvents(EventPlaneSuite):
    harness = NatsHarness
    is_carried = True


@pytest.mark.nightly
class TestRequestsBesideNats(CallsSuite):
    """Requests go as they do without a carrier."""

    harness = NatsHarness


@asynccontextmanager
async def following():
    async with Scene(NatsHarness(PlaneConfig(), None)) as scene:
        follower = Follower(scene.connection, scene.sink)
        follower.subscriber.start()
        await follower.until_at(0)
        yield scene, follower


async def publish(scene, *blocks):
    sink = RecordingSink()
    connection = await scene.harness.plane().connect(scene.instance, sink)
    connection.submit(scripted_request("publish", blocks, request_id="publish"))
    await sink.finished("publish")
    await connection.close()


async def until_carried(scene, follower):
    """Publish until a batch comes by NATS, which says that both ends are connected to it."""
    block = 1000
    while not any(isinstance(message, EventBatch) for message in scene.sink.events):
        block -= 1
        await publish(scene, block)
        await follower.until_at(1)
        await asyncio.sleep(0.02)


@pytest.mark.parametrize("fault", ["killed", pytest.param("stopped", marks=pytest.mark.nightly)])
async def test_events_and_load_reports_go_on_by_connections_while_the_server_is_away(fault):
    async with following() as (scene, follower):
        server = scene.harness.server
        await until_carried(scene, follower)
        at = follower.subscriber.sequence
        server.kill() if fault == "killed" else server.pause()
        accepted = scene.sink.loads[-1].accepted_requests
        await publish(scene, 1, 2, 3)
        await follower.until_at(at + 3)
        await scene.sink.until(lambda: scene.sink.loads[-1].accepted_requests > accepted)
        assert {1, 2, 3} <= follower.blocks
        if fault == "killed":
            await asyncio.to_thread(server.start)
        else:
            server.resume()
        await publish(scene, 4, -1)
        await follower.until_at(at + 5)
        assert {2, 3, 4} <= follower.blocks
        assert 1 not in follower.blocks
        assert follower.snapshots == 1, "tails were enough"


async def test_what_others_write_is_refused_and_counted_once_in_logs():
    async with following() as (scene, follower):
        await until_carried(scene, follower)
        identity, registry = Identity(secret=SECRET), CollectorRegistry()
        at = follower.subscriber.sequence
        batch = EventBatch(sequence=at + 1, events=(AllBlocksCleared(),))
        forged = Broadcast(worker_id=scene.instance.worker_id, ranks=(RankNews(batches=(batch,)),))
        heard, refused = [], []

        async def opening(client):
            return client

        stranger = NatsConnection(
            [scene.harness.server.url], opening, needs="", rng=random.Random(1), tls=None, config=CONNECTION
        )
        with capture_logs() as logs:
            async with (
                carrier(scene.harness.server.url, identity, BroadcastMetrics(registry)) as listening,
                stranger.connected() as (_, client),
            ):
                listener = SimpleNamespace(push_event=heard.append, push_load=heard.append)
                listening.follow(scene.instance.worker_id, 0, b"key", listener)
                while len(refused) < 2:  # here and in the scene
                    for data in (b"", b"x" * 100, seal(b"another secret", forged), seal(SECRET, forged)[:-1]):
                        subject = f"penstock.suite.events.{scene.instance.worker_id:016x}"
                        await client.publish(subject, data)
                    await asyncio.sleep(0.02)
                    refused = [line for line in logs if line["event"] == "broadcast_refused"]
        assert registry.get_sample_value("penstock_runtime_broadcasts_dropped_total", {"reason": "refused"})
        assert len(refused) == 2, "once each"
        assert not heard
        assert follower.subscriber.sequence == at
        assert follower.blocks
