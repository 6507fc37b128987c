"""A batch: what one stream moves at a time. A header, ranges of this process's memory, and checksums if requested."""

import ctypes
import struct
from dataclasses import dataclass

import numpy as np

from penstock.core.descriptors import Descriptors, OffsetArray, RangePairs
from penstock.core.errors import ChecksumMismatch, ProtocolError
from penstock.transfer.regions.checksum import checksum_ranges
from penstock.transfer.regions.ranges import copy_ranges

_HEADER = struct.Struct("<8sQQ")
HEADER_BYTES = _HEADER.size
_MAGIC = b"PTA data"
_CHECKSUM = np.dtype("<u4")
CHECKSUM_BYTES = _CHECKSUM.itemsize


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """Ranges in wire order.

    Attributes:
        exchange: the number of the exchange they belong to.
        addresses: (n,) uint64.
        lengths: (n,) uint64 bytes.
        num_bytes: their sum.
        checksum: whether one checksum per range follows.
    """

    exchange: int
    addresses: OffsetArray
    lengths: OffsetArray
    num_bytes: int
    checksum: bool

    @property
    def checksums_bytes(self) -> int:
        return CHECKSUM_BYTES * len(self.lengths) if self.checksum else 0

    def header(self) -> bytes:
        return _HEADER.pack(_MAGIC, self.exchange, self.num_bytes)

    def check_header(self, data: bytes) -> None:
        """Check that a header is of this batch.

        Raises:
            ProtocolError: it is not.
        """
        magic, exchange, num_bytes = _HEADER.unpack(data)
        if (magic, exchange, num_bytes) != (_MAGIC, self.exchange, self.num_bytes):
            raise ProtocolError(
                f"a stream brings {num_bytes} bytes for exchange {exchange} ({magic!r}), expected {self.num_bytes} for"
                f" exchange {self.exchange}"
            )

    def checksums(self) -> bytes:
        """Compute the checksums for the receiver."""
        return checksums_of(self.addresses, self.lengths) if self.checksum else b""

    def check(self, checksums: bytes) -> None:
        """Compare the received ranges with the sender's checksums.

        Raises:
            ChecksumMismatch: a range differs.
        """
        if self.checksum:
            check_sums(self.addresses, self.lengths, checksums)


def checksums_of(addresses: OffsetArray, lengths: OffsetArray) -> bytes:
    """Sum each range: (n,) little-endian uint32, CRC-32C."""
    return checksum_ranges(addresses, lengths).astype(_CHECKSUM, copy=False).tobytes()


def check_sums(addresses: OffsetArray, lengths: OffsetArray, checksums: bytes) -> None:
    """Compare ranges with the sender's checksums.

    Raises:
        ProtocolError: their number is wrong.
        ChecksumMismatch: one differs.
    """
    if len(checksums) != CHECKSUM_BYTES * len(lengths):
        raise ProtocolError(f"{len(checksums)} bytes of checksums for {len(lengths)} ranges of 4 bytes each")
    sent = np.frombuffer(checksums, _CHECKSUM)
    arrived = checksum_ranges(addresses, lengths)
    if not np.array_equal(sent, arrived):
        index = int(np.argmax(sent != arrived))
        raise ChecksumMismatch(
            f"range {index}, {int(lengths[index])} bytes: checksum {int(arrived[index]):#010x} as it arrived,"
            f" {int(sent[index]):#010x} at the sender: the network or somebody who writes there meanwhile changed it"
        )


def gather(addresses: OffsetArray, lengths: OffsetArray, num_bytes: int) -> bytes:
    """Copy ranges of memory into one payload, one after the other."""
    if len(lengths) == 1:
        return ctypes.string_at(int(addresses[0]), num_bytes)
    payload = np.empty(num_bytes, np.uint8)
    copy_ranges(np.cumsum(lengths) - lengths + np.uint64(payload.ctypes.data), addresses, lengths)
    return payload.tobytes()


def scatter(payload: bytes, addresses: OffsetArray, lengths: OffsetArray) -> None:
    """Copy a payload into ranges of memory of the same total length."""
    if len(lengths) == 1:
        ctypes.memmove(int(addresses[0]), payload, len(payload))
    else:
        copy_ranges(addresses, places_in(payload, lengths), lengths)


def places_in(payload: bytes, lengths: OffsetArray) -> OffsetArray:
    """Give the (n,) addresses of ranges stored one after the other in a payload; valid as long as the payload lives."""
    start = np.uint64(np.frombuffer(payload, np.uint8).ctypes.data)
    return np.cumsum(lengths) - lengths + start


def cut(pairs: RangePairs, parts: int, ranges_max: int) -> list[RangePairs]:
    """Cut a transfer into about `parts` parts of equal bytes and at most `ranges_max` ranges each; ranges may be cut."""
    ends = np.cumsum(pairs.lengths)
    wanted = np.arange(1, parts, dtype=np.uint64) * np.uint64(-(-pairs.total_bytes // parts))
    borders = np.union1d(
        wanted[wanted < np.uint64(pairs.total_bytes)], ends[ranges_max - 1 : -1 : ranges_max]
    )
    first, pieces = 0, []
    for border in [*borders.tolist(), pairs.total_bytes]:
        pieces.append(_between(pairs, ends, first, border))
        first = border
    return pieces


def _between(pairs: RangePairs, ends: OffsetArray, start: int, end: int) -> RangePairs:
    """Take the bytes from `start` to `end` of a transfer that is not empty."""
    first = int(np.searchsorted(ends, np.uint64(start), "right"))
    last = int(np.searchsorted(ends, np.uint64(end), "left"))
    lengths = pairs.lengths[first : last + 1].copy()
    skipped = np.uint64(start) - (ends[first] - lengths[0])
    lengths[0] -= skipped
    lengths[-1] -= ends[last] - np.uint64(end)

    def part(side: Descriptors) -> Descriptors:
        offsets = side.offsets[first : last + 1].copy()
        offsets[0] += skipped
        return Descriptors(side.region_ids[first : last + 1], offsets, lengths)

    return RangePairs(part(pairs.local), part(pairs.remote), end - start)
