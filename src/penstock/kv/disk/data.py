"""The data of a slot file: slots of one size, each read and written whole, with O_DIRECT if the file system has it."""

import contextlib
import errno
import os
import stat
from collections.abc import Callable, Sequence
from pathlib import Path

from penstock.core.errors import ConfigError
from penstock.core.log import get_logger
from penstock.kv.disk.records import Disk
from penstock.transfer.storage.io_threads import Bounce

ALIGNMENT = 4096
"""Of slots, and of memory for O_DIRECT."""
_SECTOR_BYTES = 512  # of st_blocks


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
