"""An agent's notifications: sent to peers and to itself, and queued on arrival until they are read."""

import asyncio
from collections.abc import AsyncIterator

from penstock.core.errors import Overloaded, ProtocolError, TransferRefused
from penstock.transfer.counters import TransferCounters
from penstock.transfer.link.frames import NOTIFICATION_BYTES_MAX
from penstock.transfer.link.links import AgentLink


class NotificationQueue:
    """The notifications of one agent. Its event loop owns the queue."""

    def __init__(self, owner: str, notifications_max: int, counters: TransferCounters) -> None:
        """Begin empty.

        Args:
            owner: the agent's name.
            notifications_max: the most unread notifications; notifications of the agent's own running transfers may exceed it.
            counters: count sent and received notifications.
        """
        self._owner = owner
        self._notifications_max = notifications_max
        self._counters = counters
        self._unread: asyncio.Queue[tuple[str, bytes]] = asyncio.Queue()

    def check(self, link: AgentLink | None, payload: bytes) -> None:
        """Check a notification before its transfer starts.

        Args:
            link: to the receiver; None for the agent itself.
            payload: its bytes.

        Raises:
            TransferRefused: it is too long.
            Overloaded: it is for the agent itself, whose queue is full.
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
        """Send a checked notification to a peer or to the agent itself."""
        self._counters.notifications_sent += 1
        if link is None:
            self._unread.put_nowait((self._owner, payload))
        else:
            link.notify(payload)

    def received(self, link: AgentLink, payload: bytes) -> None:
        """Queue a peer's notification.

        Raises:
            ProtocolError: the queue is full.
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
