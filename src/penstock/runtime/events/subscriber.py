"""Follows one worker's KV events of one holder: applies them in order, and resyncs when some are missing.

A router that connects, reconnects or sees a gap names the last batch that it has applied, and the worker sends the later
batches or a snapshot.
"""

import asyncio
import random
from collections.abc import Callable, Iterator, Sequence
from enum import StrEnum
from typing import Protocol

from penstock.core.ids import WorkerId
from penstock.core.log import get_logger
from penstock.core.types.events import EventBatch, EventMessage, EventPosition, EventSnapshot, Holder, KvEvent
from penstock.runtime.config import EventConfig
from penstock.seams import Connection, EventSource

Apply = Callable[[WorkerId, Sequence[KvEvent]], None]
Replace = Callable[[WorkerId, EventSnapshot], None]

_log = get_logger()


class EventFault(StrEnum):
    """What can be wrong with an event message; each kind is counted."""

    GAP = "gap"  # earlier batches are missing: resync
    REPEATED = "repeated"  # received before: ignored
    BLOCK_SIZE = "block_size"  # blocks of another size than the model's: ignored, a snapshot is requested
    MALFORMED = "malformed"  # malformed hashes: ignored, a snapshot is requested


class EventSubscriber:
    """Keeps a copy of one worker's content in sync with its events. One task owns it; `push` never blocks.

    Messages may arrive late, twice, out of order or not at all. Only the next batch in order, or the next chunk of a
    snapshot, changes the content, so it always equals the worker's content at `sequence`. Chunks are applied as they arrive;
    until the last one, `sequence` is None and the content is incomplete. Batches that arrive too early wait, up to a bound.
    """

    def __init__(
        self,
        connection: Connection,
        *,
        apply: Apply,
        replace: Replace,
        rng: random.Random,
        on_fault: Callable[[EventFault], None],
        config: EventConfig | None = None,
        holder: Holder = Holder.WORKER,
    ) -> None:
        """Make a subscriber; `start` subscribes.

        Args:
            connection: the worker; the caller passes its events to `push`.
            apply: called with the events of each batch, in order.
            replace: called with each chunk of a snapshot, in order. It stores the chunk's blocks; for chunk 0 it first
                removes all blocks of this worker.
            rng: for jitter.
            on_fault: called with each fault of a message.
            config: bounds and delays.
            holder: whose blocks it follows, as this worker tells of them.
        """
        self.holder = holder
        self.sequence: int | None = None
        """The last batch applied; None before the first snapshot, and during one."""
        self.resyncs = 0
        """Resyncs after a gap or a `doubt`."""
        self._connection = connection
        self._apply = apply
        self._replace = replace
        self._rng = rng
        self._on_fault = on_fault
        self._config = config or EventConfig()
        self._early: dict[int, EventBatch] = {}  # beyond a gap, by sequence
        self._parts_hashes = 0
        self._parts_of: int | None = None  # sequence of the snapshot in progress
        self._next_chunk = 0
        self._newest = 0  # highest sequence seen
        self._tries = 0
        self._doubts = 0
        self._in_doubt = False  # only a whole snapshot helps
        self._timer: asyncio.TimerHandle | None = None
        self._waits_long = False  # the timer is that of a repeated `doubt`
        self._closed = False

    @property
    def synced(self) -> bool:
        """Whether the content is complete as far as known."""
        return self.sequence is not None and self._timer is None

    def start(self) -> None:
        """Ask for the worker's content; all messages arrive through `push`."""
        self._ask()

    def push(self, message: EventMessage) -> None:
        if self._closed:
            return
        self._newest = max(self._newest, message.sequence)
        match message:
            case EventBatch():
                self._on_batch(message)
            case EventSnapshot():
                self._on_snapshot(message)
            case EventPosition(sequence=sequence):
                if self.sequence is None or sequence > self.sequence:
                    self._on_gap(sequence)

    def doubt(self) -> bool:
        """Request a snapshot, since the applied content may be wrong: soon at first, later with growing delays.

        Returns:
            False if a snapshot was requested already, or the subscriber is closed.
        """
        if self._in_doubt or self._closed:
            return False
        self._in_doubt = True
        self.resyncs += 1
        if self._timer is None:
            config = self._config
            longest_s = min(config.resync_timeout_s * 2 ** min(self._doubts, 32), config.resync_timeout_s_max)
            self._arm(self._rng.uniform(0, longest_s if self._doubts else config.resync_jitter_s))
            self._waits_long = self._doubts > 0
        self._doubts += 1
        return True

    def close(self) -> None:
        """Stop; ignore messages that still arrive. Safe twice."""
        self._closed = True
        self._cancel()

    def _on_batch(self, batch: EventBatch) -> None:
        if self._parts_of is not None and batch.sequence <= self._parts_of and self.sequence is None:
            self._on_fault(EventFault.REPEATED)  # the snapshot in progress includes it
        elif self.sequence is None or batch.sequence > self.sequence + 1:
            if len(self._early) < self._config.early_batches_max:
                self._early[batch.sequence] = batch
            self._on_gap(batch.sequence)
        elif batch.sequence == self.sequence + 1:
            self.sequence = batch.sequence
            self._apply(self._connection.worker_id, batch.events)
            self._apply_early()
            self._settle()
        else:
            self._on_fault(EventFault.REPEATED)

    def _apply_early(self) -> None:
        """Apply the batches that arrived early and are next now."""
        assert self.sequence is not None, "a snapshot was applied"
        while self._early and (batch := self._early.pop(self.sequence + 1, None)) is not None:
            self.sequence = batch.sequence
            self._apply(self._connection.worker_id, batch.events)

    def _on_snapshot(self, snapshot: EventSnapshot) -> None:
        if self.sequence is not None and snapshot.sequence <= self.sequence and not self._in_doubt:
            self._on_fault(EventFault.REPEATED)
            return
        if snapshot.chunk == 0:
            self._drop_parts()
            self._parts_of = snapshot.sequence
        elif snapshot.sequence != self._parts_of or snapshot.chunk != self._next_chunk:
            self._drop_parts()
            self._on_gap(snapshot.sequence)
            return
        self._next_chunk += 1
        self._parts_hashes += sum(len(event.block_hashes) >> 3 for event in snapshot.events)
        if self._parts_hashes > self._config.snapshot_hashes_max:
            _log.error(
                "snapshot_refused",
                worker_id=self._connection.worker_id,
                hashes=self._parts_hashes,
                hashes_max=self._config.snapshot_hashes_max,
            )
            self._drop_parts()
            return
        self.sequence = snapshot.sequence if snapshot.last else None
        self._replace(self._connection.worker_id, snapshot)
        if snapshot.last:
            self._drop_parts()
            self._in_doubt = False
            self._early = {
                number: batch for number, batch in self._early.items() if number > snapshot.sequence
            }
            self._apply_early()
            self._settle()
            if self._timer is not None:
                self._ask()  # batches after the snapshot are missing
        else:
            self._arm(self._config.resync_timeout_s_max)  # more chunks are on their way

    def _drop_parts(self) -> None:
        self._parts_hashes = 0
        self._parts_of = None
        self._next_chunk = 0

    def _on_gap(self, sequence: int) -> None:
        if self._timer is not None and not self._waits_long:
            return  # already asking
        self.resyncs += 1
        self._on_fault(EventFault.GAP)
        _log.info("event_gap_seen", worker_id=self._connection.worker_id, have=self.sequence, got=sequence)
        self._arm(self._rng.uniform(0, self._config.resync_jitter_s))

    def _ask(self) -> None:
        self._tries += 1
        config = self._config
        timeout_s = min(config.resync_timeout_s * 2 ** min(self._tries - 1, 32), config.resync_timeout_s_max)
        self._arm(timeout_s * self._rng.uniform(0.5, 1.0))
        self._connection.subscribe(None if self._in_doubt else self.sequence, self.holder)

    def _arm(self, delay_s: float) -> None:
        self._cancel()
        self._timer = asyncio.get_running_loop().call_later(delay_s, self._ask)
        self._waits_long = False

    def _settle(self) -> None:
        """Stop asking if everything seen has been applied."""
        if self.sequence is not None and self.sequence >= self._newest and not self._in_doubt:
            self._tries = 0
            self._cancel()

    def _cancel(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


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
