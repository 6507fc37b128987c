"""Transport `tcp`: moves bytes between memory and sockets without an extra copy, between hosts or processes.

The initiator sends a request over the link, and the owner authorises it before a byte moves. Small transfers go over the
link, in one message. Large ones go over streams: the side that has the bytes sends them, with scatter and gather on native
threads. A stream carries one piece at a time and a peer has a bounded number of streams; further pieces wait in order.
"""

import socket
from collections.abc import Mapping

from penstock.core.descriptors import MAIN_MEMORY, Access, Region, RegionInfo
from penstock.core.errors import PeerLost, PenstockError, TransferError, TransferRefused
from penstock.core.wire import encode
from penstock.seams import Link, TransferChannel, TransportHost
from penstock.transfer.config import TcpConfig
from penstock.transfer.transports.quiet import QuietTransport
from penstock.transfer.transports.tcp.channel import TcpChannel
from penstock.transfer.transports.tcp.server import TcpServer, TcpSession
from penstock.transfer.transports.tcp.stream import StreamRoom
from penstock.transfer.transports.tcp_frames import INLINE_BYTES_MAX, TCP_VERSION, Contact, decode_frame


class TcpTransport(QuietTransport):
    """Moves bytes over stream sockets: TCP, or unix sockets between processes of a host."""

    name = "tcp"
    checksums = False
    setup_s = 0.1
    """Measured as for `shm`."""

    def __init__(self, config: TcpConfig, *, inline_bytes_max: int, idle_s: float) -> None:
        """Begin without streams.

        Args:
            config: number of streams, and bounds of peers' requests.
            inline_bytes_max: transfers up to this size go over the link, in one message.
            idle_s: a batch is aborted after this time without a byte.
        """
        self._config = config
        self._inline_bytes_max = min(inline_bytes_max, INLINE_BYTES_MAX)
        self._room = StreamRoom(config.streams_max, idle_s)
        self._regions: dict[int, Region] = {}
        self._server: TcpServer | None = None
        self._channels: dict[Link, TcpChannel] = {}
        self._sessions: dict[Link, TcpSession] = {}

    async def start(self, host: TransportHost) -> None:
        self._server = TcpServer(host, self._regions, self._config, self._room)

    def contact(self) -> bytes:
        config = self._config
        return encode(
            Contact(
                version=TCP_VERSION,
                streams=config.streams_per_peer_max,
                window=config.window,
                piece_bytes=config.piece_bytes_max,
            )
        )

    def register(self, region_id: int, region: Region, access: Access) -> bytes | None:
        del access  # shown keys are checked whenever a peer asks
        if region.kind not in MAIN_MEMORY:
            return None
        self._regions[region_id] = region
        return b""

    async def deregister(self, region_id: int) -> None:
        self._regions.pop(region_id, None)
        for session in list(self._sessions.values()):
            await session.deregister(region_id)

    async def connect(
        self, link: Link | None, contact: bytes, regions: Mapping[int, RegionInfo]
    ) -> TransferChannel:
        if link is None or not link.has_streams:
            raise TransferError("both are in one process: there are no sockets between them")
        channel = TcpChannel(
            link,
            Contact.decode(contact),
            self._room,
            streams=self._config.streams,
            inline_bytes_max=self._inline_bytes_max,
            regions=self._regions,
            remote=regions,
        )
        self._channels[link] = channel
        return channel

    def receive(self, link: Link, payload: bytes) -> None:
        frame = decode_frame(payload)
        if not link.initiated:
            self._session(link).received(frame)
        elif link in self._channels:
            self._channels[link].received(frame)

    def accept(self, link: Link, stream: socket.socket) -> None:
        self._session(link).accept(stream)

    def lost(self, link: Link, error: PenstockError) -> None:
        channel = self._channels.pop(link, None)
        if channel is not None:
            channel.lost(PeerLost(error.message))
        session = self._sessions.get(link)
        if session is not None and self._server is not None:
            session.lost(error)
            self._server.host.spawn(self._close_session(link, session, error))

    async def close(self) -> None:
        server, self._server = self._server, None
        for channel in list(self._channels.values()):
            await channel.close()
        for session in list(self._sessions.values()):
            await session.close(PeerLost("the agent closes"))
        if server is not None:
            self._room.close()

    async def _close_session(self, link: Link, session: TcpSession, error: PenstockError) -> None:
        """Close a session and forget it."""
        await session.close(error)
        self._sessions.pop(link, None)

    def _session(self, link: Link) -> TcpSession:
        if self._server is None:
            raise TransferRefused("the agent closes")
        session = self._sessions.get(link)
        if session is None:
            session = self._sessions[link] = TcpSession(self._server, link)
        return session
