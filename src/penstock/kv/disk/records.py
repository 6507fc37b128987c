"""The record file beside a slot file: one record per slot says which block the slot has. The records are the index.

The file begins with a page of 4,096 bytes: magic, checksum and length of a JSON header, the header, and at byte 3,072 the
owner's name. Then come records of 64 bytes. A record of zeros is a free slot. A record is trusted if its checksum, slot
number and namespace are right.
"""

import fcntl
import os
import socket
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import msgspec
import numpy as np
from numpy.typing import NDArray

from penstock.core.errors import ConfigError, TransferError, TransferRefused
from penstock.core.log import get_logger
from penstock.core.wire import Wire
from penstock.kv.buffers import crc32c
from penstock.kv.namespace import Namespace
from penstock.kv.records import RECORD, Records, are_trusted, seal

SUFFIX = ".records"
VERSION = 1
_PAGE_BYTES = 4096
_OWNER_OFFSET, _OWNER_BYTES = 3072, 256
_MAGIC = b"pstkslot"
_HEAD = struct.Struct("<8sII")  # magic, CRC-32C of the JSON, its length
_READ_BYTES = 16 << 20
_FREE = bytes(RECORD.itemsize)


class Disk(Protocol):
    """The system calls that read and write, as in module `os`; tests replace them."""

    def preadv(self, fd: int, buffers: Sequence[memoryview], offset: int, /) -> int: ...

    def pwritev(self, fd: int, buffers: Sequence[memoryview], offset: int, /) -> int: ...


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

    def __init__(self, path: Path, block_bytes: int, namespace: Namespace, disk: Disk) -> None:
        """Open and lock the file, or create it.

        Raises:
            TransferRefused: another process has it open.
            ConfigError: it holds blocks of another kind, or is no record file.
            OSError: the disk failed.
        """
        self.path = path
        self.is_new = False
        self._disk = disk
        self._namespace = namespace
        self.namespace = np.frombuffer(namespace.digest, "<u8")
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
            owner = os.pread(self._fd, _OWNER_BYTES, _OWNER_OFFSET).rstrip(b"\0").decode(errors="replace")
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
        owner = f"process {os.getpid()} on {socket.gethostname()}".encode()[:_OWNER_BYTES]
        self._put(owner.ljust(_OWNER_BYTES, b"\0"), _OWNER_OFFSET)

    def _begin(self) -> None:
        os.ftruncate(self._fd, 0)
        header = msgspec.json.encode(self._header())
        self._put(_HEAD.pack(_MAGIC, crc32c(np.frombuffer(header, np.uint8)), len(header)) + header, 0)
        os.fsync(self._fd)  # before there is data, which without a header is anybody's

    def _header(self) -> _Header:
        described = self._namespace.text[: _OWNER_OFFSET // 4]
        digest = self._namespace.digest.hex()
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
