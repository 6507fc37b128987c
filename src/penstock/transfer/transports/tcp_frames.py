"""A batch: what one stream moves at a time. A header, ranges of this process's memory, and checksums if requested."""

import ctypes
import struct
from dataclasses import dataclass
from typing import Self

import msgspec
import numpy as np

from penstock.core.descriptors import Descriptors, OffsetArray, RangePairs, TransferOp
from penstock.core.errors import ChecksumMismatch, ErrorInfo, ProtocolError, TransferError
from penstock.core.framing import FrameCodec, UnknownFrame
from penstock.core.wire import Wire, encode
from penstock.transfer.regions.ranges import checksum_ranges, copy_ranges

TCP_VERSION = 1
"""Raised when an older side could misread a message; neighbouring versions are compatible."""
INLINE_BYTES_MAX = 256 << 10
"""The most bytes of memory in one message."""
WINDOW_MAX = 128
"""The most unanswered messages with bytes: 32 MiB, half of a link's write buffer."""
RANGES_MAX = 1 << 16
"""The most ranges in one message of 1 to 1.3 MB."""
REGIONS_MAX = 4096
"""The most regions that the ranges of one message are of."""
_COLUMN = np.dtype("<u8")


class Contact(Wire, frozen=True, array_like=True):
    """What a peer needs to connect: the bounds of its requests."""

    version: int
    streams: int
    window: int
    piece_bytes: int

    @classmethod
    def decode(cls, data: bytes) -> Self:
        """Decode a peer's contact.

        Raises:
            TransferError: it is invalid, or of an unsupported version.
        """
        try:
            contact = msgspec.msgpack.decode(data, type=cls)
        except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
            raise TransferError(f"the peer's contact for transport tcp cannot be read: {error}") from error
        if abs(contact.version - TCP_VERSION) > 1:
            raise TransferError(
                f"the peer's transport tcp speaks version {contact.version}, this one {TCP_VERSION} and its neighbours;"
                " bring both to the same release of Penstock"
            )
        if min(contact.streams, contact.window, contact.piece_bytes) < 1:
            raise TransferError(f"the peer lets nothing through by tcp: {contact}")
        return contact


class PackedRanges(Wire, frozen=True):
    """Ranges of the owner's regions.

    `regions` are ids, `keys` the key of each. `of` is the index of each range's region, (n,) little-endian uint32, empty for
    one region only; `offsets` and `lengths` are (n,) little-endian uint64.
    """

    regions: tuple[int, ...]
    keys: tuple[bytes, ...]
    offsets: bytes
    lengths: bytes
    of: bytes = b""

    @classmethod
    def pack(cls, ranges: Descriptors, key_by_region: dict[int, bytes]) -> Self:
        """Pack at least one range; `key_by_region` has every region's key."""
        ids, indices = np.unique(ranges.region_ids, return_inverse=True)
        regions = tuple(ids.tolist())
        return cls(
            regions=regions,
            keys=tuple(key_by_region[region_id] for region_id in regions),
            offsets=ranges.offsets.astype(_COLUMN, copy=False).tobytes(),
            lengths=ranges.lengths.astype(_COLUMN, copy=False).tobytes(),
            of=b"" if len(regions) == 1 else indices.astype("<u4").tobytes(),
        )

    def unpack(self) -> tuple[Descriptors, dict[int, bytes]]:
        """Give the ranges and the keys by region; neither is authorised yet.

        Raises:
            ProtocolError: the arrays are inconsistent.
        """
        count = len(self.offsets) // _COLUMN.itemsize
        columns_fit = len(self.offsets) == len(self.lengths) == count * _COLUMN.itemsize
        regions_fit = 1 <= len(self.regions) == len(self.keys) <= REGIONS_MAX and all(
            0 <= region_id < 1 << 64 for region_id in self.regions
        )
        if not columns_fit or not regions_fit or not 1 <= count <= RANGES_MAX:
            raise ProtocolError(
                f"ranges: {len(self.offsets)} bytes of offsets, {len(self.lengths)} of lengths, {len(self.regions)}"
                f" regions, {len(self.keys)} keys; expected 1 to {RANGES_MAX} of 8 bytes and of 1 to {REGIONS_MAX} regions"
            )
        return (
            Descriptors(self._region_ids(count), _column(self.offsets), _column(self.lengths)),
            dict(zip(self.regions, self.keys, strict=True)),
        )

    def _region_ids(self, count: int) -> OffsetArray:
        ids = np.array(self.regions, np.uint64)
        if len(ids) == 1 and not self.of:
            return np.full(count, ids[0])
        if len(self.of) != 4 * count:
            raise ProtocolError(f"ranges: {len(self.of)} bytes that name regions, for {count} ranges")
        of = np.frombuffer(self.of, "<u4")
        if int(of.max()) >= len(ids):
            raise ProtocolError(f"ranges: one is of region number {int(of.max())}, there are {len(ids)}")
        named: OffsetArray = ids[of]
        return named


class Put(Wire, frozen=True, tag="put"):
    """Write `payload` to these ranges. `checksums`: see `checksums_of`."""

    exchange: int
    ranges: PackedRanges
    payload: bytes
    checksums: bytes = b""


class Get(Wire, frozen=True, tag="get"):
    """Answer with the bytes of these ranges, and with checksums if `checksum`."""

    exchange: int
    ranges: PackedRanges
    checksum: bool = False


class Push(Wire, frozen=True, tag="push"):
    """Move these ranges over a stream: for WRITE the initiator sends after `Go`, for READ the owner sends at once."""

    exchange: int
    stream: int
    op: TransferOp
    ranges: PackedRanges
    checksum: bool = False


class Stop(Wire, frozen=True, tag="stop"):
    """End this `Push`; the owner answers `Ended` unless it has answered already. `error`: what the owner did wrong."""

    exchange: int
    error: ErrorInfo | None = None


class StreamReady(Wire, frozen=True, tag="ready"):
    """The owner has accepted the stream with this number."""

    stream: int


class Go(Wire, frozen=True, tag="go"):
    """The owner is ready to receive."""

    exchange: int


class Done(Wire, frozen=True, tag="done"):
    """All bytes are written or sent; `payload` has the bytes of a `Get`."""

    exchange: int
    payload: bytes = b""
    checksums: bytes = b""


class Ended(Wire, frozen=True, tag="ended"):
    """The request was refused or failed; the owner uses no memory for it any more."""

    exchange: int
    error: ErrorInfo


TcpFrame = Put | Get | Push | Stop | StreamReady | Go | Done | Ended

TCP_CODEC: FrameCodec[TcpFrame] = FrameCodec(TcpFrame)


def encode_frame(frame: TcpFrame) -> bytes:
    return encode(frame)


def decode_frame(payload: bytes) -> TcpFrame | UnknownFrame:
    """Read a message.

    Raises:
        ProtocolError: it is invalid.
    """
    return TCP_CODEC.decode(payload)


def _column(data: bytes) -> OffsetArray:
    return np.frombuffer(data, _COLUMN).astype(np.uint64, copy=False)


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
