"""Snapshots of a worker's content, as messages that are built lazily, with bounded work at a time."""

from collections.abc import Iterator

from penstock.core.types.events import BlockStored, EventSnapshot, Holder, Tier
from penstock.core.wire import PackedHashes
from penstock.runtime.events.content import Runs, Walk

_HASH_BYTES = 8
_STEPS_AT_ONCE = 4096
"""Blocks visited at a time: 0.5 ms on a shared AMD EPYC."""
_EVENTS_MAX = 512
"""Events in one message, and built at a time; reached if blocks form chains so short that each needs its own event."""


class Snapshot:
    """A snapshot that any number of subscribers may read at once; they share its messages. One task owns it."""

    def __init__(
        self,
        walk: Walk,
        sequence: int,
        block_size: int,
        chunk_hashes: int,
        holder: Holder = Holder.WORKER,
    ) -> None:
        """Make a snapshot.

        Args:
            walk: iteration begun when `sequence` was the latest batch.
            sequence: the batch whose content the snapshot has.
            block_size: tokens in a block.
            chunk_hashes: most hashes in a message.
            holder: whose content it is.
        """
        self._holder = holder
        self.sequence = sequence
        self._walk = walk
        self._block_size = block_size
        self._chunk_hashes = chunk_hashes
        self._built: list[EventSnapshot] = []
        self._open: list[BlockStored] = []  # events of the next message
        self._room = chunk_hashes
        self._events = self._make_events()
        self._is_whole = False

    def messages(self) -> Iterator[EventSnapshot | None]:
        """Yield all messages, and None where enough was done for one turn of the event loop."""
        index = 0
        while True:
            if index < len(self._built):
                yield self._built[index]
                index += 1
            elif self._is_whole:
                return
            else:
                self._continue()
                if index == len(self._built):
                    yield None

    def _continue(self) -> None:
        """Do a part of the work, which yields at most one message."""
        for count, event in enumerate(self._events, 1):
            if event is None:
                return
            size = len(event.block_hashes) // _HASH_BYTES
            is_full = bool(self._open) and (size > self._room or len(self._open) >= _EVENTS_MAX)
            if is_full:
                self._close(last=False)
            self._open.append(event)
            self._room -= size
            if is_full or count >= _EVENTS_MAX:
                return
        self._close(last=True)
        self._is_whole = True

    def _close(self, *, last: bool) -> None:
        self._built.append(
            EventSnapshot(
                sequence=self.sequence,
                chunk=len(self._built),
                last=last,
                events=tuple(self._open),
                holder=self._holder,
            )
        )
        self._open = []
        self._room = self._chunk_hashes

    def _make_events(self) -> Iterator[BlockStored | None]:
        """Yield all events, parents before children, and None after every `_STEPS_AT_ONCE` blocks."""
        while not self._walk.is_done:
            yield from self._events_of(self._walk.next(_STEPS_AT_ONCE))
            yield None

    def _events_of(self, runs: Runs) -> Iterator[BlockStored]:
        for hashes, parent, copies in runs:
            for tier, count in zip(Tier, copies, strict=True):
                for _ in range(count):
                    yield from self._parts(hashes, parent, tier)

    def _parts(self, hashes: PackedHashes, parent: int | None, tier: Tier) -> Iterator[BlockStored]:
        step = self._chunk_hashes * _HASH_BYTES
        for start in range(0, len(hashes), step):
            packed = PackedHashes(hashes[start : start + step])
            yield BlockStored(
                block_hashes=packed, parent_block_hash=parent, block_size=self._block_size, tier=tier
            )
            parent = int.from_bytes(packed[-_HASH_BYTES:], "little")
