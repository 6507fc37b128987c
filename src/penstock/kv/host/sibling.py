"""The extent of another worker of the host, as one worker reads it: an index of its blocks, kept by its notes."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from penstock.core.ids import BlockId
from penstock.core.types.events import KvEvent, Tier
from penstock.kv.host.extent import CHANGED, Extent, ExtentLayout, Numbers, read_layout, slots_of
from penstock.kv.pool.pool import BlockPool
from penstock.kv.pool.prefixes import commit_chains
from penstock.transfer.storage.slots import Records

_NO_SLOTS = ExtentLayout(0, 0)


class Sibling:
    """What another worker of the host keeps. Not thread-safe; one task owns it.

    Its index may be older than the extent, since that worker goes on meanwhile; whoever loads a block compares its record.

    Attributes:
        number: of its extent in the arena.
        extent: its extent; None while it keeps no blocks of this worker's namespace.
        pool: its slots as blocks, all referenced; None likewise.
        epoch: how often its extent had been adopted.
    """

    def __init__(
        self, number: int, memory: NDArray[np.uint8], namespace: Numbers, block_bytes: int, block_size: int
    ) -> None:
        """Know nothing of it; `poll` reads it.

        Args:
            number: of its extent in the arena.
            memory: of the extent, uint8 and read-only.
            namespace: (2,) uint64, of this worker.
            block_bytes: size of a block of this worker.
            block_size: tokens in a block.
        """
        self.number = number
        self.extent: Extent | None = None
        self.pool: BlockPool | None = None
        self._memory = memory
        self._namespace = namespace
        self._block_bytes = block_bytes
        self._block_size = block_size
        self._probe = Extent(memory, _NO_SLOTS, namespace)
        self.epoch = 0
        self._count = 0
        self._hashes: NDArray[np.uint64] = np.zeros((0, 2), np.uint64)
        self._events: tuple[KvEvent, ...] = ()
        """Of an index that was given up."""
        self._ignored_until = 0
        """Blocks of generations up to this one are not used."""

    def poll(self) -> Numbers | None:
        """Take in what it has told since the last call; returns its new notes, none if some were missed; None if it has told nothing."""
        if self._probe.epoch != self.epoch:
            self._begin()
        if self.extent is None or self.extent.count == self._count:
            return None
        start, self._count = self._count, self.extent.count
        notes = self.extent.notes(start, self._count)
        if notes is None:
            self._read(np.arange(self.extent.layout.num_slots))
            return np.zeros(0, np.uint64)
        changed = slots_of(notes, CHANGED, self.number)
        if len(changed):
            self._read(np.unique(changed[changed < self.extent.layout.num_slots]))
        return notes

    def fresh_records(self, slots: Sequence[BlockId], hashes: NDArray[np.uint64]) -> Records:
        """Read the records of leading slots which still have these hashes; takes in what others have.

        Returns:
            (m,) records with m <= n.
        """
        assert self.extent is not None, "it has blocks"
        records = self.extent.records(slots)
        fits = self.extent.are_trusted(records, np.array(slots, np.intp))
        fits &= (records["hash"] == hashes).all(axis=1)
        if fits.all():
            return records
        # notes may be overwritten while they are read: then only the record tells
        self._read(np.array(slots, np.intp)[~fits])
        return records[: int(fits.argmin())]

    def count_unchanged(self, slots: Sequence[BlockId], records: Records) -> int:
        """Count the leading slots that still have (n,) records; takes in what others have."""
        if self.extent is None:
            return 0
        now = self.extent.records(slots)
        changed = np.flatnonzero(now != records)
        if not len(changed):
            return len(slots)
        self._read(np.array(slots, np.intp)[changed])
        return int(changed[0])

    def drop(self, slot: BlockId) -> None:
        """Forget a block, whose bytes are wrong."""
        if self.pool is not None:
            self.pool.forget([slot])
            self._hashes[slot] = 0

    def ignore(self) -> None:
        """Forget all blocks that it keeps now, for good."""
        self.poll()
        if self.extent is None or self.pool is None:
            return
        records = self.extent.records()
        trusted = self.extent.are_trusted(records, np.arange(len(records)))
        newest = int(records["generation"][trusted].max(initial=0))
        self._ignored_until = max(self._ignored_until, newest)
        self._read(np.arange(len(records)))

    def take_events(self) -> tuple[KvEvent, ...]:
        """Return the KV events of all that was read since the last call, in order."""
        events, self._events = self._events, ()
        return events if self.pool is None else (*events, *self.pool.take_events())

    def check(self) -> None:
        """Raise AssertionError if the index is inconsistent."""
        if self.pool is not None:
            self.pool.check()
            known = {row.tobytes() for row in self._hashes if row.any()}
            assert {row.tobytes() for row in self.pool.resident_hashes()} <= known, "a block without a slot"

    def _begin(self) -> None:
        """Read an extent that another process has made or adopted."""
        self.epoch = self._probe.epoch
        layout = read_layout(self._memory, self._namespace)
        if layout is not None and layout.block_bytes != self._block_bytes:
            layout = None
        if self.pool is not None and (self.extent is None or layout != self.extent.layout):
            self.pool.forget([BlockId(slot) for slot in range(len(self._hashes))])
            self._events = self.take_events()
            self.extent = self.pool = None
        if layout is None:
            return
        if self.pool is None:
            self.extent = Extent(self._memory, layout, self._namespace)
            self.pool = BlockPool(layout.num_slots, self._block_size, tier=Tier.HOST)
            self.pool.allocate(layout.num_slots)
            self._hashes = np.zeros((layout.num_slots, 2), np.uint64)
        assert self.extent is not None, "made with the pool"
        self._count = self.extent.count
        self._read(np.arange(layout.num_slots))

    def _read(self, slots: NDArray[np.intp]) -> None:
        """Take in the records of slots."""
        assert self.extent is not None
        assert self.pool is not None
        records = self.extent.records(slots)
        keeps = self.extent.are_trusted(records, slots) & (records["generation"] > self._ignored_until)
        records["hash"][~keeps] = 0
        changed = (records["hash"] != self._hashes[slots]).any(axis=1)
        slots, records = slots[changed], records[changed]
        self.pool.forget([BlockId(slot) for slot in slots.tolist()])
        self._hashes[slots] = records["hash"]
        kept = records["hash"].any(axis=1)
        commit_chains(self.pool, slots[kept], records[kept])
