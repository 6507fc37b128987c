"""The memory of a host tier: its own, or a part of the arena that the workers of a host share."""

import fcntl
import os
import struct
from collections.abc import Callable
from time import sleep

import numpy as np
from numpy.typing import NDArray

from penstock.core.errors import ConfigError, TransferError
from penstock.core.types.events import Holder
from penstock.core.types.instances import KvHolder
from penstock.core.wire import Wire
from penstock.kv.host.extent import ExtentLayout, Numbers, read_layout
from penstock.kv.namespace import Namespace
from penstock.transfer.regions.arena import Arena
from penstock.transfer.regions.free_memory import free_memory_bytes

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
