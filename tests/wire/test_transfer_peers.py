"""Links and streams between agents: strangers, wrong secrets, silence, other loops, and what is left when peers come and go."""

import asyncio
import contextlib
import gc
import os
import socket
import threading
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import numpy as np
import pytest
import uvloop
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.core.errors import PeerLost, ProtocolError, TransferCancelled, TransferRefused
from penstock.core.framing import LENGTH_BYTES, Challenge
from penstock.core.types.instances import Role
from penstock.core.types.kv import KvLayout
from penstock.router.config import DisaggConfig, RouterConfig
from penstock.testing.loop import run_async
from penstock.transfer import Arena, TransferAgent, TransferConfig, TransferOp
from penstock.transfer.config import TcpConfig
from penstock.transfer.link.frames import (
    TRANSFER_VERSION,
    Greeting,
    LinkFrame,
    Withdrawn,
    decode_metadata,
    link_codec,
    send_all,
)
from penstock.transfer.link.listener import Endpoint
from tests.support.cluster import MemoryCluster
from tests.support.kv_transfer import BLOCK_SIZE, tiny_laid_out_engine, tiny_request, whole_answer
from tests.support.until import until

SOCKETS = TransferConfig(listen=("unix", "tcp://127.0.0.1:0"))
IMPATIENT = TransferConfig(listen=("unix",), heartbeat_timeout_s=0.4)


def _config(secret: str) -> TransferConfig:
    return TransferConfig(listen=("unix",), secret=secret)


async def test_the_secret_of_another_deployment_is_refused_on_both_sides():
    async with TransferAgent("a", _config("red")) as agent, TransferAgent("b", _config("blue")) as other:
        with pytest.raises(ProtocolError, match="agent a: its proof does not fit"):
            await agent.connect(other.metadata())
        assert other.counters.refused == {"protocol_error": 1}
        assert "proof does not fit" in other.refusals[0].message


async def test_metadata_of_an_agent_that_was_replaced_is_no_use():
    """The new one listens on the same port; it is not the one that the metadata names."""
    async with TransferAgent("a", SOCKETS) as agent:
        async with TransferAgent("b", TransferConfig(listen=("tcp://127.0.0.1:0",))) as first:
            metadata = first.metadata()
            (address,) = decode_metadata(metadata).addresses
        async with TransferAgent("b", TransferConfig(listen=(address,))):
            with pytest.raises(ProtocolError, match="exchange metadata anew"):
                await agent.connect(metadata)


async def test_a_peer_that_goes_silent_is_lost():
    async with TransferAgent("a", IMPATIENT) as agent, TransferAgent("b", IMPATIENT) as other:
        memory = other.register(np.zeros(64, np.uint8), "kv")
        peer = await agent.connect(other.metadata())
        local = agent.register(np.zeros(64, np.uint8))
        other._connections._links[1].channel._transport.pause_reading()
        other._connections._links[1].channel._timer.cancel()
        await until(lambda: peer.link.error is not None)
        with pytest.raises(PeerLost, match="silent for"):
            agent.post(TransferOp.READ, local.ranges(), memory.ranges(), peer)


async def _reply(where: str, token: bytes, data: bytes) -> bytes:
    """Say something as a stranger, and give what comes back until the connection ends."""
    loop = asyncio.get_running_loop()
    connection = await Endpoint(where, token)._connect(1.0)
    with connection:
        with contextlib.suppress(OSError):
            await loop.sock_sendall(connection, data)
        connection.shutdown(socket.SHUT_WR)
        answer = b""
        with contextlib.suppress(OSError):
            while more := await loop.sock_recv(connection, 65_536):
                answer += more
        return answer


_HELLO = link_codec().encode(Greeting(version=TRANSFER_VERSION, nonce=b"n" * 16, proof=b"p" * 32, name="x"))
_EARLY = link_codec().encode(Withdrawn(region_id=1))


@settings(max_examples=40, deadline=None)
@given(
    st.one_of(
        st.binary(max_size=200),
        st.binary(max_size=200).map(lambda data: b"PTA link" + data),
        st.binary(max_size=200).map(
            lambda data: b"PTA link" + len(data).to_bytes(LENGTH_BYTES, "little") + data
        ),
        st.binary(max_size=200).map(lambda data: b"PTA strm" + data),
        st.sampled_from([b"PTA link" + _HELLO, b"PTA link" + _EARLY, b"PTA link" + _HELLO + _EARLY]),
        st.just(b"PTA link" + (1 << 30).to_bytes(LENGTH_BYTES, "little")),
    )
)
def test_an_agent_survives_what_strangers_say(data):
    async def scenario():
        async with TransferAgent("b", SOCKETS) as agent:
            for where in decode_metadata(agent.metadata()).addresses:
                await _reply(where, agent.identity.token, data)
            assert not agent._connections._links
            async with TransferAgent("a", SOCKETS) as friend:
                await friend.connect(agent.metadata())

    run_async(scenario())


async def _connect_to_an_impostor(*frames: LinkFrame, match: str) -> None:
    """Connect to who listens in a peer's place, and says this whatever it hears."""
    path = f"\0penstock-test-{os.getpid()}"

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readexactly(8)
        for frame in frames:
            writer.write(link_codec().encode(frame))
        await writer.drain()
        await reader.read()
        writer.close()

    server = await asyncio.start_unix_server(serve, path)
    async with TransferAgent("a", SOCKETS) as agent, TransferAgent("b", _config("")) as other:
        metadata = other.metadata()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("penstock.transfer.link.listener._abstract_name", lambda _: path)
            with pytest.raises(ProtocolError, match=match):
                await agent.connect(metadata)
        assert not agent.peers
    server.close()


def test_a_listener_that_speaks_another_version_is_refused():
    challenge = Challenge(version=TRANSFER_VERSION + 7, nonce=b"n" * 16)
    run_async(_connect_to_an_impostor(challenge, match="transfer version 8"))


async def test_who_listens_everywhere_is_told_to_peers_by_an_address_that_they_reach():
    everywhere = TransferConfig(listen=("tcp://0.0.0.0:0",))
    async with TransferAgent("a", everywhere) as agent, TransferAgent("b", SOCKETS) as other:
        (address,) = decode_metadata(agent.metadata()).addresses
        assert "0.0.0.0" not in address
        await other.connect(agent.metadata())


async def test_a_stream_that_was_opened_once_cannot_be_opened_by_the_same_bytes_again():
    async with TransferAgent("a", SOCKETS) as agent, TransferAgent("b", SOCKETS) as other:
        await agent.connect(other.metadata())
        sent = []

        async def record(connection, data):
            sent.append(data)
            await send_all(connection, data)

        (link,) = agent._connections._links.values()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("penstock.transfer.link.listener.send_all", record)
            (await link.open_stream("tcp")).close()
        theirs = [data for data in sent if data[:4] == b"PTA " or len(data) > 20]
        assert len(theirs) == 2
        reply = await _reply("unix", other.identity.token, b"".join(theirs))
        assert len(reply) == 16, "a nonce, and no welcome"
        assert "not known to the caller" in other.refusals[0].message


async def test_the_kernel_says_which_process_a_peer_is_and_not_the_peer():
    async with TransferAgent("a", SOCKETS) as agent, TransferAgent("b", SOCKETS) as other:
        metadata = other.metadata()
        lie = msgspec.msgpack.decode(metadata[4:]) | {"pid": 1}
        peer = await agent.connect(metadata[:4] + msgspec.msgpack.encode(lie))
        assert peer.link.peer_pid == os.getpid()
        await agent.disconnect(peer)
        lie["addresses"] = [address for address in lie["addresses"] if address.startswith("tcp")]
        peer = await agent.connect(metadata[:4] + msgspec.msgpack.encode(lie))
        assert peer.link.peer_pid == 0, "over TCP it does not know"
        assert "over TCP the kernel does not say" in peer.unreachable["shm"]


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


CONFIG = TransferConfig(listen=("unix",), transports=("shm", "tcp"))
TIMES = 60
FEW = 4
"""More than this at the end grows with the peers: threads and sockets of others begin and end at any time."""


def _held() -> tuple[int, int, int]:
    gc.collect()
    threads = [
        one for one in threading.enumerate() if not one.name.startswith("asyncio_")
    ]  # the loop's own few
    return len(list(Path("/proc/self/fd").iterdir())), len(threads), len(asyncio.all_tasks())


async def _until_as_before(before: tuple[int, int, int], *agents: TransferAgent) -> None:
    """The other side of a socket hears a little later."""
    await until(
        lambda: (
            all(now <= then + FEW for now, then in zip(_held(), before, strict=True))
            and not any(agent._connections._links for agent in agents)
        )
    )


async def test_peers_that_connect_and_disconnect_leave_nothing():
    with Arena.create(1 << 20) as arena:
        async with TransferAgent("owner", CONFIG) as owner, TransferAgent("reader", CONFIG) as reader:
            owner.register(arena, "kv")
            here = reader.register(np.zeros(1 << 20, np.uint8))
            before = (0, 0, 0)
            for number in range(TIMES):
                if number == 2:  # threads that stay have begun
                    await asyncio.sleep(0.05)
                    before = _held()
                peer = await reader.connect(owner.metadata())
                ranges = here.ranges(), peer.region("kv").ranges()
                await reader.post(TransferOp.READ, *ranges, peer).wait()
                await reader.disconnect(peer)
            await _until_as_before(before, owner, reader)


SIZE = 8 << 20


@pytest.mark.parametrize("listen", ["unix", pytest.param("tcp://127.0.0.1:0", marks=pytest.mark.nightly)])
def test_everything_works_on_uvloop(listen):
    config = TransferConfig(listen=(listen,), transports=("tcp",))

    async def main():
        async with TransferAgent("a", config) as agent, TransferAgent("b", config) as other:
            here, there = np.random.default_rng(1).integers(0, 256, (2, SIZE), np.uint8)
            local = agent.register(here)
            other.register(there, "there")
            peer = await agent.connect(other.metadata())
            remote = peer.region("there")
            for size in (100, 64 << 10, SIZE):
                for op in TransferOp:
                    before = here.copy(), there.copy()
                    await agent.post(op, local.ranges(0, size), remote.ranges(0, size), peer).wait()
                    assert np.array_equal(here[:size], there[:size])
                    here[:], there[:] = before
            handle = agent.post(TransferOp.WRITE, local.ranges(), remote.ranges(), peer)
            await asyncio.sleep(0)
            handle.cancel()
            with pytest.raises(TransferCancelled):
                await handle.wait()
            await agent.post(TransferOp.WRITE, local.ranges(), remote.ranges(), peer, notify=b"x").wait()
            assert np.array_equal(here, there)
            assert await anext(other.notifications()) == ("a", b"x")
            handle = agent.post(TransferOp.READ, local.ranges(), remote.ranges(), peer)
            await asyncio.sleep(0)
            await other.close()
            with pytest.raises(PeerLost):
                await handle.wait()

    uvloop.run(main())


MODEL = KvLayout(
    num_layers=3, num_kv_heads=4, head_dim=4, dtype="float16", element_bytes=2, block_size=BLOCK_SIZE
)


@pytest.mark.parametrize("transport", ["shm", pytest.param("tcp", marks=pytest.mark.nightly)])
async def test_blocks_of_two_ranks_become_those_of_four(transport):
    config = TransferConfig(listen=("unix",), transports=(transport,))
    router = RouterConfig(policy="least-loaded", disagg=DisaggConfig(remote_tokens_min=1))
    async with MemoryCluster() as cluster, cluster.dispatcher(router) as dispatcher:
        for name, role, tp in (("p", Role.PREFILL, 2), ("d", Role.DECODE, 4)):
            await cluster.start(
                name,
                tiny_laid_out_engine(MODEL.split(num_blocks=1, tp=tp)),
                role=role,
                agent=TransferAgent(name, config),
            )
        await dispatcher.looked()
        tokens, *_ = await whole_answer(dispatcher, tiny_request("a", 50, 5))
        kv_transfer = cluster.worker("d").kv_transfer
        assert (len(tokens), kv_transfer.incoming.failures, kv_transfer.incoming.fetched_blocks) == (
            5,
            {},
            12,
        )
        assert kv_transfer.exchange.transports == (transport,)
        assert cluster.engine("d").load().prefilled_tokens == 1
