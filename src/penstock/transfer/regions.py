"""This agent's registered memory: numbers that are never used again, keys that show what was given, and bounds."""

import secrets
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import count

import numpy as np
from numpy.typing import ArrayLike

from penstock.core.descriptors import Descriptors, MemoryKind, OffsetArray, Region, RegionInfo, TransferOp
from penstock.core.errors import TransferRefused

_KEY_BYTES = 8


@dataclass(frozen=True, slots=True, eq=False)
class Registration:
    """A registered region of this agent. `ways` is what each transport wants its peers to know."""

    region_id: int
    region: Region
    key: bytes = field(repr=False)
    ways: Mapping[str, bytes] = field(repr=False)

    @property
    def info(self) -> RegionInfo:
        """What a peer that is given this region learns."""
        return RegionInfo(
            region_id=self.region_id,
            kind=self.region.kind,
            size_bytes=self.region.size_bytes,
            key=self.key,
            name=self.region.name,
            ways=dict(self.ways),
        )

    def ranges(self, offsets: ArrayLike = 0, lengths: ArrayLike | None = None) -> Descriptors:
        """List ranges of it; all of it where nothing is said. See `Descriptors.of`."""
        return Descriptors.of(self.region_id, offsets, self.region.size_bytes if lengths is None else lengths)

    def blocks(self, block_ids: ArrayLike, block_bytes: int) -> Descriptors:
        """List blocks of it. See `Descriptors.blocks`."""
        return Descriptors.blocks(self.region_id, block_ids, block_bytes)


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

    def __init__(self) -> None:
        """Start empty."""
        self._registrations: dict[int, Registration] = {}
        self._ids = count(1)

    def __iter__(self) -> Iterator[Registration]:
        return iter(self._registrations.values())

    def __len__(self) -> int:
        return len(self._registrations)

    def __contains__(self, region_id: int) -> bool:
        return region_id in self._registrations

    def next_id(self) -> int:
        return next(self._ids)

    def add(self, region_id: int, region: Region, ways: Mapping[str, bytes]) -> Registration:
        registration = Registration(region_id, region, secrets.token_bytes(_KEY_BYTES), ways)
        self._registrations[region_id] = registration
        return registration

    def remove(self, region_id: int) -> None:
        self._registrations.pop(region_id, None)

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

    def check(self, ranges: Descriptors, *, writes: bool) -> None:
        """Check that all ranges lie in registered regions, and in writable ones where they are to be written.

        Raises:
            TransferRefused: one does not.
        """
        for region_id in distinct(ranges.region_ids):
            region = self.get(region_id).region
            if writes and not region.writable:
                raise TransferRefused(f"region {region_id} is read-only; register a writable buffer")
            check_bounds(ranges, region_id, region.size_bytes)

    def authorize(self, key_by_region: Mapping[int, bytes], ranges: Descriptors, op: TransferOp) -> None:
        """Check what a peer asks for: it has to show the key of each region.

        Raises:
            TransferRefused: a region is gone or was not given, a range ends outside, or it is read-only.
        """
        for region_id in distinct(ranges.region_ids):
            key = key_by_region.get(region_id, b"")
            if not secrets.compare_digest(self.get(region_id).key, key):
                raise TransferRefused(f"region {region_id} was not given: the key shown for it does not fit")
        self.check(ranges, writes=op is TransferOp.WRITE)


def distinct(region_ids: OffsetArray) -> list[int]:
    """List which regions there are; one comparison where there is one only."""
    if len(region_ids) == 0:
        return []
    first = region_ids[0]
    if region_ids[-1] == first and bool((region_ids == first).all()):
        return [int(first)]
    return [int(region_id) for region_id in np.unique(region_ids)]


def check_bounds(ranges: Descriptors, region_id: int, size_bytes: int) -> None:
    """Check that the ranges of one region end within it.

    Raises:
        TransferRefused: one does not.
    """
    size = np.uint64(size_bytes)
    # no sum that could wrap around: offset <= size, and length <= size - offset
    outside = (ranges.offsets > size) | (ranges.lengths > size - np.minimum(ranges.offsets, size))
    outside &= ranges.region_ids == region_id
    if outside.any():
        index = int(np.argmax(outside))
        raise TransferRefused(
            f"range {index}: {int(ranges.lengths[index])} bytes from {int(ranges.offsets[index])} end outside of"
            f" region {region_id}, which has {size_bytes} bytes"
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
