"""Two honest agents and the streams between them: how many, in what order, and what is left when something ends."""

import asyncio
import socket
from contextlib import asynccontextmanager

import numpy as np
import pytest

from penstock.core.errors import TransferCancelled, TransferRefused
from penstock.transfer import TransferAgent, TransferConfig, TransferOp
from penstock.transfer.tcp_config import TcpConfig
from tests.support.until import until

READ, WRITE = TransferOp.READ, TransferOp.WRITE
MIB = 1 << 20
PART = MIB
PARTS = 16


class Two:
    """An agent that posts and one that owns; both have `PARTS` parts of a megabyte."""

    def __init__(self, agent, owner):
        self.agent, self.owner = agent, owner
        words = np.arange(PARTS * PART // 4, dtype=np.uint32)
        self.here, self.there = words.view(np.uint8), (~words).view(np.uint8)

    async def meet(self):
        self.local = self.agent.register(self.here)
        self.owned = self.owner.register(self.there, "there")
        self.peer = await self.agent.connect(self.owner.metadata())
        self.channel = self.peer.routes["tcp"].channel
        return self

    def post(self, op, index, **options):
        ranges = self.local.ranges(index * PART, PART), self.owned.ranges(index * PART, PART)
        return self.agent.post(op, *ranges, self.peer, **options)

    def session(self):
        (session,) = self.owner._transports["tcp"]._sessions.values()
        return session

    def streams(self, agent):
        return agent._transports["tcp"]._room.streams


@asynccontextmanager
async def two(*, streams=2, **bounds):
    config = TransferConfig(
        listen=("tcp://127.0.0.1:0",), transports=("tcp",), tcp=TcpConfig(streams=streams, **bounds)
    )
    async with TransferAgent("a", config) as agent, TransferAgent("owner", config) as owner:
        yield await Two(agent, owner).meet()


async def test_no_stream_is_opened_before_there_is_something_large_to_move():
    async with two() as both:
        small = both.local.ranges(0, 64 << 10), both.owned.ranges(0, 64 << 10)
        for op in (READ, WRITE):
            await both.agent.post(op, *small, both.peer).wait()
        assert not both.streams(both.agent)
        await both.post(WRITE, 0).wait()
        assert len(both.streams(both.agent)) == 1
        for index in range(5):
            await both.post(WRITE, index).wait()
        assert len(both.streams(both.agent)) == 1, "the idle one is used again"


async def test_a_large_transfer_is_shared_by_all_streams():
    async with two(streams=3) as both:
        whole = both.local.ranges(), both.owned.ranges()
        await both.agent.post(READ, *whole, both.peer).wait()
        assert np.array_equal(both.here, both.there)
        assert len(both.streams(both.agent)) == len(both.streams(both.owner)) == 3


@pytest.mark.parametrize("op", [READ, WRITE])
async def test_what_is_beyond_the_owners_bounds_waits_in_order(op):
    async with two(streams=8, streams_per_peer_max=2) as both:
        ended = []
        handles = [both.post(op, index) for index in range(PARTS)]

        async def wait(index):
            await handles[index].wait()
            ended.append(index)

        async with asyncio.TaskGroup() as tasks:
            for index in range(PARTS):
                tasks.create_task(wait(index))
            while len(ended) < PARTS:
                await asyncio.sleep(0)
                if both.owner._transports["tcp"]._sessions:
                    assert len(both.session()._pushes) <= 2
        assert len(both.streams(both.owner)) == 2
        for place, index in enumerate(ended):
            # They begin in order, two at a time: of two that are done at once either may be heard of first.
            still_under_way = set(range(index)).difference(ended[:place])
            assert len(still_under_way) <= 2, ended
        assert np.array_equal(both.here, both.there)


async def test_a_cancelled_transfer_leaves_others_alone():
    async with two(streams=3) as both:
        handles = [both.post(WRITE, index) for index in range(PARTS)]
        await handles[0].wait()
        cancelled = [handle for handle in handles[4::3] if handle.is_pending]
        for handle in cancelled:
            handle.cancel()
        assert cancelled
        for index, handle in enumerate(handles):
            if handle in cancelled:
                with pytest.raises(TransferCancelled):
                    await handle.wait()
            else:
                await handle.wait()
                part = slice(index * PART, (index + 1) * PART)
                assert np.array_equal(both.here[part], both.there[part])
        await until(lambda: not both.session()._pushes)
        await both.post(READ, 1).wait()
        assert len(both.streams(both.owner)) <= 3


async def test_deregistering_ends_only_what_uses_the_region():
    async with two() as both:
        other = both.owner.register(np.zeros(PART, np.uint8), "other")
        both.peer = await both.agent.connect(both.owner.metadata())
        doomed = [both.post(WRITE, index) for index in range(8)]
        kept = [
            both.agent.post(WRITE, both.local.ranges(0, PART), other.ranges(), both.peer) for _ in range(8)
        ]
        await both.owner.deregister(both.owned)
        there = both.there.copy()
        for handle in doomed:
            if handle.is_pending or handle.error is not None:
                with pytest.raises(TransferRefused):
                    await handle.wait()
        for handle in kept:
            await handle.wait()
        assert np.array_equal(both.there, there), "written after it was given back"


@pytest.mark.parametrize("op", [READ, WRITE])
async def test_an_owner_keeps_nothing_of_a_peer_that_is_gone(op):
    async with two() as both:
        handles = [both.post(op, index) for index in range(PARTS)]
        await handles[0].wait()
        await both.agent.close()
        for handle in handles:
            if handle.error is not None:
                with pytest.raises(Exception, match="closes"):
                    await handle.wait()
        await until(lambda: not both.owner._transports["tcp"]._sessions)
        assert not both.streams(both.owner)
        assert not both.streams(both.agent)
        there = both.there.copy()
        assert np.array_equal(both.there, there)


async def test_an_idle_stream_that_ends_is_replaced():
    async with two() as both:
        await both.post(WRITE, 0).wait()
        (stream,) = both.streams(both.owner)
        stream._socket.shutdown(socket.SHUT_RDWR)
        await until(lambda: not both.streams(both.agent) and not both.streams(both.owner))
        assert not both.session()._streams
        await both.post(WRITE, 1).wait()
        assert np.array_equal(both.here[: 2 * PART], both.there[: 2 * PART])
