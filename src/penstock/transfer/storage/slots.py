"""The format of a slot file: blocks of one size in the slots of a file, and a record of each beside it.

The record file begins with a page of 4,096 bytes: magic, checksum and length of a JSON header, the header, and at byte 3,072
the owner's name. Then come records of 64 bytes, one for each slot. A record of zeros is a free slot. A record is trusted if its
own checksum fits, and it names this slot, namespace and length. Host memory has the same records.

To write a slot its record is cleared, the data written, then the new record written. A slot is only read if its bytes match the
checksum in its record. So nothing has to be synced: after a power cut slots may be missing, but none is wrong.
"""

import contextlib
import errno
import fcntl
import os
import socket
import stat
import struct
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

import msgspec
import numpy as np
from numpy.typing import NDArray

from penstock.core.errors import ConfigError, TransferError, TransferRefused
from penstock.core.log import get_logger
from penstock.core.wire import Wire
from penstock.transfer.regions.checksum import Sums, checksum_ranges, crc32c
from penstock.transfer.storage.io_threads import Bounce

ALIGNMENT = 4096
"""Of slots, and of memory for O_DIRECT."""
_SECTOR_BYTES = 512  # of st_blocks
SUFFIX = ".records"
VERSION = 1
_PAGE_BYTES = 4096
_OWNER_OFFSET, _OWNER_BYTES = 3072, 256
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_BOOT_BYTES = 16  # of the owner's name, the last ones
_MAGIC = b"pstkslot"
_HEAD = struct.Struct("<8sII")  # magic, CRC-32C of the JSON, its length
_READ_BYTES = 16 << 20
RECORD = np.dtype(
    [
        ("hash", "<u8", 2),
        ("namespace", "<u8", 2),
        ("generation", "<u8"),  # higher: later
        ("parent", "<u8"),  # low64 of the block before; 0: none
        ("length", "<u4"),  # bytes of data
        ("data_sum", "<u4"),  # CRC-32C of the data
        ("slot", "<u4"),  # number of this slot + 1
        ("sum", "<u4"),  # CRC-32C of what stands before
    ]
)
Records = NDArray[np.void]
_GENERATION_MAX = 1 << 62
"""Writers count up from the highest generation that they find; one beyond this was never written."""
_FREE = bytes(RECORD.itemsize)


class Disk(Protocol):
    """The system calls that read and write, as in module `os`; tests replace them."""

    def preadv(self, fd: int, buffers: Sequence[memoryview], offset: int, /) -> int: ...

    def pwritev(self, fd: int, buffers: Sequence[memoryview], offset: int, /) -> int: ...

    def fdatasync(self, fd: int, /) -> None: ...


class Slots:
    """An open slot file: the data file and the record file beside it. Several threads may use different slots.

    Attributes:
        path: of the data; records are in a second file, `path` + ".records".
        num_slots: slots of the file.
        slot_bytes: bytes of one slot: a block, up to the next multiple of `ALIGNMENT`.
        namespace: (2,) uint64, as records name it.
        records: (num_slots,) of what the slots held when the file was opened; zeros where the record is not trusted.
        is_on_disk: (num_slots,) bool, whether the record file has a record that is not zero.
    """

    def __init__(
        self,
        path: Path,
        block_bytes: int,
        num_slots: int,
        namespace: bytes,
        described: str,
        *,
        disk: Disk = os,
        trusts_crashes: bool = True,
    ) -> None:
        """Open and lock the file, or create it, and reserve its space; blocks as long as the disk does.

        Args:
            path: of the data, in an existing directory. A file of another size is extended or cut.
            block_bytes: bytes of one block.
            num_slots: slots of the file.
            namespace: 16 bytes; a file of another namespace is refused.
            described: says the namespace in words.
            disk: the system calls that read and write.
            trusts_crashes: keep what a machine that went down had in an open file. After a power cut a slot may have its former
                block again, with the record of that block: an owner that looks blocks up by their hash can take it.

        Raises:
            TransferRefused: another process has it open.
            ConfigError: it holds blocks of another namespace or size, or there is not enough space.
            OSError: the disk failed.
        """
        self.path = path
        self.num_slots = num_slots
        self.slot_bytes = slot_bytes_of(block_bytes)
        self._disk = disk
        records_path = path.with_name(path.name + SUFFIX)
        self._record_file = RecordFile(
            records_path, block_bytes, namespace, described, disk=disk, trusts_crashes=trusts_crashes
        )
        self.namespace = self._record_file.namespace
        try:
            may_exist = not self._record_file.is_new
            self._data = DataFile(path, self.slot_bytes, num_slots, may_exist=may_exist, disk=disk)
            self.records, trusted, self.is_on_disk = self._record_file.read(num_slots)
        except BaseException:
            self._record_file.close()
            raise
        trusted[self._data.slots_before :] = False
        self.records[~trusted] = 0

    @property
    def is_direct(self) -> bool:
        """Whether it is read and written with O_DIRECT."""
        return self._data.is_direct

    def read(self, slot: int, view: memoryview) -> None:
        """Read the `slot_bytes` of a slot, whatever it holds; into memory that is aligned if the file is direct.

        Raises:
            OSError: the disk failed.
        """
        self._data.read(slot, view)

    def write_data(self, slot: int, view: memoryview) -> None:
        """Write the bytes of a free slot without a record, to measure the disk.

        Raises:
            OSError: the disk failed.
        """
        self._data.write(slot, view)

    def write(self, slot: int, view: memoryview, record: Records) -> None:
        """Write a slot.

        Args:
            slot: nobody reads it meanwhile.
            view: `slot_bytes`, aligned if the file is direct.
            record: (1,) of the block; it is sealed here.

        Raises:
            OSError: the disk failed; the slot is free, or holds bytes that do not fit its record.
        """
        self.clear(slot)
        self.is_on_disk[slot] = True
        self._data.write(slot, view)
        self._record_file.write(slot, record)

    def write_record(self, slot: int, record: Records) -> None:
        """Seal and write the (1,) record of a slot whose data stays.

        Raises:
            OSError: the disk failed.
        """
        self._record_file.write(slot, record)

    def clear(self, slot: int) -> None:
        """Make a slot free, if it has a record.

        Raises:
            OSError: the disk failed.
        """
        if self.is_on_disk[slot]:
            self._record_file.clear(slot)
            self.is_on_disk[slot] = False

    def close(self, *, is_flushed: bool = False) -> None:
        """Close both files.

        Args:
            is_flushed: flush the data first, so that what is written outlives a power cut without `trusts_crashes`.
        """
        try:
            if is_flushed:
                self._data.flush()
                self._record_file.disown()
        finally:
            try:
                self._data.close()
            finally:
                self._record_file.close()


def slot_bytes_of(block_bytes: int) -> int:
    """Compute the bytes of a slot for blocks of `block_bytes`."""
    return -(-block_bytes // ALIGNMENT) * ALIGNMENT


class _Header(Wire, frozen=True):
    version: int
    block_bytes: int
    namespace: str
    described: str


class RecordFile:
    """The open and locked file. Methods block; several threads may call them for different slots.

    Attributes:
        path: of the file.
        namespace: (2,) uint64, as records name it.
        is_new: whether it was created.
    """

    def __init__(
        self,
        path: Path,
        block_bytes: int,
        namespace: bytes,
        described: str,
        *,
        disk: Disk,
        trusts_crashes: bool,
    ) -> None:
        """Open and lock the file, or create it; arguments as in `Slots`.

        Raises:
            TransferRefused: another process has it open.
            ConfigError: it holds blocks of another kind, or is no record file.
            OSError: the disk failed.
        """
        self.path = path
        self.is_new = False
        self._boot = _this_boot()
        self._disk = disk
        self._described = described
        self._trusts_crashes = trusts_crashes
        self.namespace = np.frombuffer(namespace, "<u8")
        self._block_bytes = block_bytes
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            self._lock()
            self._open()
        except BaseException:
            os.close(self._fd)
            raise

    def read(self, num_slots: int) -> tuple[Records, NDArray[np.bool_], NDArray[np.bool_]]:
        """Read all records, and make the file as long as so many slots need.

        Returns:
            (num_slots,) records, which the caller may change; (num_slots,) bool, trusted; (num_slots,) bool, not all zeros.

        Raises:
            OSError: the disk failed.
        """
        os.posix_fallocate(self._fd, 0, _PAGE_BYTES + num_slots * RECORD.itemsize)
        os.ftruncate(self._fd, _PAGE_BYTES + num_slots * RECORD.itemsize)
        records = np.zeros(num_slots, RECORD)
        view = records.view(np.uint8).data
        at = 0
        while at < len(view):
            done = self._disk.preadv(self._fd, [view[at : at + _READ_BYTES]], _PAGE_BYTES + at)
            if done == 0:
                raise OSError(5, "the records end early")
            at += done
        used = np.logical_or.reduce(records.view("<u8").reshape(num_slots, -1) != 0, axis=1)
        numbers = np.flatnonzero(used)
        some = records[numbers]
        fits = are_trusted(some, numbers, self.namespace, self._block_bytes)
        trusted = np.zeros(num_slots, np.bool_)
        trusted[numbers[fits]] = True
        return records, trusted, used

    def write(self, slot: int, record: Records) -> None:
        """Seal and write the (1,) record of a slot.

        Raises:
            OSError: the disk failed.
        """
        seal(record)
        self._write(record.tobytes(), slot)

    def clear(self, slot: int) -> None:
        """Make a slot free.

        Raises:
            OSError: the disk failed.
        """
        self._write(_FREE, slot)

    def close(self) -> None:
        os.close(self._fd)

    def _write(self, data: bytes, slot: int) -> None:
        self._put(data, _PAGE_BYTES + slot * RECORD.itemsize)

    def _put(self, data: bytes, offset: int) -> None:
        done = self._disk.pwritev(self._fd, [memoryview(data)], offset)
        if done != len(data):
            raise OSError(28, f"{done} of {len(data)} bytes were written")

    def _lock(self) -> None:
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            name = os.pread(self._fd, _OWNER_BYTES - _BOOT_BYTES, _OWNER_OFFSET)
            owner = name.rstrip(b"\0").decode(errors="replace")
            raise TransferRefused(
                f"{self.path} is open in {owner or 'another process'}; only one process may open a slot file: give each"
                " deployment a directory of its own, or end that process"
            ) from error

    def _open(self) -> None:
        page = os.pread(self._fd, _PAGE_BYTES, 0)
        if not page.rstrip(b"\0"):  # new, or its creation was cut short
            self.is_new = True
            self._begin()
        elif not page.startswith(_MAGIC):
            raise ConfigError(
                f"{self.path} was not written by this program; name another slot file, or delete it if nobody needs it"
            )
        elif (header := _parse(page)) is None:
            get_logger().warning(
                "slot_file_forgotten",
                path=str(self.path),
                reason="its header is damaged",
                effect="it is empty now",
            )
            self._begin()
        else:
            self._expect(header)
            self._distrust(page[_OWNER_OFFSET : _OWNER_OFFSET + _OWNER_BYTES])
        owner = f"process {os.getpid()} on {socket.gethostname()}".encode()[: _OWNER_BYTES - _BOOT_BYTES]
        self._put(owner.ljust(_OWNER_BYTES - _BOOT_BYTES, b"\0") + self._boot, _OWNER_OFFSET)

    def _distrust(self, owner: bytes) -> None:
        """Forget all records if the machine went down while an owner had the file open, and its slots cannot be trusted then."""
        if self._trusts_crashes or not any(owner) or owner[-_BOOT_BYTES:] == self._boot:
            return
        os.ftruncate(self._fd, _PAGE_BYTES)
        get_logger().warning(
            "slot_file_forgotten",
            path=str(self.path),
            reason="the machine went down while it was open",
            effect="it is empty now",
        )

    def disown(self) -> None:
        """Note that the file was closed with its data on the disk.

        Raises:
            OSError: the disk failed.
        """
        os.fdatasync(self._fd)
        self._put(bytes(_OWNER_BYTES), _OWNER_OFFSET)

    def _begin(self) -> None:
        os.ftruncate(self._fd, 0)
        header = msgspec.json.encode(self._header())
        self._put(_HEAD.pack(_MAGIC, crc32c(np.frombuffer(header, np.uint8)), len(header)) + header, 0)
        os.fsync(self._fd)  # before there is data, which without a header is anybody's

    def _header(self) -> _Header:
        described = self._described[: _OWNER_OFFSET // 4]
        digest = self.namespace.tobytes().hex()
        return _Header(version=VERSION, block_bytes=self._block_bytes, namespace=digest, described=described)

    def _expect(self, header: _Header) -> None:
        own = self._header()
        for what, theirs, ours in (
            ("version", header.version, own.version),
            ("namespace", header.namespace, own.namespace),
            ("block_bytes", header.block_bytes, own.block_bytes),
        ):
            if theirs != ours:
                said = f"{theirs}, {header.described}" if what == "namespace" else theirs
                needed = f"{ours}, {own.described}" if what == "namespace" else ours
                raise ConfigError(
                    f"{self.path} holds blocks of {what} {said}, and not {needed}; name another slot file, or delete this one"
                    " with the file beside it"
                )


class DataFile:
    """The open data file of all slots. Methods block; several threads may call them.

    Attributes:
        path: of the file.
        slots_before: slots that the file had when it was opened.
        is_direct: whether it has O_DIRECT.
    """

    def __init__(self, path: Path, slot_bytes: int, num_slots: int, *, may_exist: bool, disk: Disk) -> None:
        """Open the file and reserve its space, which may take seconds.

        Raises:
            ConfigError: there is not enough space, or the path is another kind of file.
            OSError: the disk failed.
        """
        self.path = path
        self._slot_bytes = slot_bytes
        self._disk = disk
        with contextlib.ExitStack() as undo:
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            undo.callback(os.close, fd)
            status = os.fstat(fd)
            if not stat.S_ISREG(status.st_mode) or (status.st_size and not may_exist):
                raise ConfigError(
                    f"{path} exists without a record file beside it, so it is no slot file; name another file, or delete it if nobody"
                    " needs it"
                )
            self.slots_before = status.st_size // slot_bytes
            self._reserve(fd, slot_bytes * num_slots, status)
            self._fd, self.is_direct = self._open_direct(fd)
        if not self.is_direct:
            get_logger().warning(
                "slot_file_buffered",
                path=str(path),
                effect="the kernel's page cache keeps a second copy of each block",
                fix="put it on a file system that has O_DIRECT, such as ext4 or xfs",
            )

    def read(self, slot: int, view: memoryview) -> None:
        """Read a slot.

        Raises:
            OSError: the disk failed.
        """
        self._move(self._disk.preadv, slot, view)

    def write(self, slot: int, view: memoryview) -> None:
        """Write a slot.

        Raises:
            OSError: the disk failed.
        """
        self._move(self._disk.pwritev, slot, view)

    def flush(self) -> None:
        """Wait until all that was written is on the disk.

        Raises:
            OSError: the disk failed.
        """
        self._disk.fdatasync(self._fd)

    def close(self) -> None:
        os.close(self._fd)

    def _move(
        self, move: Callable[[int, Sequence[memoryview], int], int], slot: int, view: memoryview
    ) -> None:
        offset = slot * self._slot_bytes
        while len(view):
            done = move(self._fd, [view], offset)
            done -= done % ALIGNMENT  # O_DIRECT continues only at a multiple of the alignment
            if done == 0:
                raise OSError(errno.EIO, f"no byte was read or written at {offset}; was the file truncated?")
            view, offset = view[done:], offset + done

    def _reserve(self, fd: int, size_bytes: int, before: os.stat_result) -> None:
        disk = os.statvfs(self.path.parent)
        free_bytes = disk.f_bavail * disk.f_frsize
        no_space = ConfigError(
            f"{self.path}: no space for {size_bytes} bytes, {free_bytes} are free: make room, or give a smaller size_bytes"
        )
        if size_bytes - before.st_blocks * _SECTOR_BYTES > free_bytes:
            raise no_space
        try:
            os.posix_fallocate(fd, 0, size_bytes)
            os.ftruncate(fd, size_bytes)
        except OSError as error:
            if error.errno in {errno.ENOSPC, errno.EDQUOT}:
                os.ftruncate(fd, before.st_size)
                raise no_space from error
            raise

    def _open_direct(self, fd: int) -> tuple[int, bool]:
        """Open the file again, with O_DIRECT if possible: (descriptor, whether it has O_DIRECT)."""
        again = f"/proc/self/fd/{fd}"
        direct = -1
        try:
            direct = os.open(again, os.O_RDWR | os.O_CLOEXEC | os.O_DIRECT)
            self._disk.preadv(direct, [Bounce(ALIGNMENT).view], 0)
        except OSError as error:
            if direct >= 0:
                os.close(direct)
            if error.errno not in {errno.EINVAL, errno.EOPNOTSUPP}:
                raise
            return os.open(again, os.O_RDWR | os.O_CLOEXEC), False
        return direct, True


def seal(records: Records) -> None:
    """Write the checksum into each of (n,) contiguous records."""
    records["sum"] = _sums(records)


def are_trusted(
    records: Records, slots: NDArray[np.intp], namespace: NDArray[np.uint64], length: int
) -> NDArray[np.bool_]:
    """Say which records can be trusted.

    Args:
        records: (n,) contiguous.
        slots: (n,) the slot that each was read from.
        namespace: (2,) uint64, of the reader.
        length: bytes of a block.

    Returns:
        (n,) bool.
    """
    fits: NDArray[np.bool_] = records["slot"] == slots + 1
    fits &= (records["namespace"] == namespace).all(axis=1)
    fits &= records["length"] == length
    fits &= records["generation"] < _GENERATION_MAX
    fits &= records["sum"] == _sums(records)
    return fits


def _sums(records: Records) -> Sums:
    first = records.ctypes.data
    addresses = np.arange(len(records), dtype=np.uint64) * np.uint64(RECORD.itemsize) + np.uint64(first)
    return checksum_ranges(addresses, np.full(len(records), RECORD.itemsize - 4, np.uint64))


def failure(path: Path, doing: str, error: OSError) -> TransferError:
    """Make the error of a failed system call."""
    reason = (error.strerror or str(error)).lower()
    return TransferError(f"{path}: {doing} failed: {reason} (errno {error.errno})")


def _parse(page: bytes) -> _Header | None:
    """Read the header; None if it is damaged."""
    if len(page) < _HEAD.size:
        return None
    _, expected, length = _HEAD.unpack_from(page)
    text = page[_HEAD.size : _HEAD.size + length]
    if (
        not 0 < length <= _OWNER_OFFSET - _HEAD.size
        or len(text) < length
        or crc32c(np.frombuffer(text, np.uint8)) != expected
    ):
        return None
    try:
        return msgspec.json.decode(text, type=_Header)
    except msgspec.DecodeError:
        return None


def _this_boot() -> bytes:
    """Give 16 bytes that name this boot of the machine; random ones if the kernel names none."""
    try:
        return bytes.fromhex(_BOOT_ID.read_text().strip().replace("-", ""))
    except OSError:
        return os.urandom(_BOOT_BYTES)
