"""Meeting and losing peers, on virtual time."""

import asyncio
from contextlib import asynccontextmanager
from itertools import count

import numpy as np
import pytest

from penstock.core.errors import (
    Overloaded,
    PeerLost,
    TransferError,
    TransferRefused,
)
from penstock.transfer import TransferAgent, TransferConfig, TransferOp
from penstock.transfer.transports.memory import MemoryTransport

pytestmark = pytest.mark.virtual
IN_PROCESS = TransferConfig(listen=("memory",), notifications_max=2, transports=("memory",))


class HesitantTransport(MemoryTransport):
    """Connects to others when it may, or fails."""

    def __init__(self) -> None:
        super().__init__(threads=1, inline_bytes_max=1024)
        self.may = asyncio.Event()
        self.fault: Exception | None = None
        self.closed = 0

    async def connect(self, link, contact, regions):
        channel = await super().connect(link, contact, regions)
        if link is not None:
            await self.may.wait()
            if self.fault is not None:
                raise self.fault

            async def close() -> None:
                self.closed += 1

            channel.close = close
        return channel


@asynccontextmanager
async def _play():
    transport = HesitantTransport()
    async with (
        TransferAgent("a", IN_PROCESS, transports=[transport]) as agent,
        TransferAgent("b", IN_PROCESS) as owner,
    ):
        yield agent, owner, transport


async def _moves(agent, peer):
    here = agent.register(np.zeros(8, np.uint8))
    await agent.post(TransferOp.READ, here.ranges(), peer.region("kv").ranges(), peer).wait()


async def test_a_connect_that_is_cancelled_halfway_leaves_nobody_half_known():
    async with _play() as (agent, owner, transport):
        owner.register(np.zeros(8, np.uint8), "kv")
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(1):
                await agent.connect(owner.metadata())
        assert not agent.peers
        transport.may.set()
        await _moves(agent, await agent.connect(owner.metadata()))


async def test_a_transport_that_does_not_reach_a_peer_says_why():
    async with _play() as (agent, owner, transport):
        transport.may.set()
        transport.fault = TransferError("it is too far")
        owner.register(np.zeros(8, np.uint8), "kv")
        peer = await agent.connect(owner.metadata())
        assert peer.unreachable == {"memory": "it is too far"}
        with pytest.raises(TransferRefused, match="memory: it is too far"):
            await _moves(agent, peer)
        with pytest.raises(TransferError, match="it is too far"):
            agent.estimate(TransferOp.READ, 8, 1, peer)


async def test_a_lost_peer_is_forgotten_with_all_that_was_opened_for_it():
    async with _play() as (agent, owner, transport):
        transport.may.set()
        peer = await agent.connect(owner.metadata())
        await owner.close()
        await asyncio.sleep(0.1)
        assert not agent.peers
        assert not peer.routes
        assert (transport.closed, agent.counters.lost_peers) == (1, 1)
        with pytest.raises(PeerLost, match="agent b is gone"):
            agent.estimate(TransferOp.READ, 8, 1, peer)
        with pytest.raises(PeerLost, match="agent b is not connected"):
            agent.estimate(TransferOp.READ, 8, 1, "b")


async def test_regions_of_two_peers_with_one_number_are_two():
    async with _play() as (agent, owner, transport):
        transport.may.set()
        async with TransferAgent("c", IN_PROCESS) as other:
            kept = owner.register(np.zeros(8, np.uint8), "kv")
            other._table._ids = count(kept.region_id)
            gone = other.register(np.zeros(8, np.uint8), "kv")
            assert kept.region_id == gone.region_id
            first = (await agent.connect(owner.metadata())).region("kv")
            second = (await agent.connect(other.metadata())).region("kv")
            await other.deregister(gone)
            await asyncio.sleep(0.1)
            assert agent.peers["b"].regions["kv"].info == first.info
            assert second.region_id not in agent.peers["c"].infos


async def test_what_another_agent_registered_is_refused():
    async with _play() as (agent, owner, _transport):
        theirs = owner.register(bytearray(9))
        agent._table._ids = count(theirs.region_id)
        mine = agent.register(bytearray(8))
        assert mine.region_id == theirs.region_id
        with pytest.raises(TransferRefused, match=r"region \d+ of 9 bytes was registered by another agent"):
            agent.metadata([theirs])
        with pytest.raises(TransferRefused, match="by another agent"):
            await agent.deregister(theirs)


async def test_notifications_to_itself_that_nobody_reads_are_refused():
    async with _play() as (agent, _owner, _transport):
        own = agent.register(bytearray(16))
        prepared = agent.prepare(own.ranges(0, 8), own.ranges(8, 8))
        for _ in range(2):
            await prepared.post(TransferOp.WRITE, notify=b"x").wait()
        with pytest.raises(Overloaded, match="agent a has 2 notifications that nobody has read"):
            prepared.post(TransferOp.WRITE, notify=b"x")
        await prepared.post(TransferOp.WRITE).wait()
        assert await anext(agent.notifications()) == ("a", b"x")
        await prepared.post(TransferOp.WRITE, notify=b"x").wait()


async def test_lists_that_were_mixed_up_are_refused():
    async with _play() as (agent, owner, transport):
        transport.may.set()
        owner.register(bytearray(8), "kv")
        here, peer = agent.register(bytearray(8)), await agent.connect(owner.metadata())
        there = peer.region("kv")
        for lists in ((there.ranges(), here.ranges(), peer), (here.ranges(), there.ranges())):
            with pytest.raises(TransferRefused, match=r"is not registered|was not given"):
                agent.post(TransferOp.READ, *lists)


async def test_what_is_of_the_wrong_type_is_named():
    async with _play() as (agent, owner, _transport):
        own = agent.register(bytearray(16))
        ranges = own.ranges(0, 8), own.ranges(8, 8)
        with pytest.raises(TypeError, match="op: 'read'"):
            agent.post("read", *ranges)
        with pytest.raises(TypeError, match="notification: str"):
            agent.post(TransferOp.READ, *ranges, notify="done")
        with pytest.raises(TypeError, match="agent metadata: str"):
            await agent.connect(owner.metadata().hex())
