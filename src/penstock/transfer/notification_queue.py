"""An agent's notifications: it tells peers and itself, and keeps what came until it is read."""

import asyncio
from collections.abc import AsyncIterator

from penstock.core.errors import Overloaded, ProtocolError, TransferRefused
from penstock.transfer.counters import TransferCounters
from penstock.transfer.link.frames import NOTIFICATION_BYTES_MAX
from penstock.transfer.link.links import AgentLink


class NotificationQueue:
    """Those of one agent. Its event loop owns it."""

    def __init__(self, owner: str, notifications_max: int, counters: TransferCounters) -> None:
        """Be empty.

        Args:
            owner: the agent's name.
            notifications_max: kept for a reader; those of the agent's own transfers under way may come on top.
            counters: what was sent and received.
        """
        self._owner = owner
        self._notifications_max = notifications_max
        self._counters = counters
        self._unread: asyncio.Queue[tuple[str, bytes]] = asyncio.Queue()

    def check(self, link: AgentLink | None, payload: bytes) -> None:
        """Refuse what cannot be sent.

        Args:
            link: to whom; None for the agent itself.
            payload: what.

        Raises:
            TransferRefused: it is too long.
            Overloaded: it is for the agent itself, which does not read.
            TypeError: it is not bytes.
        """
        if not isinstance(payload, bytes):
            raise TypeError(f"notification: {type(payload).__name__}; expected bytes")
        if len(payload) > NOTIFICATION_BYTES_MAX:
            raise TransferRefused(
                f"notification of {len(payload)} bytes; at most {NOTIFICATION_BYTES_MAX} fit: transfer what is longer"
            )
        if link is None and payload and self._is_full:
            raise Overloaded(self._full)

    def send(self, link: AgentLink | None, payload: bytes) -> None:
        """Tell a peer, or the agent itself, what was checked."""
        self._counters.notifications_sent += 1
        if link is None:
            self._unread.put_nowait((self._owner, payload))
        else:
            link.notify(payload)

    def received(self, link: AgentLink, payload: bytes) -> None:
        """Keep what a peer says.

        Raises:
            ProtocolError: nobody reads.
        """
        if self._is_full:
            raise ProtocolError(self._full)
        self._counters.notifications_received += 1
        self._unread.put_nowait((link.peer, payload))

    async def read(self) -> AsyncIterator[tuple[str, bytes]]:
        """Yield (agent's name, payload), for ever."""
        while True:
            yield await self._unread.get()

    @property
    def _is_full(self) -> bool:
        return self._unread.qsize() >= self._notifications_max

    @property
    def _full(self) -> str:
        return (
            f"agent {self._owner} has {self._unread.qsize()} notifications that nobody has read"
            " (notifications_max); read `notifications()`"
        )
