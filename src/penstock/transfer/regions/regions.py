"""The registered memory of an agent: region ids that are never reused, keys for peers, and bounds."""

import secrets
from collections.abc import Container, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import count

import numpy as np
from numpy.typing import ArrayLike

from penstock.core.descriptors import (
    MAIN_MEMORY,
    Access,
    Descriptors,
    MemoryKind,
    OffsetArray,
    Region,
    RegionInfo,
    TransferOp,
)
from penstock.core.errors import TransferError, TransferRefused
from penstock.seams import Storage, Transport
from penstock.transfer.regions.ranges import check_bounds

_KEY_BYTES = 8
_FIRST_IDS, _IDS_APART = 1 << 20, 1 << 12
"""Agents begin at random ids, so that ranges of one agent's regions do not name another agent's by mistake."""
_FEW = 8


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class Registration:
    """A registered region of this agent.

    Attributes:
        region_id: its id.
        region: the memory.
        name: its name at peers.
        access: the most that peers may do with it.
        read_key: what a peer shows to read it.
        write_key: what a peer shows to write it.
        transport_info: what each transport tells peers of it, by transport.
    """

    region_id: int
    region: Region
    name: str
    access: Access
    read_key: bytes = field(repr=False)
    write_key: bytes = field(repr=False)
    transport_info: Mapping[str, bytes] = field(repr=False)

    @property
    def info(self) -> RegionInfo:
        """The region as a peer learns it that is given all its access."""
        return self.given(None)

    def given(self, access: Access | None) -> RegionInfo:
        """Describe the region for a peer.

        Args:
            access: what the peer may do; None for all that the registration allows.

        Raises:
            TransferRefused: that is more than the registration allows.
        """
        given = self.access if access is None else access
        if self.access not in {given, Access.BOTH}:
            raise TransferRefused(
                f"region {self.region_id} is registered for access {self.access.value!r}, so {given.value!r} cannot be"
                " given: register it with access=Access.BOTH"
            )
        return RegionInfo(
            region_id=self.region_id,
            kind=self.region.kind,
            size_bytes=self.region.size_bytes,
            read_key=self.read_key if given.allows(TransferOp.READ) else b"",
            write_key=self.write_key if given.allows(TransferOp.WRITE) else b"",
            name=self.name,
            transport_info=dict(self.transport_info),
        )

    def key(self, op: TransferOp) -> bytes:
        """Give the key of a direction."""
        return self.read_key if op is TransferOp.READ else self.write_key

    def ranges(self, offsets: ArrayLike = 0, lengths: ArrayLike | None = None) -> Descriptors:
        """List ranges of it; all of it where nothing is said. See `Descriptors.of`."""
        return Descriptors.of(self.region_id, offsets, self.region.size_bytes if lengths is None else lengths)

    def blocks(self, block_ids: ArrayLike, block_bytes: int) -> Descriptors:
        """List blocks of it. See `Descriptors.blocks`."""
        return Descriptors.blocks(self.region_id, block_ids, block_bytes)

    def check_writable(self) -> None:
        """Check that it can be written.

        Raises:
            TransferRefused: it is read-only.
        """
        if not self.region.writable:
            raise TransferRefused(f"region {self.region_id} is read-only; register a writable buffer")


@dataclass(frozen=True, slots=True, eq=False)
class RemoteRegion:
    """A peer's region that this agent was given."""

    region_id: int
    info: RegionInfo

    @property
    def kind(self) -> MemoryKind:
        return self.info.kind

    @property
    def size_bytes(self) -> int:
        return self.info.size_bytes

    def ranges(self, offsets: ArrayLike = 0, lengths: ArrayLike | None = None) -> Descriptors:
        """List ranges of it; all of it where nothing is said. See `Descriptors.of`."""
        return Descriptors.of(self.region_id, offsets, self.size_bytes if lengths is None else lengths)

    def blocks(self, block_ids: ArrayLike, block_bytes: int) -> Descriptors:
        """List blocks of it. See `Descriptors.blocks`."""
        return Descriptors.blocks(self.region_id, block_ids, block_bytes)


class RegionTable:
    """Every region that is registered now."""

    def __init__(self, first_id: int | None = None) -> None:
        """Start empty.

        Args:
            first_id: the id of the first region; None for a random one.
        """
        self._registrations: dict[int, Registration] = {}
        self._ids = count(1 + secrets.randbelow(_FIRST_IDS) * _IDS_APART if first_id is None else first_id)

    def __iter__(self) -> Iterator[Registration]:
        return iter(self._registrations.values())

    def __len__(self) -> int:
        return len(self._registrations)

    def __contains__(self, registration: Registration) -> bool:
        return self._registrations.get(registration.region_id) is registration

    def register(
        self,
        region: Region,
        transports: Mapping[str, Transport],
        storage: Mapping[str, Storage],
        unavailable: Mapping[str, str],
        *,
        name: str = "",
        access: Access | None = None,
    ) -> Registration:
        """Register a region with transports and storage.

        Args:
            region: the region.
            name: its name at peers; "" for the region's own.
            access: the most that peers may do with it; None for all that the memory permits.
            transports: those that work here, by name.
            storage: likewise.
            unavailable: by name, why other transports do not work.

        Raises:
            TransferRefused: no transport has any use for it.
        """
        if access is None:
            access = Access.BOTH if region.writable else Access.READ
        elif not region.writable and access is not Access.READ:
            raise TransferRefused(
                f"region of {region.size_bytes} bytes is read-only memory, so access={access.value!r} cannot be allowed;"
                " register a writable buffer, or access=Access.READ"
            )
        region_id = next(self._ids)
        transport_info: dict[str, bytes] = {}
        why: list[str] = []
        for by, transport in transports.items():
            try:
                info = transport.register(region_id, region, access)
            except TransferError as error:
                why.append(f"{by}: {error.message}")
                continue
            if info is not None:
                transport_info[by] = info
        is_reached = bool(transport_info) or (bool(storage) and region.kind in MAIN_MEMORY)
        for by, kept in storage.items():
            if kept.kind is region.kind:
                try:
                    kept.register(region_id, region)
                    is_reached = True
                except TransferError as error:
                    why.append(f"{by}: {error.message}")
        if not is_reached:
            reasons = "; ".join(why or (f"{by}: {text}" for by, text in unavailable.items()))
            raise TransferRefused(
                f"region of {region.size_bytes} bytes, {region.kind.value}: no transport has any use for it"
                f" ({reasons or ', '.join((*transports, *storage))})"
            )
        read_key, write_key = secrets.token_bytes(_KEY_BYTES), secrets.token_bytes(_KEY_BYTES)
        registration = Registration(
            region_id, region, name or region.name, access, read_key, write_key, transport_info
        )
        self._registrations[region_id] = registration
        return registration

    def remove(self, registration: Registration) -> None:
        """Forget a region.

        Raises:
            TransferRefused: it is not registered (any more), or by another agent.
        """
        del self._registrations[self.expect(registration).region_id]

    def expect(self, registration: Registration) -> Registration:
        """Check that this registration is current and of this agent.

        Raises:
            TransferRefused: it is not registered (any more), or by another agent.
        """
        if self.get(registration.region_id) is not registration:
            raise TransferRefused(
                f"region {registration.region_id} of {registration.region.size_bytes} bytes was registered by another"
                " agent; use what `register` of this one gave"
            )
        return registration

    def get(self, region_id: int) -> Registration:
        """Look up a region.

        Raises:
            TransferRefused: it is not registered (any more).
        """
        registration = self._registrations.get(region_id)
        if registration is None:
            raise TransferRefused(
                f"region {region_id} is not registered (any more); {len(self)} regions are: register it, and use what"
                " `register` gives or fresh metadata"
            )
        return registration

    def check(self, ranges: Descriptors) -> None:
        """Check that all ranges lie in registered regions.

        Raises:
            TransferRefused: one does not.
        """
        for region_id in distinct(ranges.region_ids):
            registration = self.get(region_id)
            expect_inside(ranges, region_id, registration.region.size_bytes)

    def authorize(self, key_by_region: Mapping[int, bytes], ranges: Descriptors, op: TransferOp) -> None:
        """Check a peer's request: the key of each region for this direction, and bounds.

        Raises:
            TransferRefused: a region is deregistered or was not given for this direction, or a range is out of bounds.
        """
        for region_id in distinct(ranges.region_ids):
            registration, key = self.get(region_id), key_by_region.get(region_id, b"")
            if not secrets.compare_digest(registration.key(op), key):
                raise TransferRefused(
                    f"region {region_id} was not given to {op.value}: the key shown for it does not fit"
                )
            if not registration.access.allows(op):
                raise TransferRefused(
                    f"region {region_id} is {registration.access.value}-only for peers: its owner has to register it with"
                    " access=Access.BOTH"
                )
        self.check(ranges)


def other_kind(
    kinds: Container[MemoryKind], local: Iterable[Region], remote: Iterable[RegionInfo]
) -> MemoryKind | None:
    """Find the kind of a region, on either side, that is none of `kinds`; None if all are."""
    for kind in (*(region.kind for region in local), *(info.kind for info in remote)):
        if kind not in kinds:
            return kind
    return None


def distinct(region_ids: OffsetArray) -> list[int]:
    """List the distinct region ids; fast if there is only one."""
    if len(region_ids) <= _FEW:
        return list(dict.fromkeys(region_ids.tolist()))
    first = region_ids[0]
    if region_ids[-1] == first and bool((region_ids == first).all()):
        return [int(first)]
    return [int(region_id) for region_id in np.unique(region_ids)]


def expect_inside(ranges: Descriptors, region_id: int, size_bytes: int) -> None:
    """Check that the ranges of one region end within it.

    Raises:
        TransferRefused: one does not.
    """
    offsets, lengths = ranges.offsets, ranges.lengths
    wrong = check_bounds(offsets, lengths, size_bytes)
    if wrong >= 0 and ranges.region_ids[wrong] != region_id:  # another region's, which may be larger
        own = ranges.region_ids == region_id
        offsets, lengths = offsets[own], lengths[own]
        wrong = check_bounds(offsets, lengths, size_bytes)
    if wrong >= 0:
        raise TransferRefused(
            f"a range of {int(lengths[wrong])} bytes from {int(offsets[wrong])} ends outside of region {region_id},"
            f" which has {size_bytes} bytes"
        )


def addresses_of(ranges: Descriptors, address_by_region: Mapping[int, int]) -> OffsetArray:
    """Give (n,) uint64: where each range begins in memory."""
    regions = distinct(ranges.region_ids)
    if len(regions) == 1:
        return ranges.offsets + np.uint64(address_by_region[regions[0]])
    bases = np.zeros(len(ranges), np.uint64)
    for region_id in regions:
        bases[ranges.region_ids == region_id] = address_by_region[region_id]
    return ranges.offsets + bases
