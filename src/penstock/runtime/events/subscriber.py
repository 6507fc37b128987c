"""Follows one worker's KV events: applies them in order, and asks again when some are missing.

A router that connects, reconnects or sees a gap needs nothing but this: it names the last batch it has
applied, and the worker sends the rest or a snapshot.
"""

import asyncio
import random
from collections.abc import Callable, Sequence
from enum import StrEnum

from penstock.core.ids import WorkerId
from penstock.core.log import get_logger
from penstock.core.types.events import EventBatch, EventMessage, EventSnapshot, KvEvent
from penstock.runtime.config import EventConfig
from penstock.seams import Connection

Apply = Callable[[WorkerId, Sequence[KvEvent]], None]
Replace = Callable[[WorkerId, EventSnapshot], None]

_log = get_logger()


class EventFault(StrEnum):
    """What can be wrong with events. Of each there is a count."""

    GAP = "gap"  # others are missing before it: asked for again
    REPEATED = "repeated"  # it came before: passed over
    BLOCK_SIZE = (
        "block_size"  # it is of blocks of another size than the model's: passed over, the whole is asked for
    )
    MALFORMED = "malformed"  # it has hashes that are none: passed over, the whole is asked for


class EventSubscriber:
    """Keeps one worker's content in step with its events. One task owns it; `push` never blocks.

    Messages may come late, twice, out of order or not at all: content is only ever changed by the next batch
    in order or by the next part of a snapshot, so it always equals what the worker held at `sequence`. Parts are applied as
    they come, a bounded amount of work each: from the first to the last there is no sequence, and content is a part.
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
    ) -> None:
        """Follow `connection`'s worker once `start` is called.

        Args:
            connection: where to ask; its events go to `push`.
            apply: called with the events of each batch, in order.
            replace: called with each part of a snapshot, in order: store its blocks; with the first, forget this worker's
                before.
            rng: for the jitter.
            on_fault: called with what is wrong with messages or their order.
            config: bounds and delays.
        """
        self.sequence: int | None = None
        """The last batch applied; None before the first snapshot, and while one is applied."""
        self.resyncs = 0
        """How often a gap, or a doubt, made it ask again."""
        self._connection = connection
        self._apply = apply
        self._replace = replace
        self._rng = rng
        self._on_fault = on_fault
        self._config = config or EventConfig()
        self._parts_hashes = 0
        self._parts_of: int | None = None  # the sequence of the snapshot under way
        self._next_chunk = 0
        self._newest = 0  # the highest number seen
        self._tries = 0
        self._doubts = 0
        self._in_doubt = False  # and so only a whole snapshot will do
        self._timer: asyncio.TimerHandle | None = None
        self._waits_long = False  # the timer does, for the next snapshot of a worker that was doubted before
        self._closed = False

    @property
    def synced(self) -> bool:
        """Whether it has the worker's content and knows of nothing missing."""
        return self.sequence is not None and self._timer is None

    def start(self) -> None:
        """Ask for the worker's content. The answer, as all that follows, comes through `push`."""
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

    def doubt(self) -> bool:
        """Ask for the whole content, as what was applied may not be it: soon, and the next times more and more patiently.

        Returns:
            Whether it was not going to already.
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
        """Ask no more and ignore what still comes. Safe twice."""
        self._closed = True
        self._cancel()

    def _on_batch(self, batch: EventBatch) -> None:
        if self._parts_of is not None and batch.sequence <= self._parts_of and self.sequence is None:
            self._on_fault(EventFault.REPEATED)  # or is in the snapshot under way
        elif self.sequence is None or batch.sequence > self.sequence + 1:
            self._on_gap(batch.sequence)
        elif batch.sequence == self.sequence + 1:
            self.sequence = batch.sequence
            self._apply(self._connection.worker_id, batch.events)
            self._settle()
        else:
            self._on_fault(EventFault.REPEATED)

    def _on_snapshot(self, snapshot: EventSnapshot) -> None:
        if self.sequence is not None and snapshot.sequence <= self.sequence and not self._in_doubt:
            self._on_fault(EventFault.REPEATED)  # or overtaken
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
            self._in_doubt = False  # whatever is wrong with it: more than the whole cannot be had
            self._settle()
        else:
            self._arm(self._config.resync_timeout_s_max)  # it is coming: no need to ask meanwhile

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
        self._connection.subscribe(None if self._in_doubt else self.sequence)

    def _arm(self, delay_s: float) -> None:
        self._cancel()
        self._timer = asyncio.get_running_loop().call_later(delay_s, self._ask)
        self._waits_long = False

    def _settle(self) -> None:
        """Stop asking, unless a message told of more than has been applied."""
        if self.sequence is not None and self.sequence >= self._newest and not self._in_doubt:
            self._tries = 0
            self._cancel()

    def _cancel(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
