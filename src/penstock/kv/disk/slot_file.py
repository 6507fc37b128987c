"""`SlotFile`: KV blocks in the slots of a file, found by their hash, kept across restarts.

The format is that of `penstock.transfer.storage.slots`. A block is only served if its bytes match the checksum in its record.
"""

import asyncio
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from penstock.core.errors import ConfigError, DeadlineExceeded
from penstock.core.ids import BlockId
from penstock.core.log import get_logger
from penstock.core.types.events import KvEvent
from penstock.core.wire import HashArray
from penstock.kv.buffers import Buffers, Bytes, block_views
from penstock.kv.disk.index import SlotIndex
from penstock.kv.disk.probe import PROBE_BYTES, probe_reads
from penstock.kv.gate import Gate
from penstock.kv.namespace import Namespace
from penstock.kv.pool.use import EvictionPolicy
from penstock.transfer.regions.checksum import crc32c
from penstock.transfer.regions.quarantine import call_after
from penstock.transfer.storage.io_threads import Bounce, IoThreads, Job
from penstock.transfer.storage.slots import ALIGNMENT, Disk, Slots, failure, slot_bytes_of

_CLOSE_S = 2.0
"""Longest wait of `close`. If the disk hangs longer, the files are closed when it answers."""
_TOUCHED_MAX = 4096
"""So many slots may be used before their new generations are written."""


@dataclass(slots=True)
class SlotCounts:
    """Blocks since the file was opened.

    Attributes:
        loaded: loaded and verified.
        stored: written.
        mismatched: found on the disk with other bytes than were written, and dropped.
        refused: not stored, since too many were being written, or all slots were in use.
    """

    loaded: int = 0
    stored: int = 0
    mismatched: int = 0
    refused: int = 0


class SlotFile:
    """An open slot file with threads of its own, so that a hanging disk delays only its own file.

    One task owns it. Its index is a `BlockPool`, in which a slot is a block.

    Attributes:
        path: of the data; records are in a second file, `path` + ".records".
        counts: what happened to blocks.
    """

    def __init__(
        self,
        path: "str | os.PathLike[str]",
        size_bytes: int,
        block_bytes: int,
        namespace: Namespace,
        *,
        threads: int = 8,
        storing_max: int = 256,
        eviction: EvictionPolicy = "lru",
        disk: Disk = os,
    ) -> None:
        """Open and lock the file, or create it; blocks as long as the disk does.

        Args:
            path: of the data, in an existing directory; on a networked file system each deployment needs a directory of its own.
            size_bytes: of all slots; the space is reserved now. A file of another size is extended or cut.
            block_bytes: of one block.
            namespace: of the blocks.
            threads: parallel reads and writes.
            storing_max: blocks that may be waiting to be written; further ones are not stored.
            eviction: as in `BlockPool`. A block is used when it is stored and at each load.
            disk: the system calls.

        Raises:
            TransferRefused: another process has it open.
            ConfigError: it holds blocks of another namespace, there is not enough space, or a size is wrong.
            TransferError: the disk failed.
        """
        self.path = Path(path)
        self.block_bytes = block_bytes
        self.counts = SlotCounts()
        slot_bytes = slot_bytes_of(block_bytes)
        if block_bytes < 1 or size_bytes < slot_bytes:
            raise ConfigError(
                f"{path}: size_bytes must be at least one slot of {slot_bytes} for block_bytes {block_bytes}; got {size_bytes}"
            )
        self.num_slots = size_bytes // slot_bytes
        self._slot_bytes = slot_bytes
        self._storing_max, self._num_threads = storing_max, threads
        self._storing: set[bytes] = set()
        self._threads = IoThreads(threads, slot_bytes, "kv-disk")
        self._running: set[asyncio.Future[None]] = set()
        try:
            self._slots = Slots(
                self.path, block_bytes, self.num_slots, namespace.digest, namespace.text, disk=disk
            )
        except OSError as error:
            raise failure(self.path, "opening", error) from error
        self._index = SlotIndex(self._slots.records, namespace.block_size, eviction)

    @property
    def num_cached(self) -> int:
        """Blocks that can be loaded."""
        return self._index.pool.num_cached

    @property
    def num_mismatched(self) -> int:
        """Blocks whose bytes did not match their checksum, since it was opened."""
        return self.counts.mismatched

    @property
    def storing_room(self) -> int:
        """Blocks that `store` would take now."""
        return max(self._storing_max - len(self._storing), 0)

    @property
    def is_direct(self) -> bool:
        """Whether it is read and written with O_DIRECT."""
        return self._slots.is_direct

    def start(self, on_change: Callable[[], None], on_failed: Callable[[Exception], None]) -> None:
        """Do nothing: it opens the file when it is made, and changes by loads and stores alone."""

    def probe(self) -> float | None:
        """Measure bytes per second of reads, of slots that hold nothing where there are some; None if the disk fails or hangs.

        Takes up to two seconds; to be called before all else.
        """
        most = max(min(PROBE_BYTES // self._slot_bytes, self.num_slots), 1)
        slots = np.flatnonzero(self._slots.is_on_disk)[:most].tolist()
        is_used = len(slots) == most
        free = [] if is_used else self._index.pool.allocate(min(most, self.num_slots - self.num_cached)) or []
        if not is_used:
            slots = [slot for slot in free if not self._slots.is_on_disk[slot]]
        if not slots:
            return None
        speed = probe_reads(self._slots, slots, self._num_threads, writes=not is_used)
        kept = slots if speed is None else []  # a late write may still come to them
        self._index.pool.release([slot for slot in free if slot not in kept])
        return speed or None

    def newest(self, count: int) -> HashArray:
        """Give the hashes of up to `count` blocks that were written last: (n, 2) uint64, empty if they are not held any more."""
        hashes = self._index.newest[:count]
        return hashes[: self.locate(hashes)]

    def locate(self, block_hashes: HashArray) -> int:
        """Count the leading blocks that are held.

        Args:
            block_hashes: (n, 2) uint64.
        """
        return len(self._index.pool.match(block_hashes))

    def take_events(self) -> tuple[KvEvent, ...]:
        """Return the KV events since the last call; the first call also returns those of blocks from an earlier run."""
        return self._index.pool.take_events()

    async def load(self, block_hashes: HashArray, targets: Buffers, *, timeout_s: float | None = None) -> int:
        """Load leading blocks and verify them. A block whose bytes do not match their checksum is dropped.

        After an error, a cancellation or a deadline nothing more is written to the targets.

        Args:
            block_hashes: (n, 2) uint64.
            targets: n buffers of `block_bytes`; those after the blocks that were loaded may have any content.
            timeout_s: deadline, None for none.

        Returns:
            how many leading blocks were loaded.

        Raises:
            TransferError: the disk failed.
            DeadlineExceeded: the disk did not answer in time.
            ValueError: a target has another size, or is read-only.
        """
        views = block_views(targets, self.block_bytes, writable=True)
        slots = self._index.pool.match(block_hashes[: len(views)])
        if not slots:
            return 0
        self._index.pool.acquire(slots)
        expected = self._index.data_sums(slots)
        gate, bad = Gate(), list[int]()

        def do(step: int, bounce: Bounce) -> None:
            if bad and min(bad) < step:
                return  # it would not be a leading block
            self._slots.read(slots[step], bounce.view[: self._slot_bytes])
            found = np.frombuffer(bounce.view, np.uint8, self.block_bytes)
            if crc32c(found) == expected[step]:
                gate.copy(views[step], found)
            else:
                bad.append(step)
                self._slots.clear(slots[step])

        def end() -> None:
            self._drop([slots[step] for step in bad])
            self._index.touch(slots)
            self._index.release_used(slots)

        job = self._begin(do, len(slots), end)
        try:
            await self._finish(job, timeout_s)
        except BaseException:
            gate.close()
            raise
        loaded = min(bad, default=len(slots))
        self.counts.loaded += loaded
        if self._index.num_touched >= _TOUCHED_MAX:
            self._write_touched()
        return loaded

    async def store(
        self,
        block_hashes: HashArray,
        sources: Buffers,
        *,
        parent: int | None = None,
        timeout_s: float | None = None,
        on_copied: Callable[[], None] | None = None,  # noqa: ARG002 - sources are written to the disk themselves
    ) -> int:
        """Store the blocks that are not held yet, in free slots or those of the least recently used blocks.

        Args:
            block_hashes: (n, 2) uint64, each block the child of the one before it.
            sources: n buffers of `block_bytes`. After a deadline or a cancellation the caller may change them at once: a
                block being written then fails its checksum and is never served.
            parent: low64 of the first block's parent, None at the root.
            timeout_s: deadline, None for none.
            on_copied: never called.

        Returns:
            how many leading blocks are held now.

        Raises:
            TransferError: the disk failed.
            DeadlineExceeded: the disk did not answer in time; what it was writing may be held later.
            ValueError: a source has another size.
        """
        views = block_views(sources, self.block_bytes, writable=False)
        hashes = np.ascontiguousarray(block_hashes[: len(views)], "<u8")
        found = self._index.find(hashes)
        held = [slot for slot in found if slot is not None]
        self._index.pool.acquire(held)
        new = [n for n, slot in enumerate(found) if slot is None and hashes[n].tobytes() not in self._storing]
        room = max(min(self._index.pool.num_available, self._storing_max - len(self._storing)), 0)
        self.counts.refused += len(new[room:])
        new = new[:room]
        slots = self._index.pool.allocate(len(new))
        assert slots is not None, "no more than are available"
        parents = np.concatenate([[np.uint64(parent or 0)], hashes[:-1, 0]])[new]
        gate = Gate()
        job = self._begin_writing(slots, hashes[new], parents, [views[n] for n in new], held, gate=gate)
        try:
            await self._finish(job, timeout_s)
        except BaseException:
            gate.close()
            raise
        return self.locate(hashes)

    def clear(self) -> None:
        """Forget all blocks until the file is opened again; their slots are free."""
        self._index.pool.reset()

    async def close(self) -> None:
        """Write which blocks were used last, and close the files. Waits at most `_CLOSE_S` for a hanging disk."""
        closed = asyncio.Event()

        def close() -> None:
            job = self._threads.start(lambda _step, _bounce: self._slots.close(), 1)
            self._threads.close()
            job.done.add_done_callback(lambda _: closed.set())

        self._write_touched()
        call_after(self._running, close)
        try:
            async with asyncio.timeout(_CLOSE_S):
                await closed.wait()
        except TimeoutError:
            get_logger().error("slot_file_hangs", path=str(self.path), waited_s=_CLOSE_S)

    def check(self) -> None:
        """Raise AssertionError if the index is inconsistent; nothing may be under way."""
        self._index.check()

    def _begin_writing(
        self,
        slots: list[BlockId],
        hashes: HashArray,
        parents: NDArray[np.uint64],
        views: list[Bytes],
        held: list[BlockId],
        *,
        gate: Gate,
    ) -> Job:
        """Write blocks into allocated slots; at the end these slots and the `held` ones are released.

        A block is not published if `gate` was closed before its checksum was computed, since its source may have changed.
        """
        rows = self._index.draft(slots, hashes, parents)
        rows["length"], rows["namespace"] = self.block_bytes, self._slots.namespace
        published = np.zeros(len(slots), np.bool_)
        keys = [row.tobytes() for row in hashes]
        self._storing.update(keys)

        def do(step: int, bounce: Bounce) -> None:
            view, data = views[step], views[step].data
            self._slots.clear(slots[step])  # before a deadline is looked at, as a disk may hang here
            if self.block_bytes % ALIGNMENT or view.ctypes.data % ALIGNMENT:
                copied = np.frombuffer(bounce.view, np.uint8, self.block_bytes)
                if not gate.copy(copied, view):
                    return
                rows["data_sum"][step] = crc32c(copied)
                data = bounce.view[: self._slot_bytes]
            else:
                rows["data_sum"][step] = crc32c(view)
                if gate.is_closed:
                    return
            self._slots.write(slots[step], data, rows[step : step + 1])
            published[step] = True

        def end() -> None:
            self._storing.difference_update(keys)
            self._index.publish(slots, rows, published)
            self.counts.stored += int(published.sum())
            self._index.touch(held)
            self._index.pool.release(held)
            self._index.release_used(slots)

        return self._begin(do, len(slots), end)

    def _write_touched(self) -> None:
        """Write the records of blocks that were used; they are referenced meanwhile, so none is evicted."""
        slots, rows = self._index.take_touched()

        def do(_step: int, _bounce: Bounce) -> None:
            for n, slot in enumerate(slots):
                self._slots.write_record(slot, rows[n : n + 1])

        self._begin(do, 1, lambda: self._index.pool.release(slots))

    def _begin(self, do: Callable[[int, Bounce], None], steps: int, end: Callable[[], None]) -> Job:
        """Run steps on the threads; `end` is called when no thread works on them, even if the caller has stopped waiting."""

        def worded(step: int, bounce: Bounce) -> None:
            try:
                do(step, bounce)
            except OSError as error:
                raise failure(self.path, "reading or writing", error) from error

        def ended(done: "asyncio.Future[None]") -> None:
            self._running.discard(done)
            end()

        job = self._threads.start(worded, steps)
        self._running.add(job.done)
        job.done.add_done_callback(ended)
        return job

    async def _finish(self, job: Job, timeout_s: float | None) -> None:
        try:
            await asyncio.wait([job.done], timeout=timeout_s)
        except asyncio.CancelledError:
            self._threads.stop(job)
            raise
        if not job.done.done():
            self._threads.stop(job)
            raise DeadlineExceeded(f"{self.path}: the disk did not answer within {timeout_s} s")
        if job.error is not None:
            raise job.error

    def _drop(self, slots: list[BlockId]) -> None:
        """Forget blocks that are damaged; the caller holds them."""
        if not slots:
            return
        self._index.drop(slots)
        self.counts.mismatched += len(slots)
        get_logger().warning(
            "slots_mismatched",
            path=str(self.path),
            slots=slots[:10],
            reason="the disk has other bytes than were written, or a write was cut short",
            effect="these blocks are computed again",
        )
