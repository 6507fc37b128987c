"""Authenticated sessions over sockets, with a plane of two messages."""

import asyncio
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest

from penstock.core.errors import ProtocolError, Unavailable
from penstock.core.framing import Challenge, FrameCodec, Goodbye, Ping, Pong
from penstock.core.listening import Address
from penstock.core.wire import Wire
from penstock.runtime import handshake
from penstock.runtime.handshake import Hello, HelloReply, Identity
from penstock.runtime.session import ClientSession, ServerSession, SessionProtocol, SessionServer


class Ask(Wire, frozen=True, tag="ask"):
    """Asks to be admitted."""


class Admitted(Wire, frozen=True, tag="admitted"):
    """Answers `Ask`."""


PROTOCOL = SessionProtocol(
    codec=FrameCodec(Challenge | Hello | HelloReply | Ask | Admitted | Ping | Pong | Goodbye),
    server="desk",
    client="visitor",
    frame_bytes_max=1 << 20,
    write_bytes_max=1 << 20,
    heartbeat_interval_s=10.0,
    heartbeat_timeout_s=30.0,
    connect_timeout_s=30.0,
)
OURS = Identity(process="us", secret=b"a secret")


class Desk(ServerSession):
    def __init__(self, server, log):
        super().__init__(server)
        self.log = log

    def check(self, hello):
        if hello.rank:
            raise ProtocolError(f"rank {hello.rank}: there is one desk")

    def received(self, message):
        self.log.append(type(message).__name__)
        self.admit()
        self.channel.send(Admitted())

    def refused(self, process, error):
        self.log.append(f"{process}: {error.message}")

    def ended(self, reason):
        self.log.append(reason)


class Visitor(ClientSession):
    def __init__(self, identity=OURS, protocol=PROTOCOL, *, rank=0, asks=True):
        super().__init__(protocol, identity)
        self.admitted = self.awaited()
        self.rank, self.asks = rank, asks

    def hello(self, challenge):
        return handshake.hello(self._identity, challenge, rank=self.rank)

    async def enter(self):
        if self.asks:
            self.channel.send(Ask())
        await self.admitted

    def received(self, _message):
        self.admitted.set_result(None)


@asynccontextmanager
async def desk(protocol=PROTOCOL):
    log = []
    server = SessionServer(
        protocol, OURS, Address.parse("tcp://127.0.0.1:0", source="test"), lambda server: Desk(server, log)
    )
    await server.start()
    try:
        yield server, log
    finally:
        await server.close("the test ends", 10.0)
        assert not server.sessions


async def test_a_client_is_admitted_and_told_of_the_end():
    visitor = Visitor()
    async with desk() as (server, log):
        await visitor.connect(server.address, None)
    await visitor.channel.closed.wait()
    assert visitor.channel.said_goodbye
    assert log[0] == "Ask"


@pytest.mark.parametrize(
    ("visitor", "why"),
    [
        ({"identity": replace(OURS, secret=b"a guess")}, "deployment secret"),
        ({"identity": replace(OURS, hash_key=b"another key 1234")}, "hash key"),
        ({"rank": 3}, "rank 3: there is one desk"),
    ],
)
async def test_who_is_refused_is_told_why_and_the_server_notes_it(visitor, why):
    async with desk() as (server, log):
        with pytest.raises(ProtocolError, match=f"the desk refused us: {why}"):
            await Visitor(**visitor).connect(server.address, None)
        assert log[0].startswith(f"us: {why}")


async def test_a_message_before_the_handshake_ends_the_session():
    async with desk() as (server, log):
        visitor = Visitor()
        visitor.hello = lambda _challenge: Ask()
        with pytest.raises(Unavailable):
            await visitor.connect(server.address, None)
        while not log:  # noqa: ASYNC110 - the test's time limit bounds it
            await asyncio.sleep(0.01)
        assert log == ["Ask before hello; the peer is no visitor of this release"]


async def test_who_does_not_ask_to_be_admitted_is_ended():
    async with desk(replace(PROTOCOL, connect_timeout_s=0.2)) as (server, log):
        with pytest.raises(Unavailable, match="the connection ended"):
            await Visitor(asks=False).connect(server.address, None)
        assert log == ["not admitted within 0.2 s"]


async def test_connections_are_bounded():
    async with desk(replace(PROTOCOL, connections_max=1)) as (server, log):
        await Visitor().connect(server.address, None)
        with pytest.raises((Unavailable, OSError)):
            await Visitor().connect(server.address, None)
        assert log[1].startswith(": 1 visitors are connected already (connections_max)")


async def test_closing_waits_no_longer_than_said_for_a_peer_that_does_not_read():
    async with desk() as (server, _):
        _, writer = await asyncio.open_connection(server.address.host, server.address.port)
        while not server.sessions:  # noqa: ASYNC110 - the test's time limit bounds it
            await asyncio.sleep(0.01)
        (session,) = server.sessions
        session.channel.write(bytes(64 << 20))
        await server.close("the test ends", 0.2)
        assert not server.sessions
        writer.close()
