"""The conformance suite of calls to a worker: changes, actions on its KV cache, media, counts of tenants."""

import asyncio

import pytest

from penstock.core.errors import PenstockError, RequestError, WorkerLost
from penstock.core.types.instances import BecomeRole, Role, Sleep, WakeUp, WorkerChange
from penstock.core.types.kv import KvEvict, KvReport
from penstock.core.types.load import PeerCount, TenantCount
from penstock.core.types.requests import ExpandedPrompt, MediaItem, MediaPrompt
from penstock.core.wire import PackedHashes, pack_tokens
from penstock.seams import Connection
from penstock.testing.planes.request_plane import RequestPlaneSuite, Scene
from penstock.testing.planes.scripted_worker import RecordingSink


class CallsSuite(RequestPlaneSuite):
    """The contract of request planes, and of the calls over their connections."""

    def test_a_change_is_answered(self) -> None:
        async def scenario(scene: Scene) -> None:
            async with asyncio.TaskGroup() as group:  # the answers come in whatever order
                refused = group.create_task(_refusal(scene.connection, Sleep(level=2)))
                await scene.connection.change(BecomeRole(role=Role.DECODE))
            error = refused.result()
            assert isinstance(error, RequestError)
            assert (error.message, error.http_status) == ("it is one already", 409)

        self.run(scenario)

    def test_an_action_on_the_cache_is_answered_with_a_report(self) -> None:
        async def scenario(scene: Scene) -> None:
            evict = KvEvict(block_hashes=PackedHashes(bytes(48)))
            assert await scene.connection.change(evict) == KvReport(blocks=3)
            await scene.connection.change(BecomeRole(role=Role.DECODE))

        self.run(scenario)

    def test_media_are_expanded_or_refused(self) -> None:
        async def scenario(scene: Scene) -> None:
            items = (MediaItem.of("image", b"\1\2"), MediaItem.of("image", b"\3"))
            prompt = MediaPrompt(token_ids=pack_tokens([7]), items=items)
            expected = ExpandedPrompt(token_ids=pack_tokens([7, 1, 2, 3]), positions=(1, 3))
            assert await scene.connection.expand_media(prompt) == expected
            audio = MediaPrompt(token_ids=pack_tokens([7]), items=(MediaItem.of("audio", b"x"),))
            with pytest.raises(RequestError, match="it takes no audio"):
                await scene.connection.expand_media(audio)
            await scene.harness.kill(scene.instance)
            with pytest.raises(WorkerLost):
                await scene.connection.expand_media(prompt)

        self.run(scenario)

    def test_a_pending_call_fails_when_the_connection_ends(self) -> None:
        async def scenario(scene: Scene) -> None:
            other = await scene.connect(RecordingSink())
            async with asyncio.TaskGroup() as group:
                waiting = [
                    group.create_task(_refusal(connection, WakeUp()))
                    for connection in (scene.connection, other)
                ]
                await scene.stats()  # the questions are there
                await other.close()
                await scene.harness.kill(scene.instance)
            assert [type(task.result()) for task in waiting] == [WorkerLost, WorkerLost]
            with pytest.raises(WorkerLost):
                await scene.connection.change(BecomeRole(role=Role.DECODE))

        self.run(scenario)

    def test_counts_of_tenants_are_answered(self) -> None:
        async def scenario(scene: Scene) -> None:
            assert await scene.connection.count_tenants({}) == {}
            counts = {"t": TenantCount(requests=2, tokens=-3, inflight=4), "ü": TenantCount(inflight=1)}
            await scene.connect(RecordingSink())
            assert await scene.connection.count_tenants(counts) == {
                "t": PeerCount(requests=2, tokens=-3, inflight=4, frontends=1),
                "ü": PeerCount(inflight=1, frontends=1),
            }
            await scene.harness.kill(scene.instance)
            with pytest.raises(WorkerLost):
                await scene.connection.count_tenants(counts)

        self.run(scenario)


async def _refusal(connection: Connection, change: WorkerChange) -> PenstockError | None:
    try:
        await connection.change(change)
    except PenstockError as error:
        return error
    return None
