"""The checksums of a slab, in a file beside it.

The file is not mapped, since SIGBUS would end the process when it is truncated or the disk fails. A block's checksum is
recorded after its data, so a process that dies in between leaves a block that does not match its checksum. The kernel's cache
keeps both. After a power cut, data and checksum of a block may both be from before the last write and fit each other. So the
file names the boot of the machine that opened it, and a slab that was not closed in an earlier boot is forgotten.
"""

import os
import struct
import zlib
from enum import IntEnum
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from penstock.core.errors import TransferError
from penstock.transfer.regions.checksum import Sums
from penstock.transfer.storage.block_sums import BLOCK_BYTES, NOT_RECORDED

_MAGIC = b"pstkcrc1"
_HEADER = struct.Struct("<8sIIQ16s")  # magic, block, state, size of the slab, boot
_CHECK = struct.Struct("<I")
_TABLE_OFFSET = 4096
_SUM = np.dtype("<u4")
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


class _State(IntEnum):
    CREATING = 0
    OPEN = 1
    CLOSED = 2


class SlabSums:
    """One CRC-32C per block of a slab. Several threads may call its methods for different blocks.

    Attributes:
        path: of the file.
        is_new: whether the creation of the slab is not complete, so that its file may have any size.
        has_forgotten: whether the machine went down while the slab was open, so that all checksums are discarded.
    """

    def __init__(self, path: Path, slab_bytes: int, *, slab_is_empty: bool) -> None:
        """Open the checksums of a locked slab, or create them.

        Args:
            path: of the file.
            slab_bytes: the slab's size.
            slab_is_empty: whether the slab has no bytes yet; older checksums are discarded.

        Raises:
            TransferError: the slab is not empty and has no checksums, or checksums of another size, or damaged ones.
            OSError: the file cannot be opened, or there is no space.
        """
        self.path = path
        self.has_forgotten = False
        self._slab_bytes = slab_bytes
        self._boot_id = _this_boot()
        create = os.O_CREAT if slab_is_empty else 0
        try:
            self._fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | create, 0o600)
        except FileNotFoundError as error:
            raise TransferError(
                f"{path.with_suffix('')} exists and is no slab: there are no checksums in {path}; name another file, or"
                " delete it if nobody needs it"
            ) from error
        try:
            self.is_new = slab_is_empty
            if not slab_is_empty:
                self._read_header()
            if self.is_new or self.has_forgotten:
                self._forget_all()
            length = _TABLE_OFFSET + slab_bytes // BLOCK_BYTES * 4
            os.posix_fallocate(self._fd, 0, length)  # so that no record fails for want of space
            self._write_header(_State.CREATING if self.is_new else _State.OPEN)
        except BaseException:
            os.close(self._fd)
            raise

    def set_ready(self) -> None:
        """Record that the slab is complete."""
        self._write_header(_State.OPEN)

    def record(self, first_block: int, sums: Sums) -> None:
        """Record the checksums of written blocks from `first_block` on.

        Raises:
            TransferError: the disk failed.
        """
        data = sums.astype(_SUM, copy=False).tobytes()
        offset = _TABLE_OFFSET + first_block * _SUM.itemsize
        try:
            while len(data):
                done = os.pwrite(self._fd, data, offset)
                data, offset = data[done:], offset + done
        except OSError as error:
            raise self._failure("writing", error) from error

    def recorded(self, block: int) -> bool:
        """Say whether a block was ever written.

        Raises:
            TransferError: the disk failed.
        """
        return bool(self._read(block, 1)[0] != NOT_RECORDED)

    def mismatches(self, first_block: int, sums: Sums) -> NDArray[np.intp]:
        """Find the blocks from `first_block` on with another checksum: (n,) indices into `sums`.

        Raises:
            TransferError: the disk failed.
        """
        return np.flatnonzero(self._read(first_block, len(sums)) != sums)

    def close(self, *, is_durable: bool) -> None:
        """Close the file.

        Args:
            is_durable: whether the slab's data is on the disk, safe from a power cut. If not, the next boot of the machine
                discards all checksums.
        """
        try:
            if is_durable:
                os.fdatasync(self._fd)
                self._write_header(_State.CLOSED)
        finally:
            os.close(self._fd)

    def _read(self, first_block: int, count: int) -> Sums:
        """Read checksums; blocks beyond the end of the file have none."""
        size, offset = count * _SUM.itemsize, _TABLE_OFFSET + first_block * _SUM.itemsize
        data = b""
        try:
            while len(data) < size and (more := os.pread(self._fd, size - len(data), offset + len(data))):
                data += more
        except OSError as error:
            raise self._failure("reading", error) from error
        found: Sums = np.full(count, NOT_RECORDED, _SUM)
        there = len(data) // _SUM.itemsize
        found[:there] = np.frombuffer(data, _SUM, there)
        return found

    def _failure(self, doing: str, error: OSError) -> TransferError:
        return TransferError(f"{self.path}: {doing} checksums failed: {error.strerror} (errno {error.errno})")

    def _read_header(self) -> None:
        raw = os.pread(self._fd, _HEADER.size + _CHECK.size, 0)
        packed, check = raw[: _HEADER.size], raw[_HEADER.size :]
        magic, block_bytes, state, slab_bytes, boot_id = (
            _HEADER.unpack(packed) if len(packed) == _HEADER.size else (b"", 0, 0, 0, b"")
        )
        if magic != _MAGIC or check != _CHECK.pack(zlib.crc32(packed)):
            raise TransferError(
                f"{self.path} is damaged, or of another version; delete it and the slab beside it to start afresh"
            )
        if (slab_bytes, block_bytes) != (self._slab_bytes, BLOCK_BYTES):
            raise TransferError(
                f"{self.path} is of a slab of {slab_bytes} bytes in blocks of {block_bytes}, and not of"
                f" {self._slab_bytes} in blocks of {BLOCK_BYTES}; give that size, or delete both files"
            )
        self.is_new = state == _State.CREATING
        self.has_forgotten = state == _State.OPEN and boot_id != self._boot_id

    def _forget_all(self) -> None:
        self._write_header(_State.CREATING)
        os.ftruncate(self._fd, _TABLE_OFFSET)  # what follows reads as zeros once it is as long as before

    def _write_header(self, state: _State) -> None:
        packed = _HEADER.pack(_MAGIC, BLOCK_BYTES, state, self._slab_bytes, self._boot_id)
        os.pwrite(self._fd, packed + _CHECK.pack(zlib.crc32(packed)), 0)
        os.fdatasync(self._fd)


def _this_boot() -> bytes:
    """Give the boot id of this machine, 16 bytes; random bytes if the kernel has none."""
    try:
        return bytes.fromhex(_BOOT_ID.read_text().strip().replace("-", ""))
    except OSError:
        return os.urandom(16)
