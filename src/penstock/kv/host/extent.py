"""An extent: one worker's part of its host's arena, with the bytes of its blocks and a record of each.

Only its worker writes it, and the other workers of the host read it, without a lock. A slot's record is cleared before its
bytes are written and published after. A reader copies the bytes, then compares them with the checksum that the record had
before, and the record with what it was: a block that was overwritten meanwhile, or half written by a killed worker, is only
missing.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from penstock.core.ids import BlockId
from penstock.core.wire import HashArray
from penstock.kv.namespace import Namespace
from penstock.transfer.regions.checksum import Sums, checksum_ranges
from penstock.transfer.storage.slots import RECORD, Records, are_trusted, seal

_MAGIC = 0x316B6C6266667470
_HEADER = np.dtype(
    [
        ("magic", "<u8"),
        ("namespace", "<u8", 2),
        ("block_bytes", "<u8"),
        ("num_slots", "<u8"),
        ("sum", "<u4"),  # CRC-32C of what stands before
    ]
)
_EPOCH_OFFSET, _COUNT_OFFSET = 1024, 2048
"""Of the epoch, which an adoption raises, and the number of notes that were ever written: each has a cache line of its own."""
_PAGE_BYTES = 4096
NOTES = 8192
"""Notes that an extent keeps: older ones are overwritten, and whoever has not read them reads all records."""

_EPOCH_MAX, _COUNT_MAX = 1 << 20, 1 << 62
"""A higher epoch or number of notes was never written: the memory was damaged."""

CHANGED, USED, WRONG = range(3)
"""What a note says: a slot of its writer has another record; a slot of another worker was used, or does not match its checksum."""
_KIND_SHIFT, _EXTENT_SHIFT, _SLOT_MASK = 56, 32, 0xFFFFFFFF
Numbers = NDArray[np.uint64]


@dataclass(frozen=True, slots=True)
class ExtentLayout:
    """Where an extent has what.

    Attributes:
        num_slots: blocks that it can keep.
        block_bytes: size of one.
    """

    num_slots: int
    block_bytes: int

    @property
    def used_offset(self) -> int:
        """Of (num_slots,) uint64, higher for blocks that were used later."""
        return _PAGE_BYTES + 8 * NOTES

    @property
    def records_offset(self) -> int:
        """Of (num_slots,) records."""
        return -(-(self.used_offset + 8 * self.num_slots) // RECORD.itemsize) * RECORD.itemsize

    @property
    def data_offset(self) -> int:
        """Of the blocks' bytes."""
        end = self.records_offset + RECORD.itemsize * self.num_slots
        return -(-end // _PAGE_BYTES) * _PAGE_BYTES

    @property
    def size_bytes(self) -> int:
        """Size of an extent."""
        return self.data_offset + self.num_slots * self.block_bytes


class Extent:
    """An extent in this process's memory. Not thread-safe; one task owns it.

    Attributes:
        layout: where it has what.
        namespace: (2,) uint64, of its blocks.
    """

    def __init__(self, memory: NDArray[np.uint8], layout: ExtentLayout, namespace: Numbers) -> None:
        """View an extent.

        Args:
            memory: (at least `layout.size_bytes`,) uint8 from its beginning; read-only for one of another worker.
            layout: where it has what.
            namespace: (2,) uint64, as `namespace_key` makes it.
        """
        self.layout = layout
        self.namespace = namespace
        number, at = layout.num_slots, layout.records_offset
        self.used: Numbers = memory[layout.used_offset :][: 8 * number].view("<u8")
        self._records: Records = memory[at : at + number * RECORD.itemsize].view(RECORD)
        self._data_address = memory.ctypes.data + layout.data_offset
        self._header = memory[: _HEADER.itemsize].view(_HEADER)
        self._epoch: Numbers = memory[_EPOCH_OFFSET : _EPOCH_OFFSET + 8].view("<u8")
        self._count: Numbers = memory[_COUNT_OFFSET : _COUNT_OFFSET + 8].view("<u8")
        self._notes: Numbers = memory[_PAGE_BYTES : _PAGE_BYTES + 8 * NOTES].view("<u8")
        self._memory = memory

    # ---- of whoever reads it --------------------------------------------------------------------------

    @property
    def epoch(self) -> int:
        """How often it was adopted."""
        return int(self._epoch[0])

    @property
    def count(self) -> int:
        """Notes that were ever written."""
        return int(self._count[0])

    def notes(self, start: int, end: int) -> Numbers | None:
        """Read the notes from number `start` to before `end`; None if some were overwritten, or the numbers are damaged."""
        if not 0 <= end - start <= NOTES:
            return None
        noted: Numbers = self._notes[(start + np.arange(end - start)) % NOTES]
        return noted if 0 <= self.count - start <= NOTES else None

    def records(self, slots: Sequence[int] | NDArray[np.intp] | slice = slice(None)) -> Records:
        """Copy records."""
        return np.array(self._records[slots])

    def are_trusted(self, records: Records, slots: NDArray[np.intp]) -> NDArray[np.bool_]:
        """Say which of (n,) records of (n,) slots can be trusted."""
        return are_trusted(records, slots, self.namespace, self.layout.block_bytes)

    def addresses(self, slots: Sequence[int]) -> Numbers:
        """Return the (n,) uint64 addresses of the slots' bytes."""
        offsets = np.array(slots, np.uint64) * np.uint64(self.layout.block_bytes)
        return offsets + np.uint64(self._data_address)

    # ---- of its worker --------------------------------------------------------------------------------

    @property
    def is_kept(self) -> bool:
        """Whether another process has left blocks that this one may use."""
        return self.epoch < _EPOCH_MAX and read_layout(self._memory, self.namespace) == self.layout

    def adopt(self) -> tuple[NDArray[np.intp], Records]:
        """Take it over: from now on this process alone writes it.

        Returns:
            the slots of blocks that can be used, least recently used first; and their records.
        """
        if not self.is_kept:
            self._header[:] = 0
            self._records[:] = 0
            self.used[:] = 0
            head = np.zeros(1, _HEADER)
            head["magic"], head["namespace"] = _MAGIC, self.namespace
            head["block_bytes"], head["num_slots"] = self.layout.block_bytes, self.layout.num_slots
            head["sum"] = _head_sum(head)
            self._header[:] = head
        self._epoch[0] = self.epoch % _EPOCH_MAX + 1
        records = self.records()
        everything = np.arange(len(records))
        slots = everything[self.are_trusted(records, everything)]
        slots = slots[np.argsort(self.used[slots], kind="stable")]
        return slots, records[slots]

    def draft(
        self, hashes: HashArray, parents: Numbers, slots: Sequence[BlockId], generation: int
    ) -> Records:
        """Make the (n,) records of blocks of one prefix; the checksums of their bytes are 0 yet."""
        records = np.zeros(len(slots), RECORD)
        records["hash"], records["parent"], records["namespace"] = hashes, parents, self.namespace
        records["slot"], records["length"] = np.array(slots, np.intp) + 1, self.layout.block_bytes
        records["generation"] = np.arange(generation, generation + len(slots), dtype=np.uint64)
        return records

    def clear(self, slots: Sequence[BlockId] | slice) -> None:
        """Make slots free, whose bytes may be written afterwards."""
        self._records[slots] = 0

    def publish(self, slots: Sequence[BlockId], records: Records) -> None:
        """Seal and write the records of slots whose bytes are complete."""
        seal(records)
        self._records[slots] = records

    def note(self, kind: int, extent: int, slots: Iterable[int]) -> None:
        """Tell the other workers of slots of an extent."""
        numbers = np.array(list(slots), np.uint64)
        start = self.count % _COUNT_MAX
        if len(numbers) > NOTES:  # whoever reads them reads all records
            start, numbers = start + len(numbers) - NOTES, numbers[-NOTES:]
        notes = numbers | np.uint64(kind << _KIND_SHIFT | extent << _EXTENT_SHIFT)
        self._notes[np.arange(start, start + len(notes)) % NOTES] = notes
        self._count[0] = start + len(notes)


def namespace_key(namespace: Namespace) -> Numbers:
    """Return the (2,) uint64 that records name it by."""
    return np.frombuffer(namespace.digest, "<u8")


def slots_of(notes: Numbers, kind: int, extent: int) -> NDArray[np.intp]:
    """Return the slots of an extent that notes of one kind name, in order, with repetitions."""
    of_kind = notes >> np.uint64(_EXTENT_SHIFT) == np.uint64(kind << (_KIND_SHIFT - _EXTENT_SHIFT) | extent)
    slots: NDArray[np.intp] = (notes[of_kind] & np.uint64(_SLOT_MASK)).astype(np.intp)
    return slots


def read_layout(memory: NDArray[np.uint8], namespace: Numbers) -> ExtentLayout | None:
    """Read the layout of an extent with blocks of a namespace; None if it has none, or is being made."""
    head = np.array(memory[: _HEADER.itemsize].view(_HEADER))
    is_valid = head["magic"][0] == _MAGIC and head["sum"][0] == _head_sum(head)[0]
    if not is_valid or (head["namespace"][0] != namespace).any():
        return None
    layout = ExtentLayout(int(head["num_slots"][0]), int(head["block_bytes"][0]))
    return layout if layout.size_bytes <= memory.size else None


def _head_sum(head: NDArray[np.void]) -> Sums:
    address, length = np.array([head.ctypes.data], np.uint64), np.array([_HEADER.itemsize - 4], np.uint64)
    return checksum_ranges(address, length)
