"""Fuzz targets: the parts of the transfer library that read bytes from unauthenticated clients and from peers.

Each function takes any bytes, and raises only AssertionError, if something happened that must not.
"""

import asyncio
import contextlib
import socket
from collections.abc import Coroutine, Mapping

import numpy as np

from penstock.core.descriptors import Descriptors, Granted, Keys, MemoryKind, Region, TransferOp
from penstock.core.errors import PenstockError, ProtocolError
from penstock.core.framing import UNAUTHENTICATED_FRAME_BYTES_MAX, FrameReader
from penstock.seams import Transport
from penstock.transfer.config import TcpConfig
from penstock.transfer.link.frames import decode_metadata, link_codec
from penstock.transfer.link.grants import Grants
from penstock.transfer.regions.regions import RegionTable
from penstock.transfer.transports.memory import MemoryTransport
from penstock.transfer.transports.shm import ShmTransport
from penstock.transfer.transports.tcp.server import TcpServer, TcpSession
from penstock.transfer.transports.tcp.stream import StreamRoom
from penstock.transfer.transports.tcp_frames import Contact, TcpFrame, decode_frame

_GIVEN_BYTES = 4096
_codec = link_codec()


def feed_metadata(data: bytes) -> None:
    """Decode an agent's metadata, and a contact of transport `tcp`."""
    with contextlib.suppress(ProtocolError):
        decode_metadata(data)
    with contextlib.suppress(PenstockError):
        Contact.decode(data)


def feed_link(data: bytes) -> None:
    """Decode what an unauthenticated client sends on a connection that it has declared a link."""
    with contextlib.suppress(ProtocolError):
        for payload in FrameReader(UNAUTHENTICATED_FRAME_BYTES_MAX).feed(data):
            _codec.decode(payload)


class TcpOwner:
    """The owner's side of transport `tcp` without sockets: one granted region of 4,096 bytes with `keys`, between two without grants.

    Use it within a running event loop.
    """

    def __init__(self) -> None:
        """Register the region."""
        self.memory = np.full(3 * _GIVEN_BYTES, 7, np.uint8)
        self.answers: list[TcpFrame] = []
        self.table = RegionTable(first_id=1)
        region = Region(
            MemoryKind.DRAM, _GIVEN_BYTES, "given", self.memory.ctypes.data + _GIVEN_BYTES, owner=self.memory
        )
        transport = MemoryTransport(threads=1, inline_bytes_max=0)
        registration = self.table.register(region, {transport.name: transport}, {}, {})
        self.region_id = registration.region_id
        self.keys = {op: registration.key(op) for op in TransferOp}
        room = StreamRoom(1, 1.0)
        self._session = TcpSession(
            TcpServer(_Host(self.table), {self.region_id: region}, TcpConfig(), room), _Link(self)
        )

    def feed(self, payload: bytes) -> None:
        """Process one message of an authenticated peer."""
        with contextlib.suppress(ProtocolError):
            self._session.received(decode_frame(payload))
        assert (self.memory[:_GIVEN_BYTES] == 7).all(), "memory before the region was touched"
        assert (self.memory[2 * _GIVEN_BYTES :] == 7).all(), "memory after the region was touched"


class _Host:
    name = "owner"

    def __init__(self, table: RegionTable) -> None:
        self._table = table

    def region(self, region_id: int) -> Region:
        return self._table.get(region_id).region

    def authorize(
        self, peer: str, key_by_region: Mapping[int, bytes], ranges: Descriptors, op: TransferOp
    ) -> None:
        del peer
        self._table.authorize(key_by_region, ranges, op)

    def refused(self, error: PenstockError, peer: str) -> None: ...

    def spawn(self, work: Coroutine[object, object, None]) -> None:
        work.close()
        raise AssertionError("there are no streams to work on")


class _GrantingHost(_Host):
    def __init__(self, table: RegionTable, transport: Transport) -> None:
        super().__init__(table)
        self._transport = transport

    def transport(self, name: str) -> Transport | None:
        return self._transport if name == self._transport.name else None


class _Link:
    peer = "anybody"
    initiated = False
    same_host = True
    peer_pid = 0
    has_streams = True
    error = None

    def __init__(self, owner: TcpOwner) -> None:
        self._owner = owner

    def send(self, transport: str, payload: bytes) -> None:
        del transport
        answer = decode_frame(payload)
        assert isinstance(answer, TcpFrame), "it sends what it cannot read"
        self._owner.answers.append(answer)

    async def request(self, transport: str, keys: Keys, payload: bytes = b"") -> Granted:
        raise AssertionError(f"{transport}: the owner asks for nothing")

    async def open_stream(self, transport: str) -> socket.socket:
        raise AssertionError(f"{transport}: the owner opens no streams")


def feed_tcp_owner(data: bytes) -> None:
    """Process messages of an authenticated peer, each after its length in two bytes."""

    async def main() -> None:
        owner = TcpOwner()
        rest = data
        while len(rest) >= 2:
            length = int.from_bytes(rest[:2], "little")
            owner.feed(rest[2 : 2 + length])
            rest = rest[2 + length :]

    asyncio.run(main())


def feed_grants(data: bytes) -> None:
    """Process what an authenticated peer sends over a stream that requests memory."""

    async def main() -> None:
        owner = TcpOwner()
        transport = ShmTransport(threads=1, inline_bytes_max=0)
        host = _GrantingHost(owner.table, transport)
        await transport.start(host)
        ours, theirs = socket.socketpair()
        with theirs:
            ours.setblocking(False)
            theirs.sendall(data)
            theirs.shutdown(socket.SHUT_WR)
            await Grants(host, 1.0).serve(_Link(owner), ours)
        await transport.close()

    asyncio.run(main())


TARGETS = {
    "metadata": feed_metadata,
    "link": feed_link,
    "tcp_owner": feed_tcp_owner,
    "grants": feed_grants,
}
