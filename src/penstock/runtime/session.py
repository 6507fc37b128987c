"""An authenticated session between two processes of a deployment: what all planes with messages of their own share.

The server sends a challenge, the client says hello, and each proves that it knows the deployment's secret (see `handshake`).
From then on both send the messages of their plane, which inherits from `ServerSession` and `ClientSession`.
"""

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar, cast

from penstock.core.channel import ChannelHandler, Codec, FrameChannel
from penstock.core.errors import ErrorInfo, Overloaded, PenstockError, ProtocolError, Unavailable
from penstock.core.framing import UNAUTHENTICATED_FRAME_BYTES_MAX, Challenge
from penstock.core.listening import Address, Listener, dial, listen, remove_socket
from penstock.runtime import handshake
from penstock.runtime.tls import PlaneTls

M = TypeVar("M")
S = TypeVar("S", bound="ServerSession[Any]")


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionProtocol(Generic[M]):
    """What all sessions of a plane have in common.

    Attributes:
        codec: of the plane's messages; the handshake's are among them.
        server: the server's name in errors.
        client: the client's name in errors.
        frame_bytes_max: longest frame after the handshake.
        write_bytes_max: see `FrameChannel`.
        heartbeat_interval_s: a peer that is silent for so long is pinged.
        heartbeat_timeout_s: a peer that is silent for so long is lost.
        connect_timeout_s: longest time from connecting to being admitted.
        connections_max: most connections to one server.
        write_buffer_bytes: see `FrameChannel`.
    """

    codec: Codec[M]
    server: str
    client: str
    frame_bytes_max: int
    write_bytes_max: int
    heartbeat_interval_s: float
    heartbeat_timeout_s: float
    connect_timeout_s: float = 10.0
    connections_max: int = 4096
    write_buffer_bytes: int = 64 << 10

    def channel(self, handler: ChannelHandler[M], frame_bytes_max: int) -> FrameChannel[M]:
        """Make one side's channel, which accepts frames of up to `frame_bytes_max`."""
        return FrameChannel(
            self.codec,
            handler,
            frame_bytes_max=frame_bytes_max,
            write_buffer_bytes=self.write_buffer_bytes,
            write_bytes_max=self.write_bytes_max,
            heartbeat_interval_s=self.heartbeat_interval_s,
            heartbeat_timeout_s=self.heartbeat_timeout_s,
        )


class SessionServer(Generic[S]):
    """Listens, and has the sessions of its clients. One event loop owns it."""

    def __init__(
        self,
        protocol: SessionProtocol[Any],
        identity: handshake.Identity,
        address: Address,
        session: "Callable[[SessionServer[S]], S]",
        *,
        tls: PlaneTls | None = None,
        on_refused: Callable[[str, OSError], None] = lambda _peer, _error: None,
    ) -> None:
        """Make it; `start` listens.

        Args:
            protocol: of the plane.
            identity: has the deployment's secret.
            address: where to listen; with the actual port after `start`.
            session: makes the session of a new connection.
            tls: certificates; None for no TLS.
            on_refused: see `Listener`.
        """
        self.protocol = protocol
        self.identity = identity
        self.address = address
        self.sessions: set[S] = set()
        """Those of open connections, not admitted ones included."""
        self._session = session
        self._tls = tls
        self._on_refused = on_refused
        self._listener: Listener | None = None

    async def start(self) -> None:
        """Listen.

        Raises:
            ConfigError: the address is in use or not allowed.
        """
        tls = self._tls
        self._listener, self.address = await listen(
            lambda: self._session(self).channel,
            self.address,
            tls=None if tls is None else lambda: tls.server,
            handshake_timeout_s=self.protocol.connect_timeout_s,
            on_refused=self._on_refused,
        )

    async def stop_listening(self) -> None:
        """Accept no more connections; sessions go on. Safe twice."""
        if self._listener is not None:
            listener, self._listener = self._listener, None
            listener.close()
            remove_socket(self.address)
            await listener.wait_closed()  # every accepted connection is in `sessions` now

    async def close(self, reason: str, timeout_s: float) -> None:
        """Listen no more and end all sessions; what is buffered is still sent within `timeout_s`. Safe twice."""
        await self.stop_listening()
        sessions = tuple(self.sessions)
        for session in sessions:
            session.finish(reason)
        try:
            async with asyncio.timeout(timeout_s):
                for session in sessions:
                    await session.channel.closed.wait()
        except TimeoutError:
            for session in sessions:
                session.channel.abort("it did not take what was buffered")
                await session.channel.closed.wait()


class ServerSession(ABC, Generic[M]):
    """The server's side of one session."""

    def __init__(self, server: "SessionServer[Any]") -> None:
        self.channel: FrameChannel[M] = server.protocol.channel(self, UNAUTHENTICATED_FRAME_BYTES_MAX)
        self._server = server
        self._challenge = handshake.challenge()
        self._is_trusted = False
        self._timer: asyncio.TimerHandle | None = None

    @abstractmethod
    def received(self, message: M) -> None:
        """Process a message of a client that has proved that it knows the secret.

        Raises:
            ProtocolError: the client may not send this now; the session ends.
        """

    @abstractmethod
    def refused(self, process: str, error: ErrorInfo) -> None:
        """Note that this client is refused; `process` is its name, if it gave one."""

    @abstractmethod
    def ended(self, reason: str) -> None:
        """Note that the connection has ended."""

    def check(self, hello: handshake.Hello) -> None:
        """Check the plane's own part of a hello.

        Raises:
            PenstockError: the client is refused for it.
        """

    def trusted(self, hello: handshake.Hello) -> None:
        """Begin: the client has proved that it knows the secret."""

    def finish(self, reason: str) -> None:
        """End the session once what is buffered is sent."""
        self.channel.close(reason)

    def admit(self) -> None:
        """Keep the session; one that is not admitted within `connect_timeout_s` ends."""
        if self._timer is not None:
            self._timer.cancel()

    def refuse(self, process: str, error: ErrorInfo) -> None:
        """End the session; the client has been sent `error`."""
        self.refused(process, error)
        self.channel.close(error.message)

    def channel_opened(self) -> None:
        protocol, sessions = self._server.protocol, self._server.sessions
        if len(sessions) >= protocol.connections_max:
            full = Overloaded(
                f"{protocol.connections_max} {protocol.client}s are connected already (connections_max); end some that are not needed"
            )
            self.refused("", full.to_info())
            self.channel.abort(full.message)
            return
        sessions.add(self)
        self.channel.send(cast("M", self._challenge))
        timeout_s = protocol.connect_timeout_s
        self._timer = asyncio.get_running_loop().call_later(
            timeout_s, self.channel.abort, f"not admitted within {timeout_s:g} s"
        )

    def message_received(self, message: M) -> None:
        if self._is_trusted:
            self.received(message)
            return
        if not isinstance(message, handshake.Hello):
            client = self._server.protocol.client
            raise ProtocolError(
                f"{type(message).__name__} before hello; the peer is no {client} of this release"
            )
        reply = handshake.reply(self._server.identity, self._challenge, message, self.check)
        self.channel.send(cast("M", reply))
        if reply.error is not None:
            self.refuse(message.process, reply.error)
            return
        self._is_trusted = True
        self.channel.accept_frames(self._server.protocol.frame_bytes_max)
        self.trusted(message)

    def unknown_received(self, tag: str) -> None:
        """Ignore it: a message of a newer client."""

    def channel_writable(self) -> None:
        pass

    def channel_closed(self, reason: str) -> None:
        self._server.sessions.discard(self)
        if self._timer is not None:
            self._timer.cancel()
        self.ended(reason)


class ClientSession(ABC, Generic[M]):
    """The client's side of one session."""

    def __init__(self, protocol: SessionProtocol[M], identity: handshake.Identity) -> None:
        self.channel = protocol.channel(self, protocol.frame_bytes_max)
        self._protocol = protocol
        self._identity = identity
        self._hello: tuple[Challenge, handshake.Hello] | None = None
        self._is_trusted = False
        self._awaited: list[asyncio.Future[Any]] = []
        self._trusted = self.awaited()

    @abstractmethod
    def received(self, message: M) -> None:
        """Process a message of the server, which has proved that it knows the secret.

        Raises:
            ProtocolError: the server may not send this now; the session ends.
        """

    @abstractmethod
    async def enter(self) -> None:
        """Ask the server to admit this client, and wait until it has."""

    def hello(self, challenge: Challenge) -> handshake.Hello:
        """Make the answer to a challenge."""
        return handshake.hello(self._identity, challenge)

    def refusal(self, error: ErrorInfo) -> PenstockError:
        """Make the error of what waits for a server that refuses this client."""
        return ProtocolError(f"the {self._protocol.server} refused us: {error.message}")

    def awaited(self) -> asyncio.Future[Any]:
        """Make a future of something that the server sends; it fails when the session ends before."""
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._awaited.append(future)
        return future

    @property
    def is_silent(self) -> bool:
        """Whether the server has not even sent its challenge."""
        return self._hello is None

    async def connect(self, address: Address, tls: PlaneTls | None) -> None:
        """Connect, and wait until the server has admitted this client.

        Raises:
            OSError, TimeoutError: the server does not answer.
            PenstockError: the server refuses this client, or the connection ended.
        """
        try:
            async with asyncio.timeout(self._protocol.connect_timeout_s):
                await dial(lambda: self.channel, address, tls=tls.client if tls else None)
                await self._trusted
                await self.enter()
        except BaseException:
            self.channel.abort("not needed any more")
            raise

    async def close_gracefully(self, reason: str, timeout_s: float) -> None:
        """End the session; what is buffered is still sent within `timeout_s`."""
        self.channel.close(reason)
        try:
            async with asyncio.timeout(timeout_s):
                await self.channel.closed.wait()
        except TimeoutError:
            self.channel.abort(f"the {self._protocol.server} did not take what was buffered")

    def fail(self, error: PenstockError) -> None:
        """Fail all that is still awaited."""
        for future in self._awaited:
            if not future.done():
                future.set_exception(error)
                future.exception()  # nobody may wait for it

    def channel_opened(self) -> None:
        pass

    def message_received(self, message: M) -> None:
        if self._is_trusted:
            self.received(message)
            return
        match message:
            case Challenge() if self._hello is None:
                self._on_challenge(message)
            case handshake.HelloReply() if self._hello is not None:
                self._on_reply(*self._hello, message)
            case _:
                raise ProtocolError(
                    f"{type(message).__name__}: before the handshake; the peer is no {self._protocol.server}"
                )

    def unknown_received(self, tag: str) -> None:
        """Ignore it: a message of a newer server."""

    def channel_writable(self) -> None:
        pass

    def channel_closed(self, reason: str) -> None:
        self.fail(Unavailable(f"the connection ended: {reason}"))

    def _on_challenge(self, challenge: Challenge) -> None:
        hello = self.hello(challenge)
        self._hello = (challenge, hello)
        self.channel.send(cast("M", hello))
        try:
            handshake.check_challenge(challenge)
        except ProtocolError as error:
            self.fail(error)
            self.channel.close(error.message)

    def _on_reply(self, challenge: Challenge, hello: handshake.Hello, reply: handshake.HelloReply) -> None:
        error = None if reply.error is None else self.refusal(reply.error)
        try:
            if error is None:
                handshake.check_reply(self._identity, challenge, hello, reply)
        except ProtocolError as wrong:
            error = wrong
        if error is not None:
            self.fail(error)
            self.channel.abort(error.message)
            return
        self._is_trusted = True
        if not self._trusted.done():
            self._trusted.set_result(None)
