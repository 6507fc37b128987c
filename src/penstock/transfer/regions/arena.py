"""Shared memory of several processes of a host: an unnamed file (memfd) of a fixed size.

Seals fix the size. Without them a peer could shrink the file, and SIGBUS would end every process that has mapped it.
"""

import contextlib
import ctypes
import errno
import fcntl
import mmap
import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any, Self
from weakref import WeakSet, finalize

import numpy as np
from numpy.typing import NDArray

from penstock.core.descriptors import MemoryKind, Region
from penstock.core.errors import TransferError, TransferRefused

_SIZE_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW
_SEAL_FUTURE_WRITE = 0x10
"""Linux 5.1: only mappings that exist already can write the memory from then on."""
_OWN_MODE = 0o600
_MADV_HUGEPAGE = 14
_MADV_POPULATE_READ = 22
"""Maps shared pages for writing too, in half the time of MADV_POPULATE_WRITE (measured, Linux 6.18)."""
_TOUCHED_BYTES = 8 << 20
"""Bytes of one madvise call, which takes 1 to 3 ms; other threads cannot map memory meanwhile."""

_open: "WeakSet[Arena]" = WeakSet()


class Arena:
    """Shared memory, unmapped once it is closed and the last array over it is gone.

    The first registration of a region decides whether peers may ever write the arena (`share`).

    Attributes:
        size_bytes: its size.
        address: of its first byte in this process.
        array: (size_bytes,) uint8 over all of it.
        is_resident: whether all its pages were allocated at creation.
    """

    def __init__(self, fd: int, size_bytes: int, *, writable: bool, offset_bytes: int = 0) -> None:
        """Map a checked descriptor and take ownership of it. Use `create` or `map`."""
        self.size_bytes = size_bytes
        self.is_resident = False
        self._peers_write: bool | None = None
        access = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
        self._mapping = mmap.mmap(fd, size_bytes, mmap.MAP_SHARED, access, offset=offset_bytes)
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
        """Create an arena of zeros.

        Args:
            size_bytes: at least 1.
            prefault: allocate all pages now. Otherwise the first access allocates each page, and a host without memory kills
                the process then.
            before_taking: called repeatedly during allocation with the bytes still to allocate; an exception aborts it. Use
                it to check free memory, since a host that runs out kills the process.

        Raises:
            ValueError: size_bytes < 1.
            TransferError: the host refuses so much memory.
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
    def map(cls, fd: int, size_bytes: int, *, writable: bool = True, offset_bytes: int = 0) -> Self:
        """Map an arena of another process, or a part of it. Pages are mapped at first access, or by `touch`.

        Args:
            fd: its descriptor; closed with the arena, or if this raises.
            size_bytes: as its owner says; of the part.
            writable: False to map it read-only; `fd` may then be open for reading only.
            offset_bytes: where the part begins, a multiple of the page size.

        Raises:
            TransferRefused: it is no sealed memory of that size.
        """
        try:
            expect_sealed(fd, offset_bytes + size_bytes)
            return cls(fd, size_bytes, writable=writable, offset_bytes=offset_bytes)
        except OSError as error:
            os.close(fd)
            raise TransferRefused(f"an arena of {size_bytes} bytes cannot be mapped: {error}") from error
        except BaseException:
            os.close(fd)
            raise

    @staticmethod
    def around(address: int, size_bytes: int) -> "Arena | None":
        """Find the open arena of this process that contains this memory, such as an array's; None if there is none."""
        for arena in _open:
            if arena.address <= address and address + size_bytes <= arena.address + arena.size_bytes:
                return arena
        return None

    def touch(self, before: Callable[[int], object] | None = None) -> None:
        """Map all pages now, in a fifth of the time of first accesses. Any thread may call it; it ends when the arena is closed.

        Args:
            before: called before each part with the bytes that are left.

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
        """Prepare to share a region.

        The first call decides for good whether other processes may write the arena; the kernel enforces it.

        Returns:
            whether the region can be shared: False for one that peers may write in an arena that was sealed against writing.

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
        """Open another descriptor for a peer; the caller closes it.

        Raises:
            OSError: the process has too many open files.
            TransferError: the arena is closed.
        """
        access = os.O_RDWR if writable else os.O_RDONLY
        return os.open(f"/proc/self/fd/{self.fd}", access | os.O_CLOEXEC)

    @property
    def fd(self) -> int:
        """The descriptor of its memory.

        Raises:
            TransferError: the arena is closed.
        """
        if not self._closing.alive:
            raise TransferError("the arena is closed")
        return self._fd

    def close(self) -> None:
        """Release the memory; arrays over it stay valid and keep it until they are gone. Safe twice."""
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
    """Check that a descriptor is sealed memory of at least this size, so that mapping it is safe.

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


_CONTROL_GROUP = Path("/sys/fs/cgroup")


def free_memory_bytes() -> int:
    """Return the free memory of this machine, within the limit of its control group."""
    fields = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
    available = int(fields["MemAvailable"].split()[0]) * 1024
    group = _CONTROL_GROUP
    try:
        limit = int((group / "memory.max").read_text())
        used = int((group / "memory.current").read_text()) - _reclaimable_bytes(group)
    except (OSError, ValueError):  # no control groups of version 2, or no limit
        return available
    return min(available, max(0, limit - used))


def _reclaimable_bytes(group: Path) -> int:
    """Return the size of inactive page cache, such as weight files; the kernel drops it when memory is needed."""
    fields = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
    return int(fields.get("inactive_file", 0))


def region_of(memory: object, name: str = "") -> Region:
    """Describe memory as a region, which keeps the memory alive.

    Args:
        memory: an `Arena`, a contiguous numpy array or torch tensor, or any object with a contiguous buffer.
        name: its name at peers.

    Raises:
        TransferRefused: it is no such thing, or not contiguous, or empty.
    """
    if isinstance(memory, Arena):
        return Region(
            kind=MemoryKind.SHARED,
            size_bytes=memory.size_bytes,
            name=name,
            address=memory.address,
            owner=(memory, memory.array),  # the array keeps the mapping should the arena be closed
            writable=memory.array.flags.writeable,
        )
    torch = sys.modules.get("torch")  # a tensor cannot be there unless its owner has imported torch
    if torch is not None and isinstance(memory, torch.Tensor):
        return _of_tensor(memory, name)
    try:
        view = memoryview(memory)  # type: ignore[arg-type]
    except TypeError as error:
        raise TransferRefused(
            f"{type(memory).__name__} has no memory to register: give a numpy array, a torch tensor, an object with a"
            " buffer, or a Region"
        ) from error
    if not view.c_contiguous or view.nbytes == 0:
        raise TransferRefused(
            f"{type(memory).__name__} of {view.nbytes} bytes, shape {view.shape}, strides {view.strides}: must be"
            " contiguous and not empty; register what it is a view of"
        )
    flat = np.frombuffer(view.cast("B") if view.ndim else view, np.uint8)
    return Region(
        kind=MemoryKind.DRAM,
        size_bytes=view.nbytes,
        name=name,
        address=flat.ctypes.data,
        owner=(memory, flat),
        writable=not view.readonly,
    )


def _of_tensor(tensor: Any, name: str) -> Region:
    size_bytes = tensor.numel() * tensor.element_size()
    if not tensor.is_contiguous() or size_bytes == 0:
        raise TransferRefused(
            f"tensor of shape {tuple(tensor.shape)}, strides {tensor.stride()}: must be contiguous and not empty;"
            " register what it is a view of"
        )
    if tensor.device.type not in {"cpu", "cuda"}:
        raise TransferRefused(f"tensor on {tensor.device}: only memory of cpu and cuda can be registered")
    return Region(
        kind=MemoryKind.VRAM if tensor.is_cuda else MemoryKind.DRAM,
        size_bytes=size_bytes,
        name=name,
        address=tensor.data_ptr(),
        owner=tensor,
        device=tensor.device.index or 0,
    )
