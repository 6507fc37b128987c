"""The memory that the workers of this host share for KV; it outlives each of them, and ends with the deployment."""

import mmap
import os
import secrets
from collections.abc import Mapping
from types import TracebackType
from typing import Self

from msgspec.structs import replace

from penstock.core.errors import ConfigError, TransferError
from penstock.core.types.instances import Role
from penstock.graph import RoleSpec
from penstock.kv.host.memory import HostPart
from penstock.transfer.regions.arena import Arena

_RECORDS_FACTOR = 4
"""An extent has so many times the bytes of its blocks: records take at most three times the bytes of the smallest blocks."""
_RECORDS_BYTES = 1 << 20


class HostExtents:
    """Where each worker's extent lies in the arena. Takes no memory.

    Attributes:
        num_bytes: of the arena; 0 if no role has a host tier.
    """

    def __init__(self, roles: Mapping[Role, RoleSpec]) -> None:
        """Lay out the extents of all workers that the roles may get."""
        self._numbers: dict[tuple[Role, int], int] = {}
        self._sharing: dict[Role, int] = {}
        self.num_bytes = 0
        extents: list[tuple[int, int]] = []
        for name, role in roles.items():
            if role.kv.host and role.replicas_most:
                self._sharing[name] = role.replicas_most
                size = _extent_bytes(role)
                for index in range(role.replicas_most):
                    self._numbers[name, index] = len(extents)
                    extents.append((self.num_bytes, size))
                    self.num_bytes += size
        self._extents = tuple(extents)

    def part(self, role: Role, index: int, path: str) -> HostPart | None:
        """Return what a worker is told of the arena at `path`; None if its role has no host tier."""
        number = self._numbers.get((role, index))
        if number is None:
            return None
        return HostPart(path=path, number=number, extents=self._extents, sharing=self._sharing[role])


class HostArena:
    """One sealed arena with an extent for each worker of this host. Each worker allocates the pages of its own extent; the supervisor keeps the arena open.

    An extent belongs to a role and number, so that a restarted worker finds its blocks again. Workers that scaling may add
    later (`replicas_max`) have theirs from the start.
    """

    def __init__(self, roles: Mapping[Role, RoleSpec]) -> None:
        """Create it, if a role has a host tier.

        Args:
            roles: the roles that run on this host.

        Raises:
            ConfigError: the host refuses so much address space.
        """
        self._extents = HostExtents(roles)
        self._arena: Arena | None = None
        self._name = secrets.token_hex(8)
        if self._extents.num_bytes:
            try:
                self._arena = Arena.create(self._extents.num_bytes, prefault=False)
            except TransferError as error:
                raise ConfigError(f"kv.host: {error.message}") from error

    def part(self, role: Role, index: int) -> HostPart | None:
        """Return what a worker is told of it; None if its role has no host tier."""
        if self._arena is None:
            return None
        part = self._extents.part(role, index, f"/proc/{os.getpid()}/fd/{self._arena.fd}")
        return None if part is None else replace(part, arena=self._name)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._arena is not None:
            self._arena.close()


def _extent_bytes(role: RoleSpec) -> int:
    """Size a worker's extent: as all of the host's memory where the tier is a multiple of blocks, whose bytes only workers know."""
    size = role.kv.host
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    share = memory if size.is_multiple else size.shared_by(role.replicas_most).num_bytes * _RECORDS_FACTOR
    return -(-(share + _RECORDS_BYTES) // mmap.PAGESIZE) * mmap.PAGESIZE
