"""A worker over several nodes: how its leader gathers the followers, starts them with one engine's arguments and hears of their end."""

import asyncio
import random
from types import TracebackType
from typing import Any, Self

import msgspec

from penstock.core.errors import ConfigError, ErrorInfo, PenstockError, ProtocolError, Unavailable, from_info
from penstock.core.framing import Challenge, FrameCodec, Goodbye, Ping, Pong
from penstock.core.listening import Address
from penstock.core.log import get_logger
from penstock.core.wire import Wire
from penstock.runtime.handshake import Hello, HelloReply, Identity
from penstock.runtime.session import ClientSession, ServerSession, SessionProtocol, SessionServer
from penstock.runtime.tls import PlaneTls

JOIN_S = 60.0
"""Longest wait of a node for the others. After it the node logs which are missing, and tries again."""


class FollowerJoin(Wire, frozen=True, tag="join"):
    """Ask the leader to admit a follower.

    Attributes:
        rank: of the follower, from 1.
        arguments: engine arguments as JSON, which must be equal on all nodes.
    """

    rank: int
    arguments: bytes


class FollowerJoined(Wire, frozen=True, tag="joined"):
    """Answer to `FollowerJoin`; `error` says why the follower is refused, None if it is admitted."""

    error: ErrorInfo | None = None


class Start(Wire, frozen=True, tag="start"):
    """All nodes have joined: start the engine with this `master_port` on the leader."""

    master_port: int


class Leaving(Wire, frozen=True, tag="leaving"):
    """A follower is shutting down. It ends once the leader has closed the connection."""


Message = (
    Challenge | Hello | HelloReply | FollowerJoin | FollowerJoined | Start | Leaving | Ping | Pong | Goodbye
)

PROTOCOL: SessionProtocol[Message] = SessionProtocol(
    codec=FrameCodec(Message),
    server="leader",
    client="follower",
    frame_bytes_max=1 << 20,
    write_bytes_max=1 << 20,
    heartbeat_interval_s=3.0,
    heartbeat_timeout_s=15.0,
    connections_max=256,
)
"""A silent node is lost after `heartbeat_timeout_s`; one whose connection ends is lost at once."""


_RETRY_S = 0.5


class NodeFollower:
    """One follower's connection. One event loop owns it."""

    def __init__(
        self,
        address: str,
        identity: Identity,
        *,
        rank: int,
        arguments: dict[str, Any],
        tls: PlaneTls | None = None,
    ) -> None:
        """Make it; `join` connects.

        Args:
            address: where the leader listens.
            identity: has the deployment's secret.
            rank: of this node, from 1.
            arguments: engine arguments of this node.
            tls: certificates; None for no TLS.
        """
        self._address = Address.parse(address, source="runtime.leader")
        self._identity = identity
        self._join = FollowerJoin(rank=rank, arguments=msgspec.json.encode(arguments))
        self._tls = tls
        self._session: _FollowerSession | None = None

    async def join(self, timeout_s: float, rng: random.Random) -> None:
        """Try to connect until the leader admits this node.

        Raises:
            Unavailable: not admitted within `timeout_s`, with the last reason.
            PenstockError: refused: the graph or the rank is wrong.
        """
        reason = "it does not answer"
        try:
            async with asyncio.timeout(timeout_s):
                while True:
                    session = _FollowerSession(self._identity, self._join)
                    try:
                        await session.connect(self._address, self._tls)
                    except (OSError, TimeoutError, Unavailable) as error:
                        reason = str(error) or f"no answer within {PROTOCOL.connect_timeout_s:g} s"
                    else:
                        self._session = session
                        return
                    await asyncio.sleep(_RETRY_S * rng.uniform(0.5, 1.5))
        except TimeoutError as error:
            raise Unavailable(
                f"node 0 did not take this one at {self._address} within {timeout_s:g} s: {reason}; see that penstock up"
                f" --leader {self._address} runs there, and that this node reaches it"
            ) from error

    async def start(self) -> int:
        """Wait until all nodes have joined; give the engine's `master_port` on the leader.

        Raises:
            Unavailable: the leader ended first.
        """
        port: int = await self._joined.started
        return port

    @property
    def own_address(self) -> str:
        """The address of this node, as the leader sees it."""
        return self._joined.channel.local_host

    @property
    def leader_address(self) -> str:
        """The leader's IP address."""
        return self._joined.channel.peer.rpartition(":")[0]

    @property
    def ended(self) -> asyncio.Future[str]:
        """Has the reason once the leader has ended."""
        return self._joined.ended

    def leave(self) -> None:
        """Tell the leader that this node is shutting down."""
        self._joined.channel.send(Leaving())

    def close(self, reason: str) -> None:
        if self._session is not None:
            self._session.channel.close(reason)

    @property
    def _joined(self) -> "_FollowerSession":
        assert self._session is not None, "joined"
        return self._session


class _FollowerSession(ClientSession[Message]):
    """One connection to the leader."""

    def __init__(self, identity: Identity, join: FollowerJoin) -> None:
        super().__init__(PROTOCOL, identity)
        self.started = self.awaited()
        """Gets the engine's `master_port`."""
        self.ended: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._joined = self.awaited()
        self._join = join

    async def enter(self) -> None:
        self.channel.send(self._join)
        await self._joined

    def received(self, message: Message) -> None:
        match message:
            case FollowerJoined(error=error) if not self._joined.done():
                if error is None:
                    self._joined.set_result(None)
                else:
                    self.fail(from_info(error))
            case Start(master_port=port) if self._joined.done() and not self.started.done():
                self.started.set_result(port)
            case _:
                raise ProtocolError(
                    f"{type(message).__name__}: a leader does not send this now; the peer is none, or of another release"
                )

    def channel_closed(self, reason: str) -> None:
        text = f"the connection to node 0 ended: {reason}"
        self.ended.set_result(text)
        self.fail(Unavailable(text))


_CLOSE_S = 1.0
_log = get_logger()


class NodeLeader:
    """Listens for followers while its context is entered. One event loop owns it."""

    def __init__(
        self,
        address: str,
        identity: Identity,
        *,
        nodes: int,
        arguments: dict[str, Any],
        tls: PlaneTls | None = None,
    ) -> None:
        """Make it; entering the context listens.

        Args:
            address: `tcp://HOST:PORT` of this node.
            identity: has the deployment's secret.
            nodes: number of nodes, this one included.
            arguments: engine arguments, which followers must have, too.
            tls: certificates; None for no TLS.
        """
        self.arguments = arguments
        self.lost: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        """Has the reason once a follower is lost after `start`."""
        self.leaving: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Done once a follower is shutting down: the worker should drain."""
        self._nodes = nodes
        self._followers: dict[int, _LeaderSession] = {}
        self._changed = asyncio.Event()
        self._has_started = False
        self._server: SessionServer[_LeaderSession] = SessionServer(
            PROTOCOL,
            identity,
            Address.parse(address, source="runtime.leader"),
            lambda server: _LeaderSession(self, server),
            tls=tls,
        )

    async def __aenter__(self) -> Self:
        await self._server.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._server.close("the leader's worker ends", _CLOSE_S)

    @property
    def address(self) -> Address:
        """Where it listens, with the actual port once entered."""
        return self._server.address

    async def gather(self, timeout_s: float) -> None:
        """Wait until every follower has joined.

        Raises:
            Unavailable: a follower has not joined within `timeout_s`.
        """
        try:
            async with asyncio.timeout(timeout_s):
                while self.missing:
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError as error:
            ranks = " and ".join(str(rank) for rank in self.missing)
            raise Unavailable(
                f"node {ranks} of {self._nodes} (0 is this one) did not join {self.address} within {timeout_s:g} s; see that"
                f" penstock up --node-rank {self.missing[0]} --leader {self.address} runs there and reaches this node"
            ) from error

    @property
    def missing(self) -> list[int]:
        """Ranks of nodes that have not joined."""
        return [rank for rank in range(1, self._nodes) if rank not in self._followers]

    def start(self, master_port: int) -> None:
        """Have all followers start the engine; from now on the worker ends when a follower is lost.

        Raises:
            Unavailable: a follower was lost since `gather`; the engine would wait for it.
        """
        if self.missing:
            ranks = " and ".join(str(rank) for rank in self.missing)
            raise Unavailable(
                f"node {ranks} of {self._nodes} was lost before the start; the worker gathers its nodes again"
            )
        self._has_started = True
        for session in self._followers.values():
            session.channel.send(Start(master_port=master_port))

    def admit(self, session: "_LeaderSession", join: FollowerJoin) -> None:
        """Admit a follower.

        Raises:
            PenstockError: its engine arguments differ, or its rank is out of range or in use.
        """
        if not 1 <= join.rank < self._nodes:
            raise ConfigError(
                f"--node-rank {join.rank}: the leader's graph has {self._nodes} nodes for this worker; give followers 1 to"
                f" {self._nodes - 1}"
            )
        if (other := self._followers.get(join.rank)) is not None:
            raise Unavailable(
                f"--node-rank {join.rank}: {other.channel.peer} has joined with it; give each node a rank of its own"
            )
        theirs = msgspec.json.decode(join.arguments, type=dict[str, Any])
        if different := [
            f"{name} {theirs.get(name)!r} there and {self.arguments.get(name)!r} on the leader"
            for name in sorted({*theirs, *self.arguments})
            if theirs.get(name) != self.arguments.get(name)
        ]:
            raise ConfigError(
                f"node {join.rank} would run the engine with other arguments: {'; '.join(different[:3])}; start all nodes with"
                " the same graph"
            )
        self._followers[join.rank] = session
        session.rank = join.rank
        self._changed.set()
        _log.info("node_joined", rank=join.rank, peer=session.channel.peer)

    def leave(self, session: "_LeaderSession") -> None:
        """Note that a follower is shutting down."""
        _log.info("node_leaves", rank=session.rank, peer=session.channel.peer)
        if not self.leaving.done():
            self.leaving.set_result(None)

    def lose(self, session: "_LeaderSession", reason: str) -> None:
        """Note that a follower's connection has ended."""
        del self._followers[session.rank]
        text = f"node {session.rank} of {self._nodes} ({session.channel.peer}) is lost: {reason}"
        if self._has_started and not self.lost.done():
            self.lost.set_result(text)
        elif not self._has_started:
            _log.warning("node_lost", rank=session.rank, peer=session.channel.peer, reason=reason)


class _LeaderSession(ServerSession[Message]):
    """One connection of a follower."""

    def __init__(self, leader: NodeLeader, server: "SessionServer[_LeaderSession]") -> None:
        super().__init__(server)
        self.rank = 0
        self._leader = leader

    def received(self, message: Message) -> None:
        match message:
            case FollowerJoin() if not self.rank:
                self._on_join(message)
            case Leaving() if self.rank:
                self._leader.leave(self)
            case _:
                raise ProtocolError(
                    f"{type(message).__name__}: a follower does not send this now; update the older side"
                )

    def refused(self, process: str, error: ErrorInfo) -> None:
        _log.warning("node_refused", process=process, peer=self.channel.peer, error=error.message)

    def ended(self, reason: str) -> None:
        if self.rank:
            self._leader.lose(self, reason)

    def _on_join(self, join: FollowerJoin) -> None:
        self.admit()
        try:
            self._leader.admit(self, join)
        except (PenstockError, msgspec.MsgspecError) as error:
            wrong = error if isinstance(error, PenstockError) else ProtocolError(f"join: {error}")
            self.channel.send(FollowerJoined(error=wrong.to_info()))
            self.refuse("", wrong.to_info())
            return
        self.channel.send(FollowerJoined())
