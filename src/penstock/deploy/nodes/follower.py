"""A follower's side: joins the leader of its worker, and learns when to start and to end."""

import asyncio
import random
from typing import Any

import msgspec

from penstock.core.errors import ProtocolError, Unavailable, from_info
from penstock.core.listening import Address
from penstock.deploy.nodes.messages import PROTOCOL, Join, Joined, Leaving, Message, Start
from penstock.runtime.handshake import Identity
from penstock.runtime.session import ClientSession
from penstock.runtime.tls import PlaneTls

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
        self._join = Join(rank=rank, arguments=msgspec.json.encode(arguments))
        self._tls = tls
        self._session: _Session | None = None

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
                    session = _Session(self._identity, self._join)
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
    def _joined(self) -> "_Session":
        assert self._session is not None, "joined"
        return self._session


class _Session(ClientSession[Message]):
    """One connection to the leader."""

    def __init__(self, identity: Identity, join: Join) -> None:
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
            case Joined(error=error) if not self._joined.done():
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
