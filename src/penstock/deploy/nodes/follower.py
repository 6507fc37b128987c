"""A follower's side: joins the leader of its worker, and learns when to start and to end."""

import asyncio
import contextlib
import random
from typing import Any

import msgspec

from penstock.core.errors import PenstockError, ProtocolError, Unavailable, from_info
from penstock.core.log import get_logger
from penstock.core.net.address import Address
from penstock.core.net.handshake import Challenge
from penstock.core.net.listening import dial
from penstock.deploy.nodes.messages import (
    Join,
    Joined,
    Leaving,
    Message,
    Start,
    node_channel,
)
from penstock.runtime import handshake
from penstock.runtime.tls import PlaneTls

_RETRY_S = 0.5
_CONNECT_S = 10.0
_log = get_logger()


class NodeFollower:
    """One follower's connection. One event loop owns it."""

    def __init__(
        self,
        address: str,
        identity: handshake.Identity,
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
                        await self._connect(session)
                    except (OSError, TimeoutError, Unavailable) as error:
                        reason = str(error) or f"no answer within {_CONNECT_S:g} s"
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
        return await self._joined.started

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

    async def _connect(self, session: "_Session") -> None:
        try:
            async with asyncio.timeout(_CONNECT_S):
                await dial(
                    lambda: session.channel, self._address, tls=self._tls.client if self._tls else None
                )
                await session.joined
        except BaseException:
            with contextlib.suppress(Exception):
                session.channel.abort("not needed any more")
            raise


class _Session:
    """One connection to the leader."""

    def __init__(self, identity: handshake.Identity, join: Join) -> None:
        self.channel = node_channel(self)
        loop = asyncio.get_running_loop()
        self.joined: asyncio.Future[None] = loop.create_future()
        self.started: asyncio.Future[int] = loop.create_future()
        self.ended: asyncio.Future[str] = loop.create_future()
        self._identity = identity
        self._join = join
        self._hello: tuple[Challenge, handshake.Hello] | None = None
        self._is_trusted = False

    def channel_opened(self) -> None:
        pass

    def message_received(self, message: Message) -> None:
        match message:
            case Challenge() if self._hello is None:
                self._hello = (message, handshake.hello(self._identity, message))
                self.channel.send(self._hello[1])
            case handshake.HelloReply() if self._hello is not None and not self._is_trusted:
                if message.error is not None:
                    self._fail(ProtocolError(f"the leader refuses this node: {message.error.message}"))
                    return
                handshake.check_reply(self._identity, *self._hello, message)
                self._is_trusted = True
                self.channel.send(self._join)
            case Joined(error=error) if self._is_trusted and not self.joined.done():
                if error is None:
                    self.joined.set_result(None)
                else:
                    self._fail(from_info(error))
            case Start(master_port=port) if self.joined.done() and not self.started.done():
                self.started.set_result(port)
            case _:
                raise ProtocolError(
                    f"{type(message).__name__}: a leader does not send this now; the peer is none, or of another release"
                )

    def unknown_received(self, tag: str) -> None:
        """Ignore it: a message of a newer leader."""

    def channel_writable(self) -> None:
        pass

    def channel_closed(self, reason: str) -> None:
        text = f"the connection to node 0 ended: {reason}"
        self.ended.set_result(text)
        self._fail(Unavailable(text))

    def _fail(self, error: PenstockError) -> None:
        for future in (self.joined, self.started):
            if not future.done():
                future.set_exception(error)
                future.exception()  # so that a future without a waiter logs nothing
