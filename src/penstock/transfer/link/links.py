"""Links between agents, as an agent uses them, and the link over a socket."""

import asyncio
import contextlib
import select
import socket
from collections.abc import Awaitable, Callable
from typing import Protocol

from penstock.core.channel import FrameChannel
from penstock.core.descriptors import Granted, Keys
from penstock.core.errors import (
    PeerLost,
    PenstockError,
    ProtocolError,
    TransferError,
    TransferRefused,
    from_info,
)
from penstock.core.framing import UNAUTHENTICATED_FRAME_BYTES_MAX, FrameCodec
from penstock.seams import Link
from penstock.transfer.config import TransferConfig
from penstock.transfer.link.frames import (
    FRAME_BYTES_MAX,
    LinkFrame,
    Notification,
    TransportMessage,
    Withdrawn,
    WithdrawnDone,
    link_codec,
)
from penstock.transfer.link.grants import GRANTS, GrantRequest, request_over

_LOOK_S = 0.02
_LOOKS_RISE, _LOOK_S_MAX = 1.5, 0.5
_KEEPALIVE = {socket.TCP_KEEPIDLE: 5, socket.TCP_KEEPINTVL: 5, socket.TCP_KEEPCNT: 3}
"""Seconds, and probes: a host that is down answers none, a host with a stopped process answers."""


class LastEnd:
    """Polls whether the other end is closed; reads nothing that arrives."""

    def __init__(self, end: socket.socket, closed: Callable[[], None]) -> None:
        """Take ownership of a socket, shut down its sending side so that the peer sees the end, and poll at once.

        Args:
            end: this side's.
            closed: called once, in a later turn of the loop or in this one.
        """
        self._end = end
        self._closed = closed
        self._poll = select.poll()
        self._poll.register(end, select.POLLRDHUP)
        self._look_s = _LOOK_S
        self._timer: asyncio.TimerHandle | None = None
        if end.family != socket.AF_UNIX:
            end.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            for option, value in _KEEPALIVE.items():
                end.setsockopt(socket.IPPROTO_TCP, option, value)
        with contextlib.suppress(OSError):  # it is closed already
            end.shutdown(socket.SHUT_WR)
        self._look()

    def close(self) -> None:
        """Stop polling and close the socket. Safe twice."""
        if self._timer is not None:
            self._timer.cancel()
        self._end.close()

    def _look(self) -> None:
        if self._poll.poll(0):
            self._end.close()
            self._closed()
            return
        self._timer = asyncio.get_running_loop().call_later(self._look_s, self._look)
        self._look_s = min(self._look_s * _LOOKS_RISE, _LOOK_S_MAX)


_WRITE_BUFFER_BYTES = 4 << 20
_WRITE_BYTES_MAX = 64 << 20
"""With more unsent bytes than this the link is aborted: the peer does not read."""
_LINK_ENDS_S = 1.0
_CODEC: FrameCodec[LinkFrame] = link_codec()

StreamOpener = Callable[[str], Awaitable[socket.socket]]


class LinkHandler(Protocol):
    """Callbacks of a link, from the event loop."""

    def link_message(self, link: "AgentLink", transport: str, payload: bytes) -> None:
        """Take a transport's message.

        Raises:
            ProtocolError: the message is invalid.
        """
        ...

    def link_notified(self, link: "AgentLink", payload: bytes) -> None:
        """Take a notification.

        Raises:
            ProtocolError: too many notifications are unread.
        """
        ...

    def link_withdrawn(self, link: "AgentLink", region_id: int) -> None: ...

    def link_withdrawn_done(self, link: "AgentLink", region_id: int) -> None: ...

    def link_lost(self, link: "AgentLink", error: PenstockError) -> None:
        """The link has ended. Called once, if the link was ever open."""
        ...

    async def link_requested(self, link: "AgentLink", request: GrantRequest) -> Granted:
        """Answer a request for memory from a peer within this process; see `Grants.answer`."""
        ...

    def link_exposed(self, link: "AgentLink") -> bool:
        """Say whether the peer may use memory of this agent by itself. Called before `link_lost`."""
        ...


class Handshake(Protocol):
    """One side of the handshake of a link."""

    def began(self, link: "SocketLink") -> None:
        """The link is connected."""
        ...

    def received(self, link: "SocketLink", message: LinkFrame) -> None:
        """A message came before the handshake was complete.

        Raises:
            ProtocolError: the peer may not have this link.
        """
        ...


class AgentLink(Link, Protocol):
    """A `penstock.seams.Link` with the methods for the agent alone."""

    def notify(self, payload: bytes) -> None: ...

    def withdraw(self, region_id: int) -> None: ...

    def withdraw_done(self, region_id: int) -> None: ...

    @property
    def gone(self) -> "asyncio.Future[None]":
        """Done when the link has ended and its initiator uses no memory of this agent any more."""
        ...

    def hold(self) -> None:
        """Initiator's side: the peer's memory is in use until `let_go`."""
        ...

    def let_go(self) -> None:
        """Initiator's side: nothing here uses the peer's memory any more; the peer is told. Safe twice."""
        ...

    def abandon(self) -> None:
        """Stop waiting for `gone`, when the agent is closed."""
        ...

    def close(self, reason: str) -> None:
        """End the link on purpose; both handlers get `link_lost`."""
        ...


class SocketLink:
    """A link over one socket, on either side. Use it once `opened` is done."""

    has_streams = True

    def __init__(self, handler: LinkHandler, config: TransferConfig, host: bytes, *, initiated: bool) -> None:
        """Wait for a connection.

        Args:
            handler: gets the callbacks.
            config: the times.
            host: of this machine, see `host_fingerprint`.
            initiated: whether this side connects.
        """
        self.peer = ""
        self.peer_pid = 0
        self.initiated = initiated
        self.same_host = False
        self._host = host
        self.error: PenstockError | None = None
        self.opened: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Done when the handshake is complete; has the error if it failed."""
        self.channel: FrameChannel[LinkFrame] = FrameChannel(
            _CODEC,
            self,
            frame_bytes_max=UNAUTHENTICATED_FRAME_BYTES_MAX,
            write_buffer_bytes=_WRITE_BUFFER_BYTES,
            write_bytes_max=_WRITE_BYTES_MAX,
            heartbeat_interval_s=config.heartbeat_timeout_s / 4,
            heartbeat_timeout_s=config.heartbeat_timeout_s,
        )
        self.channel.leaves_socket = True
        self.gone: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.stream_key = b""
        self.link_id = 0
        self._is_held = False
        self._last_end: LastEnd | None = None
        self._handler = handler
        self._handshake: Handshake | None = None
        self._open_stream: StreamOpener | None = None

    def identify(self, peer: str, host: bytes) -> None:
        """Set the peer's name and host, as the peer gives them."""
        self.peer = peer
        self.same_host = host == self._host

    def set_handshake(self, handshake: "Handshake", open_stream: StreamOpener | None = None) -> None:
        """Set the handshake and, on the initiator's side, how to open streams; before the link is connected."""
        self._handshake = handshake
        self._open_stream = open_stream

    def send(self, transport: str, payload: bytes) -> None:
        self.channel.send(TransportMessage(transport=transport, payload=payload))

    def notify(self, payload: bytes) -> None:
        self.channel.send(Notification(payload=payload))

    def withdraw(self, region_id: int) -> None:
        self.channel.send(Withdrawn(region_id=region_id))

    def withdraw_done(self, region_id: int) -> None:
        self.channel.send(WithdrawnDone(region_id=region_id))

    async def request(self, transport: str, keys: Keys, payload: bytes = b"") -> Granted:
        request = GrantRequest(
            transport=transport, keys={op: dict(shown) for op, shown in keys.items()}, payload=payload
        )
        try:
            with await self.open_stream(GRANTS) as connection:
                answer, granted = await request_over(connection, request)
        except (OSError, EOFError, PeerLost) as error:
            with contextlib.suppress(TimeoutError):  # the link, which says why, ends at the same time
                async with asyncio.timeout(_LINK_ENDS_S):
                    await self.channel.closed.wait()
            why = error.message if isinstance(error, PeerLost) else str(error)
            raise PeerLost(
                f"agent {self.peer} is gone or does not read: {why}; connect again once it is back"
            ) from error
        except ProtocolError as error:
            raise TransferError(f"agent {self.peer}: {error.message}") from error
        if answer.error is not None:
            granted.close()
            refused = from_info(answer.error)
            raise refused if isinstance(refused, TransferError) else TransferError(refused.message)
        return granted

    async def open_stream(self, transport: str) -> socket.socket:
        if self._open_stream is None:
            raise TransferRefused(f"agent {self.peer}: only the side that connected opens streams")
        return await self._open_stream(transport)

    def hold(self) -> None:
        self._is_held = True

    def let_go(self) -> None:
        self._is_held = False
        self._close_socket()

    def close(self, reason: str) -> None:
        self.error = self.error or PeerLost(f"agent {self.peer}: {reason}")
        self.channel.close(reason)

    def abandon(self) -> None:
        if self._last_end is not None:
            self._last_end.close()

    def channel_opened(self) -> None:
        assert self._handshake is not None, "set_handshake comes first"
        self.peer_pid = self.channel.peer_pid
        self._handshake.began(self)

    def message_received(self, message: LinkFrame) -> None:
        if not self.opened.done():
            assert self._handshake is not None
            self._handshake.received(self, message)
            return
        match message:
            case TransportMessage(transport=transport, payload=payload):
                self._handler.link_message(self, transport, payload)
            case Notification(payload=payload):
                self._handler.link_notified(self, payload)
            case Withdrawn(region_id=region_id):
                self._handler.link_withdrawn(self, region_id)
            case WithdrawnDone(region_id=region_id):
                self._handler.link_withdrawn_done(self, region_id)
            case _:
                raise ProtocolError(
                    f"a {type(message).__name__} from agent {self.peer}, which has authenticated already"
                )

    def unknown_received(self, tag: str) -> None:
        """Skip it: the channel has counted and logged it."""

    def channel_writable(self) -> None: ...

    def channel_closed(self, reason: str) -> None:
        if not self.opened.done():
            self.opened.set_exception(
                PeerLost(f"agent {self.peer or 'unknown'} ended the connection: {reason}")
            )
            self.opened.exception()  # nobody may be waiting
        elif self.opened.exception() is None:
            self.error = self.error or PeerLost(
                f"agent {self.peer} is gone: {reason}; connect again once it is back"
            )
            is_exposed = self._handler.link_exposed(self)
            self._handler.link_lost(self, self.error)
            self._outlive(is_exposed=is_exposed)
            return
        self._outlive(is_exposed=False)

    def _outlive(self, *, is_exposed: bool) -> None:
        """Keep the socket as long as one side may use the other side's memory."""
        if is_exposed:
            left, self.channel.left_socket = self.channel.left_socket, None
            if left is not None:  # else it was not kept, for want of descriptors: nobody will ever know
                self._last_end = LastEnd(left, self._set_gone)
            return
        self._set_gone()
        if not self._is_held:
            self._close_socket()

    def _close_socket(self) -> None:
        left, self.channel.left_socket = self.channel.left_socket, None
        if left is not None:
            left.close()

    def _set_gone(self) -> None:
        if not self.gone.done():
            self.gone.set_result(None)

    def admitted(self, stream_key: bytes, link_id: int) -> None:
        """Complete the handshake."""
        self.stream_key, self.link_id = stream_key, link_id
        self.channel.accept_frames(FRAME_BYTES_MAX)
        self.opened.set_result(None)


class MemoryLink:
    """One end of a link within a process."""

    same_host = True
    has_streams = False

    def __init__(self, handler: LinkHandler, peer: str, pid: int, *, initiated: bool) -> None:
        """Make one end; `pair` makes both."""
        self.peer = peer
        self.peer_pid = pid
        self.initiated = initiated
        self.error: PenstockError | None = None
        self.gone: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._handler = handler
        self._other: MemoryLink | None = None
        self._is_held = False

    @classmethod
    def pair(
        cls, here: tuple[LinkHandler, str], there: tuple[LinkHandler, str], pid: int
    ) -> "tuple[MemoryLink, MemoryLink]":
        """Make both ends: the initiator's and the other agent's, from (handler, agent's name)."""
        ours = cls(here[0], there[1], pid, initiated=True)
        theirs = cls(there[0], here[1], pid, initiated=False)
        ours._other, theirs._other = theirs, ours
        return ours, theirs

    def send(self, transport: str, payload: bytes) -> None:
        self._tell(lambda link: link._handler.link_message(link, transport, payload))

    def notify(self, payload: bytes) -> None:
        self._tell(lambda link: link._handler.link_notified(link, payload))

    def withdraw(self, region_id: int) -> None:
        self._tell(lambda link: link._handler.link_withdrawn(link, region_id))

    def withdraw_done(self, region_id: int) -> None:
        self._tell(lambda link: link._handler.link_withdrawn_done(link, region_id))

    async def request(self, transport: str, keys: Keys, payload: bytes = b"") -> Granted:
        if self.error is not None or self._other is None:
            raise PeerLost(f"agent {self.peer} is gone")
        request = GrantRequest(
            transport=transport, keys={op: dict(shown) for op, shown in keys.items()}, payload=payload
        )
        return await self._other._handler.link_requested(self._other, request)

    async def open_stream(self, transport: str) -> socket.socket:
        raise TransferRefused(
            f"{transport}: agent {self.peer} is in this process, there are no sockets between the two"
        )

    def hold(self) -> None:
        self._is_held = True

    def let_go(self) -> None:
        self._is_held = False
        if self._other is not None:
            self._other.other_let_go()

    def abandon(self) -> None: ...

    def other_let_go(self) -> None:
        """Note that the initiator has released this side's memory; final only once the link has ended."""
        if self.error is not None and not self.gone.done() and not (self._other and self._other._is_held):
            self.gone.set_result(None)

    def close(self, reason: str) -> None:
        if self.error is None:
            self._end(PeerLost(f"agent {self.peer}: {reason}"))
            self._tell(
                lambda link: link._end(PeerLost(f"agent {link.peer} is gone: it said goodbye: {reason}")),
                although_ended=True,
            )

    def _end(self, error: PenstockError) -> None:
        if self.error is None:
            self.error = error
            self._handler.link_exposed(self)
            self._handler.link_lost(self, error)
            self.other_let_go()

    def _tell(self, tell: "Callable[[MemoryLink], None]", *, although_ended: bool = False) -> None:
        if self._other is not None and (although_ended or self.error is None):
            asyncio.get_running_loop().call_soon(self._other._hear, tell)

    def _hear(self, tell: "Callable[[MemoryLink], None]") -> None:
        if self.error is not None:
            return
        try:
            tell(self)
        except ProtocolError as error:
            self.close(error.message)
