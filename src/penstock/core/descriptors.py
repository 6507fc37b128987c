"""Ranges of registered memory, in arrays: no Python object per range.

A range is (region, offset, length) in bytes. An agent never reuses a region id, so a list of ranges made before a region
was deregistered cannot name a later region by mistake.
"""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Annotated, Self

import msgspec
import numpy as np
from numpy.typing import ArrayLike, NDArray

from penstock.core.wire import Wire

OffsetArray = NDArray[np.uint64]


class TransferOp(Enum):
    """Direction as the posting agent sees it: READ copies the peer's bytes here, WRITE copies local bytes to the peer."""

    READ = "read"
    WRITE = "write"


class Access(Enum):
    """What peers may do with a region. The agent that registered it may read, and write unless the memory is read-only."""

    READ = "read"
    WRITE = "write"
    BOTH = "both"

    def allows(self, op: TransferOp) -> bool:
        return self is Access.BOTH or self.value == op.value


class MemoryKind(Enum):
    """Where the bytes of a region are."""

    DRAM = "dram"  # private to the process
    SHARED = "shared"  # an arena that other processes of the host can map
    VRAM = "vram"
    FILE = "file"
    OBJECT = "object"


MAIN_MEMORY = frozenset({MemoryKind.DRAM, MemoryKind.SHARED})
"""Kinds that the CPU of this process can address."""


_Size = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
_Key = Annotated[bytes, msgspec.Meta(max_length=64)]


class RegionInfo(Wire, frozen=True):
    """Describes a region to a peer that was granted access.

    Attributes:
        read_key: proves the right to read; empty without that right.
        write_key: proves the right to write; empty without that right.
        transport_info: transport name -> what that transport needs to reach the region.
    """

    region_id: Annotated[int, msgspec.Meta(ge=0)]
    kind: MemoryKind
    size_bytes: _Size
    read_key: _Key = b""
    write_key: _Key = b""
    name: str = ""
    transport_info: dict[str, bytes] = msgspec.field(default_factory=dict)

    def key(self, op: TransferOp) -> bytes:
        """Return the key that proves the right to `op`; empty without that right."""
        return self.read_key if op is TransferOp.READ else self.write_key

    def with_keys_of(self, older: "RegionInfo") -> "RegionInfo":
        """Fill in missing keys from an earlier grant of the same region."""
        return msgspec.structs.replace(
            self,
            read_key=self.read_key or older.read_key,
            write_key=self.write_key or older.write_key,
        )


@dataclass(frozen=True, slots=True, eq=False)
class Region:
    """Memory of this process, a file or an object, to be registered with a transfer agent.

    Attributes:
        kind: where the bytes are.
        size_bytes: size of the region.
        name: peers look the region up by it; "" for a region that is not looked up.
        address: address of the first byte; 0 for files and objects.
        owner: object that keeps the memory alive.
        device: GPU index, for VRAM.
        writable: False for a read-only buffer.
    """

    kind: MemoryKind
    size_bytes: int
    name: str = ""
    address: int = 0
    owner: object = None
    device: int = 0
    writable: bool = True


@dataclass(frozen=True, slots=True, eq=False)
class Descriptors:
    """A list of n ranges in the regions of one agent. Do not change the arrays afterwards.

    Attributes:
        region_ids: (n,) uint64.
        offsets: (n,) uint64, bytes from the start of the region.
        lengths: (n,) uint64, bytes.
    """

    region_ids: OffsetArray
    offsets: OffsetArray
    lengths: OffsetArray

    @classmethod
    def of(cls, region_id: int, offsets: ArrayLike, lengths: ArrayLike) -> Self:
        """List ranges of one region.

        Args:
            region_id: the region.
            offsets: (n,) bytes.
            lengths: (n,) bytes, or one length for all ranges.

        Raises:
            ValueError: a value is negative or no integer, or the shapes differ.
        """
        starts = _whole_numbers("offsets", offsets)
        sizes = _whole_numbers("lengths", lengths)
        if sizes.shape != starts.shape:
            if sizes.size != 1:
                raise ValueError(
                    f"lengths: {sizes.size} for {starts.size} offsets; give as many, or one for all"
                )
            sizes = np.full(starts.shape, sizes[0])
        return cls(np.full(starts.shape, region_id, np.uint64), starts, sizes)

    @classmethod
    def strided(cls, region_id: int, offset: int, stride: int, count: int, length: int) -> Self:
        """List `count` ranges of `length` bytes; range i starts at `offset + i * stride`.

        Raises:
            ValueError: an argument is negative.
        """
        if min(offset, stride, count, length) < 0:
            raise ValueError(
                f"offset {offset}, stride {stride}, count {count}, length {length}: none may be negative"
            )
        return cls.of(
            region_id, np.arange(count, dtype=np.uint64) * np.uint64(stride) + np.uint64(offset), length
        )

    @classmethod
    def blocks(cls, region_id: int, block_ids: ArrayLike, block_bytes: int) -> Self:
        """List blocks of a pool: range i is block `block_ids[i]`.

        Raises:
            ValueError: an id is negative, or `block_bytes` is below 1.
        """
        if block_bytes < 1:
            raise ValueError(f"block_bytes: must be >= 1, got {block_bytes}")
        return cls.of(region_id, _whole_numbers("block_ids", block_ids) * np.uint64(block_bytes), block_bytes)

    @classmethod
    def joined(cls, parts: "Sequence[Descriptors]") -> Self:
        """Concatenate lists, for example one per layer."""
        if not parts:
            return cls.of(0, np.empty(0, np.uint64), np.empty(0, np.uint64))
        return cls(
            np.concatenate([part.region_ids for part in parts]),
            np.concatenate([part.offsets for part in parts]),
            np.concatenate([part.lengths for part in parts]),
        )

    def __len__(self) -> int:
        return len(self.offsets)

    @property
    def total_bytes(self) -> int:
        return int(self.lengths.sum())


@dataclass(frozen=True, slots=True, eq=False)
class RangePairs:
    """What one transfer moves: range i of `local` to or from range i of `remote`, which has the same length.

    Bounds are checked and adjacent ranges are merged.
    """

    local: Descriptors
    remote: Descriptors
    total_bytes: int

    @property
    def lengths(self) -> OffsetArray:
        """(n,) uint64, bytes of each range."""
        return self.local.lengths

    def __len__(self) -> int:
        return len(self.local)


Keys = Mapping[TransferOp, Mapping[int, bytes]]
"""Keys that prove the right to access regions: direction -> region id -> key."""


@dataclass(frozen=True, slots=True, eq=False)
class Granted:
    """The right to reach memory directly: a `payload` of the transport, and a file `descriptor` if it needs one."""

    payload: bytes = b""
    descriptor: int | None = None

    def close(self) -> None:
        """Close the descriptor. Call it once."""
        if self.descriptor is not None:
            os.close(self.descriptor)


@dataclass(frozen=True, slots=True)
class TransferCost:
    """Linear cost of a transfer: `start_s + range_s * ranges + num_bytes / bytes_per_s`.

    `setup_s` comes on top for the first transfer to a peer, unless the transport has been set up before.
    """

    start_s: float
    range_s: float
    bytes_per_s: float
    setup_s: float = 0.0

    def seconds(self, num_bytes: int, ranges: int) -> float:
        return self.start_s + self.range_s * ranges + num_bytes / self.bytes_per_s


def _whole_numbers(name: str, values: ArrayLike) -> OffsetArray:
    one: object = values
    if isinstance(one, int) and 0 <= one < 1 << 64:  # five times as fast as by way of `asarray`
        return np.array([one], np.uint64)
    array = np.atleast_1d(np.asarray(values))
    if array.ndim != 1:
        raise ValueError(f"{name}: shape {array.shape}, expected (n,)")
    if array.dtype == np.uint64:
        return np.ascontiguousarray(array)
    if array.size == 0:
        return np.empty(0, np.uint64)
    if not np.issubdtype(array.dtype, np.integer):
        raise ValueError(f"{name}: dtype {array.dtype}, expected integers")
    if np.issubdtype(array.dtype, np.signedinteger) and int(array.min()) < 0:
        raise ValueError(f"{name}: {int(array.min())} is negative")
    return array.astype(np.uint64)
