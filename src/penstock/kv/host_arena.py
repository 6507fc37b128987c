"""The memory of host tiers: an arena of the host's workers, in which each worker writes an extent of its own and reads those of its siblings."""

import fcntl
import os
import struct
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from time import sleep

import numpy as np
from numpy.typing import NDArray

from penstock.core.errors import ConfigError, TransferError
from penstock.core.ids import BlockId
from penstock.core.types.events import Holder, KvEvent, Tier
from penstock.core.types.instances import KvHolder
from penstock.core.wire import HashArray, Wire
from penstock.kv.block_store import Namespace
from penstock.kv.pool import BlockPool, commit_chains
from penstock.transfer.regions.arena import Arena, free_memory_bytes
from penstock.transfer.regions.ranges import Sums, checksum_ranges
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


_SPARED_BYTES = 1 << 28
"""Memory that stays free: a host without any kills processes."""
_LOCK = struct.Struct("hhqqi4x")
"""The kernel's `struct flock` on 64-bit Linux: type, whence, start, length, process."""
_LOCK_TRIES, _LOCK_PAUSE_S = 500, 0.01
"""How long a worker waits for the end of the process that had its extent before."""


class HostPart(Wire, frozen=True):
    """What a worker is told of its host's arena.

    Attributes:
        path: opens the arena's memory, which another process keeps.
        number: of the worker's own extent.
        extents: (offset, bytes) of each extent, multiples of the page size; pages that nobody writes take no memory.
        sharing: workers among which the configured size is divided.
        arena: names the arena, among those of all hosts.
    """

    path: str
    number: int
    extents: tuple[tuple[int, int], ...]
    sharing: int = 1
    arena: str = ""

    def holder(self, namespace: Namespace, num_blocks: int) -> KvHolder | None:
        """Describe the arena, for blocks of one namespace, as if all extents had `num_blocks`; None where nobody else has one."""
        if len(self.extents) == 1:
            return None
        name = f"{self.arena}/{namespace.digest.hex()}"
        return KvHolder(kind=Holder.HOST, id=name, blocks=num_blocks * len(self.extents))


class HostMemory:
    """The mapped memory. The extents of other workers are mapped read-only: no worker can spoil another's blocks.

    Attributes:
        own: uint8, of the own extent, with all its pages allocated.
        others: uint8, of the other extents by number.
        extents: of all extents.
    """

    def __init__(self, layout: ExtentLayout, namespace: Numbers, part: HostPart | None) -> None:
        """Take the memory of an own arena, or map and lock a part of the host's.

        Args:
            layout: of the own extent.
            namespace: (2,) uint64, of the blocks.
            part: None for an own arena.

        Raises:
            ConfigError: the host has not enough memory, the arena is gone, or another process has the extent.
        """
        self._arenas: list[Arena] = []
        self._lock_fd: int | None = None
        what = (
            f"kv.host: {layout.num_slots:,} blocks of {layout.block_bytes:,} bytes are"
            f" {layout.size_bytes / 2**30:.2f} GiB"
        )
        check = _memory_check(what)
        try:
            if part is None:
                check(layout.size_bytes)
                self._arenas.append(Arena.create(layout.size_bytes, before_taking=check))
            else:
                self._map(part, layout.size_bytes, what)
        except (OSError, TransferError) as error:
            self.close()
            raise ConfigError(f"{what}: {getattr(error, 'message', error)}") from error
        except BaseException:
            self.close()
            raise
        number = 0 if part is None else part.number
        own = self._arenas[number]
        if part is not None and read_layout(own.array, namespace) != layout:  # else all pages are there
            try:
                check(layout.size_bytes)
                own.touch(check)
            except (OSError, ConfigError):
                self.close()
                raise
        self.own: NDArray[np.uint8] = own.array
        self.others = {n: arena.array for n, arena in enumerate(self._arenas) if n != number}
        self.extents = [arena.array for arena in self._arenas]

    def close(self) -> None:
        """Unlock and release it; what is in the host's arena stays there. Safe twice."""
        for arena in self._arenas:
            arena.close()
        if self._lock_fd is not None:
            os.close(self._lock_fd)
            self._lock_fd = None

    def _map(self, part: HostPart, own_bytes: int, what: str) -> None:
        """Map the arena and lock the own extent.

        Raises:
            ConfigError: another process has the extent, or it is too small.
            OSError: the arena is gone.
            TransferRefused: it is no arena.
        """
        offset, size = part.extents[part.number]
        self._lock_fd = os.open(
            part.path, os.O_RDWR | os.O_CLOEXEC
        )  # a mapping keeps a copy of its own descriptor
        _lock(self._lock_fd, offset, size)
        for number, (offset, size) in enumerate(part.extents):
            is_own = number == part.number
            if is_own and size < own_bytes:
                raise ConfigError(
                    f"{what} with their records; the host's arena has {size / 2**30:.2f} GiB for them"
                )
            fd = os.open(part.path, (os.O_RDWR if is_own else os.O_RDONLY) | os.O_CLOEXEC)
            mapped = own_bytes if is_own else size
            self._arenas.append(Arena.map(fd, mapped, writable=is_own, offset_bytes=offset))


def _memory_check(what: str) -> Callable[[int], None]:
    """Return a function that raises ConfigError if the host lacks so many bytes."""

    def check(lacking_bytes: int) -> None:
        free_bytes = free_memory_bytes()
        if free_bytes < lacking_bytes + _SPARED_BYTES:
            raise ConfigError(
                f"{what}, of which {lacking_bytes / 2**30:.2f} are not allocated yet; the host has {free_bytes / 2**30:.2f} GiB free,"
                f" and {_SPARED_BYTES / 2**30:g} must stay free; set a smaller kv.host"
            )

    return check


def _lock(fd: int, offset: int, size: int) -> None:
    """Lock a range of the memory for as long as this descriptor is open.

    Raises:
        ConfigError: another process has it.
        OSError: the memory cannot be locked.
    """
    wanted = _LOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, offset, size, 0)
    for _ in range(_LOCK_TRIES):
        try:
            fcntl.fcntl(fd, fcntl.F_OFD_SETLK, wanted)
        except BlockingIOError:
            sleep(_LOCK_PAUSE_S)
        else:
            return
    raise ConfigError(
        f"kv.host: another process has the extent at byte {offset:,} of the host's arena, and has not ended in"
        f" {_LOCK_TRIES * _LOCK_PAUSE_S:g} s; end it"
    )


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
