"""Links over sockets: strangers, wrong secrets, garbage, and silence."""

import asyncio
import contextlib
import os
import socket

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.core.errors import PeerLost, ProtocolError
from penstock.core.net.framing import LENGTH_BYTES
from penstock.core.net.handshake import Challenge
from penstock.testing.loop import run_async
from penstock.transfer import TransferAgent, TransferConfig, TransferOp
from penstock.transfer.link.frames import Greeting, LinkFrame, Withdrawn, link_codec
from penstock.transfer.link.listener import Endpoint
from penstock.transfer.link.metadata import TRANSFER_VERSION, decode_metadata
from penstock.transfer.link.socket_io import send_all
from tests.support.until import until

SOCKETS = TransferConfig(listen=("unix", "tcp://127.0.0.1:0"), heartbeat_timeout_s=0.4, connect_timeout_s=1.0)


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
    async with TransferAgent("a", SOCKETS) as agent, TransferAgent("b", SOCKETS) as other:
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

    run_async(scenario(), timeout_s=10)


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
