"""A link between two agents of one event loop; messages arrive in the next turn of the loop."""

import asyncio
import socket
from collections.abc import Callable

from penstock.core.descriptors import Granted, Keys
from penstock.core.errors import PeerLost, PenstockError, ProtocolError, TransferRefused
from penstock.transfer.link.grants import GrantRequest
from penstock.transfer.link.links import LinkHandler


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
