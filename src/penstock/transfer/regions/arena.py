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
from collections.abc import Callable
from types import TracebackType
from typing import Self
from weakref import WeakSet, finalize

import numpy as np
from numpy.typing import NDArray

from penstock.core.errors import TransferError, TransferRefused

_SIZE_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW
_SEAL_FUTURE_WRITE = 0x10
"""Linux 5.1: nobody can write it any more but through mappings that there are already."""
_OWN_MODE = 0o600
_MADV_HUGEPAGE = 14
_MADV_POPULATE_READ = 22
"""It maps shared pages for writing, too, and for half of what MADV_POPULATE_WRITE takes (measured, Linux 6.18)."""
_TOUCHED_BYTES = 8 << 20
"""In one call, for 1 to 3 ms: threads that want to map something wait meanwhile."""

_open: "WeakSet[Arena]" = WeakSet()


class Arena:
    """Shared memory. It is unmapped when it is closed and the last array over it is gone.

    The first region of it that is registered decides whether peers may ever write it: `share`.

    Attributes:
        size_bytes: its size.
        address: of its first byte, here; another process has it elsewhere.
        array: (size_bytes,) uint8 over all of it.
        is_resident: whether all of its memory was taken when it was made.
    """

    def __init__(self, fd: int, size_bytes: int, *, writable: bool) -> None:
        """Map what is known to be sealed and long enough, and own `fd`. Use `create` or `map`."""
        self.size_bytes = size_bytes
        self.is_resident = False
        self._peers_write: bool | None = None
        access = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
        self._mapping = mmap.mmap(fd, size_bytes, mmap.MAP_SHARED, access)
        self.array: NDArray[np.uint8] = np.frombuffer(self._mapping, np.uint8)
        self.address: int = self.array.ctypes.data
        _advise(self.array, _MADV_HUGEPAGE)  # a wish; most hosts have no huge pages for shared memory
        self._fd = fd
        self._closing = finalize(self, os.close, fd)
        self._closing.atexit = False
        _open.add(self)

    @classmethod
    def create(
        cls, size_bytes: int, *, prefault: bool = True, before_taking: Callable[[int], object] | None = None
    ) -> Self:
        """Make an arena; it is all zeros.

        Args:
            size_bytes: at least 1.
            prefault: take all its memory now. Else the first touch of each page does, and a host without that
                memory ends the process then.
            before_taking: called again and again while memory is taken, with the bytes that are still lacking; what it
                raises ends it. A host that has too little ends a process instead of refusing.

        Raises:
            ValueError: size_bytes < 1.
            TransferError: the host does not give so much.
        """
        if size_bytes < 1:
            raise ValueError(f"size_bytes: must be >= 1, got {size_bytes}")
        fd = os.memfd_create("penstock-arena", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(fd, size_bytes)
            os.fchmod(fd, _OWN_MODE)  # by its descriptor's path others could open it again, for writing too
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SIZE_SEALS)
            arena = cls(fd, size_bytes, writable=True)
        except OSError as error:
            os.close(fd)
            raise _too_large(size_bytes, error) from error
        if prefault:
            try:
                arena.touch(before_taking)
            except OSError as error:
                arena.close()
                raise _too_large(size_bytes, error) from error
            except BaseException:
                arena.close()
                raise
            arena.is_resident = True
        return arena

    @classmethod
    def map(cls, fd: int, size_bytes: int, *, writable: bool = True) -> Self:
        """Map an arena of another process. Its pages are looked up at first touch, or by `touch`.

        Args:
            fd: of its memory, as received; closed with the arena, and by a refusal.
            size_bytes: what its owner says.
            writable: False where it is only read; it may then be open for reading alone.

        Raises:
            TransferRefused: it is no sealed memory of that size.
        """
        try:
            expect_sealed(fd, size_bytes)
            return cls(fd, size_bytes, writable=writable)
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

    def touch(self, before: Callable[[int], object] | None = None) -> None:
        """Look up all pages now, for a fifth of what their first touch takes, one by one. On any thread; ends when closed.

        Args:
            before: called before each part, with the bytes that are left.

        Raises:
            OSError: the host does not have that much memory.
        """
        whole = self.array  # keeps the mapping
        for start in range(0, whole.size, _TOUCHED_BYTES):
            if not self._closing.alive:
                return
            if before is not None:
                before(whole.size - start)
            part = whole[start : start + _TOUCHED_BYTES]
            number = _advise(part, _MADV_POPULATE_READ)
            if number == errno.EINVAL:
                part[:: mmap.PAGESIZE].max()  # Linux before 5.14 cannot be asked to
            elif number:
                raise OSError(number, os.strerror(number))

    def share(self, *, peers_write: bool) -> bool:
        """Settle whether other processes may write it, with the first call, for good: the kernel keeps it so.

        Returns:
            whether this region of it can be shared: not one that peers may write where that was settled otherwise.

        Raises:
            TransferError: the arena is closed.
        """
        if self._peers_write is None:
            self._peers_write = peers_write
            if not peers_write:
                with contextlib.suppress(
                    OSError
                ):  # an older kernel: its descriptors are open for reading, at least
                    fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, _SEAL_FUTURE_WRITE)
            fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SEAL)
        return self._peers_write or not peers_write

    def open(self, *, writable: bool) -> int:
        """Open it once more, for a peer to map; the caller closes the descriptor.

        Raises:
            OSError: the process has too many open files.
            TransferError: the arena is closed.
        """
        access = os.O_RDWR if writable else os.O_RDONLY
        return os.open(f"/proc/self/fd/{self.fd}", access | os.O_CLOEXEC)

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


def _advise(part: NDArray[np.uint8], advice: int) -> int:
    """Call madvise for an array that begins at a page; returns errno."""
    madvise = ctypes.CDLL(None, use_errno=True).madvise
    failed = madvise(ctypes.c_void_p(part.ctypes.data), ctypes.c_size_t(part.size), advice)
    return ctypes.get_errno() if failed else 0


def _too_large(size_bytes: int, error: OSError) -> TransferError:
    return TransferError(f"an arena of {size_bytes} bytes: {error.strerror}; make it smaller or free memory")


def expect_sealed(fd: int, size_bytes: int) -> None:
    """Check that a descriptor is of memory that can be mapped without harm.

    Raises:
        TransferRefused: it is no sealed memory of that size.
    """
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
