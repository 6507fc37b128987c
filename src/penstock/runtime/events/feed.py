"""Sends a worker's KV events to one subscriber, as fast as its connection takes them.

A feed buffers no events. What a full connection could not take is read again from the worker's replay ring, or from a
snapshot if the ring is too short. Of a snapshot, one message is sent per turn of the event loop.
"""

import asyncio
from collections.abc import Iterator
from typing import Protocol

from penstock.core.types.events import EventBatch, EventMessage, EventPosition, EventSnapshot
from penstock.seams import EventSource


class EventOutlet(Protocol):
    """The connection that a feed sends to."""

    @property
    def writable(self) -> bool: ...

    def send_event(self, message: EventMessage) -> None: ...


class EventFeed:
    """One subscription; the `EventSink` of a worker. One task owns it."""

    def __init__(self, source: EventSource, outlet: EventOutlet, *, is_live: bool = True) -> None:
        """Send nothing before `subscribe`.

        Args:
            source: the worker's events.
            outlet: the subscriber's connection.
            is_live: whether events that come later are sent too; False: another way carries these, and `tell_position`
                says what should have come by it.
        """
        self._source = source
        self._is_live = is_live
        self._told = 0  # position told last
        self._latest = 0  # of the source, as of then
        self._outlet = outlet
        self._pending: Iterator[EventMessage | None] | None = None
        self._turn: asyncio.Handle | None = None
        self._sent: int | None = None  # sequence of the last batch or whole snapshot sent
        self._behind = False
        self._subscribed = False

    def subscribe(self, after_sequence: int | None) -> None:
        """Send the events after this sequence (None: a snapshot) and all later ones; a second call resyncs."""
        self._sent = after_sequence
        self._behind = False
        self._pending = self._source.events_after(after_sequence)
        if self._is_live and not self._subscribed:
            self._subscribed = True
            self._source.subscribe(self)
        self.pump()

    def tell_position(self) -> None:
        """Say which batch the subscriber should have, the latest one as of the last call, unless it was said."""
        due, self._latest = self._latest, self._source.sequence
        if due > self._told and self._outlet.writable:
            self._told = due
            self._outlet.send_event(EventPosition(sequence=due, holder=self._source.holder))

    def push_event(self, message: EventMessage) -> None:
        if self._pending is not None or self._behind or not self._outlet.writable:
            self._behind = True
        else:
            self._send(message)

    def pump(self) -> None:
        """Send until the connection is full; of a snapshot, at most one message per turn of the loop."""
        while self._outlet.writable and self._turn is None:
            if self._pending is not None:
                try:
                    message = next(self._pending)
                except StopIteration:
                    self._pending = None
                    continue
                if message is not None:
                    self._send(message)
                if not isinstance(message, EventBatch):
                    self._turn = asyncio.get_running_loop().call_soon(self._resume)
            elif self._behind:
                self._behind = False
                self._pending = self._source.events_after(self._sent)
            else:
                return

    def close(self) -> None:
        if self._subscribed:
            self._subscribed = False
            self._source.unsubscribe(self)
        self._pending = None
        self._behind = False
        if self._turn is not None:
            self._turn.cancel()
            self._turn = None

    def _resume(self) -> None:
        self._turn = None
        self.pump()

    def _send(self, message: EventMessage) -> None:
        self._outlet.send_event(message)
        if not isinstance(message, EventSnapshot) or message.last:
            self._sent = message.sequence
