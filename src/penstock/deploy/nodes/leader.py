"""The leader's side: gathers the followers of its worker, and learns when one ends."""

import asyncio
from types import TracebackType
from typing import Any, Self

import msgspec

from penstock.core.errors import ConfigError, ErrorInfo, PenstockError, ProtocolError, Unavailable
from penstock.core.listening import Address
from penstock.core.log import get_logger
from penstock.deploy.nodes.messages import PROTOCOL, Join, Joined, Leaving, Message, Start
from penstock.runtime.handshake import Identity
from penstock.runtime.session import ServerSession, SessionServer
from penstock.runtime.tls import PlaneTls

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
        self._followers: dict[int, _Session] = {}
        self._changed = asyncio.Event()
        self._has_started = False
        self._server: SessionServer[_Session] = SessionServer(
            PROTOCOL,
            identity,
            Address.parse(address, source="runtime.leader"),
            lambda server: _Session(self, server),
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

    def admit(self, session: "_Session", join: Join) -> None:
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

    def leave(self, session: "_Session") -> None:
        """Note that a follower is shutting down."""
        _log.info("node_leaves", rank=session.rank, peer=session.channel.peer)
        if not self.leaving.done():
            self.leaving.set_result(None)

    def lose(self, session: "_Session", reason: str) -> None:
        """Note that a follower's connection has ended."""
        del self._followers[session.rank]
        text = f"node {session.rank} of {self._nodes} ({session.channel.peer}) is lost: {reason}"
        if self._has_started and not self.lost.done():
            self.lost.set_result(text)
        elif not self._has_started:
            _log.warning("node_lost", rank=session.rank, peer=session.channel.peer, reason=reason)


class _Session(ServerSession[Message]):
    """One connection of a follower."""

    def __init__(self, leader: NodeLeader, server: "SessionServer[_Session]") -> None:
        super().__init__(server)
        self.rank = 0
        self._leader = leader

    def received(self, message: Message) -> None:
        match message:
            case Join() if not self.rank:
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

    def _on_join(self, join: Join) -> None:
        self.admit()
        try:
            self._leader.admit(self, join)
        except (PenstockError, msgspec.MsgspecError) as error:
            wrong = error if isinstance(error, PenstockError) else ProtocolError(f"join: {error}")
            self.channel.send(Joined(error=wrong.to_info()))
            self.refuse("", wrong.to_info())
            return
        self.channel.send(Joined())
