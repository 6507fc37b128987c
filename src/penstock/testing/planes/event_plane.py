"""The conformance suite of KV events over a request plane. Subclass it and name a harness, as for the request plane.

Requests tell the worker which events to publish; the tests check the content that a subscriber ends up with.
"""

import asyncio
import random
from collections.abc import Awaitable, Callable, Sequence
from typing import ClassVar

from penstock.core.ids import WorkerId
from penstock.core.types.events import EventBatch, EventMessage, EventSnapshot, Holder, KvEvent, Tier
from penstock.runtime.config import EventConfig
from penstock.runtime.events.publisher import ContentMirror
from penstock.runtime.events.subscriber import EventFault, EventSubscriber
from penstock.seams import Connection
from penstock.testing.loop import run_async
from penstock.testing.planes.request_plane import HarnessFactory, Scene
from penstock.testing.planes.scripted_worker import HOST_BLOCKS_FROM, RecordingSink, scripted_request


class Follower:
    """A subscriber and the content that it has derived."""

    def __init__(
        self,
        connection: Connection,
        sink: RecordingSink,
        config: EventConfig | None = None,
        holder: Holder = Holder.WORKER,
    ) -> None:
        """Make a subscriber to the worker of `connection`; `start` subscribes."""
        self.mirror = ContentMirror()
        self.snapshots = 0
        self.faults: list[EventFault] = []
        self.sink = sink
        self.connection = connection
        self.subscriber = EventSubscriber(
            connection,
            apply=self.apply,
            replace=self.replace,
            on_fault=self.faults.append,
            rng=random.Random(1),
            config=config,
            holder=holder,
        )
        sink.on_event = self.subscriber.push

    @property
    def blocks(self) -> set[int]:
        return {block_hash for block_hash, _ in self.mirror.counts()}

    def apply(self, _worker_id: WorkerId, events: Sequence[KvEvent]) -> None:
        for event in events:
            self.mirror.apply(event)

    def replace(self, worker_id: WorkerId, part: EventSnapshot) -> None:
        self.snapshots += part.last
        if part.chunk == 0:
            self.mirror = ContentMirror()
        self.apply(worker_id, part.events)

    async def until_at(self, sequence: int) -> None:
        """Wait until it has applied the worker's batch `sequence`."""
        subscriber = self.subscriber
        await self.sink.until(lambda: subscriber.synced and (subscriber.sequence or 0) >= sequence)


class EventPlaneSuite:
    """The contract of `EventSource`, `EventCarrier`, `Connection.subscribe` and `EventSubscriber`."""

    harness: ClassVar[HarnessFactory]
    is_carried: ClassVar[bool] = False
    """Whether a carrier brings new events, and the worker has no subscriber for each connection.

    Then events may come twice, and what comes before the carrier has connected is lost and asked for: that counts as faults.
    """
    loop_factory: ClassVar[Callable[[], asyncio.AbstractEventLoop]] = asyncio.new_event_loop

    def run(self, scenario: Callable[[Scene], Awaitable[None]], config: EventConfig | None = None) -> None:
        async def main() -> None:
            async with Scene(type(self).harness(None, config)) as scene:
                await scenario(scene)

        run_async(main(), loop_factory=type(self).loop_factory)

    async def publish(self, scene: Scene, *blocks: int) -> int:
        """Make the worker store these blocks, or remove negative ones; return its sequence."""
        sink = RecordingSink()
        connection = await scene.harness.plane().connect(scene.instance, sink)
        connection.submit(scripted_request("publish", blocks, request_id="publish"))
        await sink.finished("publish")
        await connection.close()
        return sink.tokens("publish")[0]

    def test_a_snapshot_comes_first_and_changes_follow(self) -> None:
        async def scenario(scene: Scene) -> None:
            follower = Follower(scene.connection, scene.sink)
            await self.publish(scene, 1, 2, 3, -2)
            assert not scene.sink.events, "nobody has asked yet"
            follower.subscriber.start()
            await follower.until_at(4)
            assert follower.blocks == {1, 3}
            await self.publish(scene, 4, -1, 3)
            await follower.until_at(7)
            assert follower.mirror.counts() == {(3, Tier.DEVICE): 2, (4, Tier.DEVICE): 1}
            assert follower.snapshots == 1

        self.run(scenario)

    def test_what_workers_share_is_told_apart_and_only_while_it_is_asked_for(self) -> None:
        async def scenario(scene: Scene) -> None:
            own = Follower(scene.connection, scene.sink)
            host = Follower(scene.connection, scene.sink, holder=Holder.HOST)
            followers = {Holder.WORKER: own, Holder.HOST: host}
            scene.sink.on_event = lambda message: followers[message.holder].subscriber.push(message)
            first = HOST_BLOCKS_FROM
            await self.publish(scene, 1, first)
            own.subscriber.start()
            await own.until_at(1)
            assert host.blocks == set(), "nobody has asked yet"
            host.subscriber.start()
            await host.until_at(1)
            await self.publish(scene, first + 1, 2, first + 2, -first)
            await host.until_at(4)
            await own.until_at(2)
            assert (own.blocks, host.blocks) == ({1, 2}, {first + 1, first + 2})
            scene.connection.unsubscribe(Holder.HOST)
            scene.connection.unsubscribe(Holder.HOST)
            prompt = (first + 3, 3)
            scene.connection.submit(scripted_request("publish", prompt, request_id="last"))
            await scene.sink.finished("last")
            await own.until_at(3)
            assert host.blocks == {first + 1, first + 2}
            scene.connection.subscribe(4, Holder.HOST)
            await host.until_at(5)
            assert host.blocks == {first + 1, first + 2, first + 3}
            if not self.is_carried:
                assert not host.faults

        self.run(scenario)

    def test_an_empty_worker_has_a_snapshot_too(self) -> None:
        async def scenario(scene: Scene) -> None:
            follower = Follower(scene.connection, scene.sink)
            follower.subscriber.start()
            await follower.until_at(0)
            assert follower.blocks == set()

        self.run(scenario)

    def test_a_long_snapshot_comes_in_chunks(self) -> None:
        async def scenario(scene: Scene) -> None:
            await self.publish(scene, *range(100))
            follower = Follower(scene.connection, scene.sink)
            follower.subscriber.start()
            await follower.until_at(100)
            assert follower.blocks == set(range(100))
            chunks = [message for message in scene.sink.events if isinstance(message, EventSnapshot)]
            assert [chunk.chunk for chunk in chunks] == list(range(13))
            assert [chunk.last for chunk in chunks] == [False] * 12 + [True]
            assert {chunk.sequence for chunk in chunks} == {100}

        self.run(scenario, EventConfig(snapshot_chunk_hashes=8))

    def test_a_subscriber_that_returns_soon_gets_only_later_batches(self) -> None:
        async def scenario(scene: Scene) -> None:
            await self.publish(scene, *range(10))
            scene.connection.subscribe(7)
            await scene.sink.until(lambda: {message.sequence for message in scene.sink.events} >= {8, 9, 10})
            if not self.is_carried:
                assert [message.sequence for message in scene.sink.events] == [8, 9, 10]
            assert all(isinstance(message, EventBatch) for message in scene.sink.events)

        self.run(scenario)

    def test_a_subscriber_that_returns_late_gets_a_snapshot(self) -> None:
        async def scenario(scene: Scene) -> None:
            await self.publish(scene, *range(10))
            scene.connection.subscribe(3)
            seen = scene.sink.events
            await scene.sink.until(lambda: any(isinstance(message, EventSnapshot) for message in seen))
            if not self.is_carried:
                assert isinstance(seen[0], EventSnapshot)
            assert {message.sequence for message in seen if isinstance(message, EventSnapshot)} == {10}

        self.run(scenario, EventConfig(replay_batches_max=4))

    def test_a_second_subscribe_duplicates_nothing(self) -> None:
        async def scenario(scene: Scene) -> None:
            for _ in range(3):
                scene.connection.subscribe(0)
            scene.connection.submit(scripted_request("echo", [1], request_id="after"))
            await scene.sink.finished("after")
            await self.publish(scene, 1, 2)
            await scene.sink.until(lambda: len(scene.sink.events) >= 2)
            await self.publish(scene, 3)
            await scene.sink.until(lambda: scene.sink.events[-1].sequence == 3)
            seen = [message.sequence for message in scene.sink.events]
            assert (sorted(set(seen)) if self.is_carried else seen) == [1, 2, 3]

        self.run(scenario)

    def test_a_gap_is_noticed_and_repaired(self) -> None:
        async def scenario(scene: Scene) -> None:
            follower = Follower(scene.connection, scene.sink)
            follower.subscriber.start()
            await follower.until_at(0)
            scene.sink.on_event = _Dropping(follower.subscriber.push, sequences={2, 3})
            await self.publish(scene, 1, 2, 3, 4)
            await follower.until_at(4)
            assert follower.blocks == {1, 2, 3, 4}
            gaps = follower.faults.count(EventFault.GAP)
            assert follower.subscriber.resyncs == gaps
            assert gaps >= 1 if self.is_carried else gaps == 1
            assert follower.snapshots == 1, "the tail was enough"

        self.run(scenario)

    def test_a_subscriber_in_doubt_gets_a_snapshot(self) -> None:
        async def scenario(scene: Scene) -> None:
            follower = Follower(scene.connection, scene.sink)
            follower.subscriber.start()
            await self.publish(scene, 1, 2)
            await follower.until_at(2)
            follower.mirror = ContentMirror()
            snapshots = follower.snapshots
            assert follower.subscriber.doubt()
            assert not follower.subscriber.doubt(), "it asks already"
            await follower.until_at(2)
            assert (follower.blocks, follower.snapshots) == ({1, 2}, snapshots + 1)

        self.run(scenario)

    def test_a_gap_longer_than_the_ring_is_repaired_by_a_snapshot(self) -> None:
        async def scenario(scene: Scene) -> None:
            follower = Follower(scene.connection, scene.sink)
            follower.subscriber.start()
            await follower.until_at(0)
            scene.sink.on_event = _Dropping(follower.subscriber.push, sequences=set(range(1, 20)))
            await self.publish(scene, *range(1, 21))
            await follower.until_at(20)
            assert follower.blocks == set(range(1, 21))
            assert follower.snapshots == 2

        self.run(scenario, EventConfig(replay_batches_max=4))

    def test_subscribers_are_equal_and_leave_nothing_behind(self) -> None:
        async def scenario(scene: Scene) -> None:
            sinks = [RecordingSink() for _ in range(3)]
            followers = [Follower(await scene.connect(sink), sink) for sink in sinks]
            for follower in followers:
                follower.subscriber.start()
            await self.publish(scene, 1, 2, 3)
            for follower in followers:
                await follower.until_at(3)
                assert follower.blocks == {1, 2, 3}
            assert (await scene.stats()).subscribers == (0 if self.is_carried else 3)
            for follower in followers:
                follower.subscriber.close()
                await follower.connection.close()
            await scene.until_stats(lambda stats: stats.subscribers == 0)

        self.run(scenario)


class _Dropping:
    """Drops the first message of each of some sequences."""

    def __init__(self, push: Callable[[EventMessage], None], sequences: set[int]) -> None:
        self._push = push
        self._sequences = sequences

    def __call__(self, message: EventMessage) -> None:
        if message.sequence in self._sequences:
            self._sequences.discard(message.sequence)
        else:
            self._push(message)
