"""Memory that several processes of a host map: an unnamed file (memfd) that can neither shrink nor grow.

The seals are what makes it safe to map a peer's arena: nobody can cut it off afterwards, which would end everyone
who then touches it with SIGBUS.
"""

import contextlib
import ctypes
import errno
import fcntl
import mmap
import os
from types import TracebackType
from typing import Self
from weakref import WeakSet, finalize

import numpy as np
from numpy.typing import NDArray

from penstock.core.errors import TransferError, TransferRefused

_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
_MADV_HUGEPAGE = 14
_MADV_POPULATE_READ = 22
_MADV_POPULATE_WRITE = 23

_open: "WeakSet[Arena]" = WeakSet()


class Arena:
    """Shared memory. It is unmapped when it is closed and the last array over it is gone.

    Attributes:
        size_bytes: its size.
        address: of its first byte, here; another process has it elsewhere.
        array: (size_bytes,) uint8 over all of it.
    """

    def __init__(self, fd: int, size_bytes: int, *, writable: bool, prefault: bool) -> None:
        """Map what is known to be sealed and long enough, and own `fd`. Use `create` or `map`."""
        self.size_bytes = size_bytes
        access = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
        self._mapping = mmap.mmap(fd, size_bytes, mmap.MAP_SHARED, access)
        self.array: NDArray[np.uint8] = np.frombuffer(self._mapping, np.uint8)
        self.address: int = self.array.ctypes.data
        advise = ctypes.CDLL(None, use_errno=True).madvise
        whole = (ctypes.c_void_p(self.address), ctypes.c_size_t(size_bytes))
        advise(*whole, _MADV_HUGEPAGE)  # a wish; most hosts have no huge pages for shared memory
        if prefault and advise(*whole, _MADV_POPULATE_WRITE if writable else _MADV_POPULATE_READ):
            if (number := ctypes.get_errno()) != errno.EINVAL:
                raise OSError(number, os.strerror(number))
            pages = self.array[:: mmap.PAGESIZE]  # Linux before 5.14 cannot be asked to
            if writable:
                np.bitwise_or(pages, 0, out=pages)
            else:
                pages.max()
        self._fd = fd
        self._closing = finalize(self, os.close, fd)
        self._closing.atexit = False
        _open.add(self)

    @classmethod
    def create(cls, size_bytes: int, *, prefault: bool = True) -> Self:
        """Make an arena; it is all zeros.

        Args:
            size_bytes: at least 1.
            prefault: take all its memory now. Else the first touch of each page does, at about 0.25 s per GB,
                and a host without that memory ends the process then.

        Raises:
            ValueError: size_bytes < 1.
            TransferError: the host does not give so much.
        """
        if size_bytes < 1:
            raise ValueError(f"size_bytes: must be >= 1, got {size_bytes}")
        fd = os.memfd_create("penstock-arena", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(fd, size_bytes)
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
            return cls(fd, size_bytes, writable=True, prefault=prefault)
        except OSError as error:
            os.close(fd)
            raise TransferError(
                f"an arena of {size_bytes} bytes: {error.strerror}; make it smaller or free memory"
            ) from error
        except BaseException:
            os.close(fd)
            raise

    @classmethod
    def map(cls, fd: int, size_bytes: int, *, writable: bool = True, prefault: bool = True) -> Self:
        """Map an arena of another process.

        Args:
            fd: of its memory, as received; closed with the arena, and by a refusal.
            size_bytes: what its owner says.
            writable: False where it is only read; it may then be open for reading alone.
            prefault: see `create`.

        Raises:
            TransferRefused: it is no sealed memory of that size.
        """
        try:
            _expect_sealed(fd, size_bytes)
            return cls(fd, size_bytes, writable=writable, prefault=prefault)
        except OSError as error:
            os.close(fd)
            raise TransferRefused(f"an arena of {size_bytes} bytes cannot be mapped: {error}") from error
        except BaseException:
            os.close(fd)
            raise

    @staticmethod
    def around(address: int, size_bytes: int) -> "Arena | None":
        """Find the open arena of this process that this memory is part of, as of an array or tensor made in it."""
        for arena in _open:
            if arena.address <= address and address + size_bytes <= arena.address + arena.size_bytes:
                return arena
        return None

    @property
    def fd(self) -> int:
        """What another process needs to map it.

        Raises:
            TransferError: the arena is closed.
        """
        if not self._closing.alive:
            raise TransferError("the arena is closed")
        return self._fd

    def close(self) -> None:
        """Let go of the memory; arrays over it stay valid, and keep it, until they are gone. Safe twice."""
        if not self._closing.alive:
            return
        _open.discard(self)
        self._closing()
        self.array = np.empty(0, np.uint8)
        with contextlib.suppress(BufferError):  # somebody else's array keeps it
            self._mapping.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


def _expect_sealed(fd: int, size_bytes: int) -> None:
    try:
        seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        seals = 0
    if not seals & fcntl.F_SEAL_SHRINK:
        raise TransferRefused("a peer's arena is not sealed, so that it could shrink and end this process")
    actual = os.fstat(fd).st_size
    if size_bytes < 1 or actual < size_bytes:
        raise TransferRefused(f"a peer's arena has {actual} bytes where it was said to have {size_bytes}")
