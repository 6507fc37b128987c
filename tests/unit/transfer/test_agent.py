"""An agent's own memory, bounds and habits, on virtual time: the copies of transport memory need no socket."""

import asyncio
from contextlib import asynccontextmanager

import numpy as np
import pytest

from penstock.core.descriptors import Region
from penstock.core.errors import (
    DeadlineExceeded,
    Overloaded,
    PeerLost,
    TransferCancelled,
    TransferError,
    TransferRefused,
)
from penstock.transfer import MemoryKind, TransferAgent, TransferConfig, TransferOp, TransferState
from tests.support.fake_transport import FakeTransport

READ, WRITE = TransferOp.READ, TransferOp.WRITE
pytestmark = pytest.mark.virtual
IN_PROCESS = TransferConfig(listen=("memory",), transfers_max=2, notifications_max=3)


@asynccontextmanager
async def _play():
    """Give agents whose transfers last until their channel is free."""
    transports = [FakeTransport(), FakeTransport()]
    channel = transports[0].channel
    channel.free.clear()
    async with (
        TransferAgent("a", IN_PROCESS, transports=transports[:1]) as agent,
        TransferAgent("b", IN_PROCESS, transports=transports[1:]) as owner,
    ):
        local = agent.register(np.zeros(64, np.uint8), "here")
        owner.register(np.zeros(64, np.uint8), "there")
        peer = await agent.connect(owner.metadata())
        prepared = agent.prepare(local.ranges(), peer.region("there").ranges(), peer)
        yield agent, owner, channel, prepared


async def test_more_transfers_than_allowed_are_refused():
    async with _play() as (_agent, _owner, channel, prepared):
        first, second = prepared.post(READ), prepared.post(READ)
        with pytest.raises(Overloaded, match=r"2 transfers .*transfers_max"):
            prepared.post(READ)
        channel.free.set()
        await first.wait()
        await second.wait()
        await prepared.post(READ).wait()


async def test_deadlines_are_the_configured_ones_unless_given():
    async with _play() as (_agent, _owner, _channel, prepared):
        loop = asyncio.get_running_loop()
        began_s = loop.time()
        with pytest.raises(DeadlineExceeded, match="within 30 s"):
            await prepared.post(READ).wait()
        assert loop.time() - began_s == pytest.approx(30)
        with pytest.raises(DeadlineExceeded, match="within 2 s"):
            await prepared.post(READ, timeout_s=2).wait()
        assert loop.time() - began_s == pytest.approx(32)


async def test_cancelling_the_wait_leaves_the_transfer_alone():
    async with _play() as (_agent, _owner, channel, prepared):
        handle = prepared.post(READ)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(1):
                await handle.wait()
        assert handle.state is TransferState.PENDING
        channel.free.set()
        await handle.wait()


async def test_cancel_before_the_first_turn_and_after_the_end():
    async with _play() as (agent, _owner, channel, prepared):
        handle = prepared.post(READ)
        handle.cancel()
        with pytest.raises(TransferCancelled):
            await handle.wait()
        channel.free.set()
        done = prepared.post(READ)
        await done.wait()
        done.cancel()
        assert done.state is TransferState.DONE
        assert agent.counters.cancelled_transfers == 1
        assert agent.transfers_under_way == 0


async def test_a_fault_of_a_transport_is_an_error_of_the_transfer_only():
    async with _play() as (agent, _owner, channel, prepared):
        channel.fault = KeyError("oops")
        channel.free.set()
        with pytest.raises(TransferError, match="KeyError"):
            await prepared.post(READ).wait()
        channel.fault = None
        await prepared.post(READ).wait()
        assert agent.counters.failed_transfers == {"memory": 1}
        assert agent.counters.transfers == {"memory": 1}


async def test_notifications_that_nobody_reads_end_the_link():
    async with _play() as (agent, owner, _channel, prepared):
        for _ in range(5):
            agent.send_notification("b", b"x")
        await asyncio.sleep(0.1)
        assert owner.counters.notifications_received == 3
        with pytest.raises(PeerLost, match="notifications"):
            prepared.post(READ)


async def test_a_notification_that_is_too_long_is_refused():
    async with _play() as (agent, _owner, _channel, prepared):
        with pytest.raises(TransferRefused, match="notification of"):
            agent.send_notification("b", bytes(2 << 20))
        with pytest.raises(TransferRefused, match="notification of"):
            prepared.post(READ, notify=bytes(2 << 20))


@pytest.mark.parametrize(
    ("memory", "why"),
    [
        ("text", "str has no memory"),
        (np.zeros((4, 4), np.uint8)[:, ::2], "must be contiguous"),
        (b"", "0 bytes"),
        (Region(kind=MemoryKind.FILE, size_bytes=4), "no transport has any use for it"),
    ],
)
async def test_what_is_no_memory_is_refused(memory, why):
    async with TransferAgent("a", IN_PROCESS, transports=[FakeTransport()]) as agent:
        with pytest.raises(TransferRefused, match=why):
            agent.register(memory)


async def test_read_only_memory_is_a_source_and_no_target():
    async with TransferAgent("a", IN_PROCESS) as agent:
        source = agent.register(b"sixteen bytes...", "text")
        target = agent.register(bytearray(16))
        await agent.post(WRITE, source.ranges(), target.ranges()).wait()
        assert target.region.owner[0] == b"sixteen bytes..."
        with pytest.raises(TransferRefused, match="read-only"):
            agent.post(READ, source.ranges(), target.ranges())
        with pytest.raises(TransferRefused, match="read-only"):
            agent.post(WRITE, target.ranges(), source.ranges())
