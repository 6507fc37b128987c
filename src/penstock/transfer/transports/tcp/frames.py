"""Messages of transport `tcp` over a link. The bytes of large transfers go over streams.

The initiator numbers its requests (`exchange`). The owner of the memory answers each with `Done` or `Ended`; a `Push` that
may begin gets `Go` first.
"""

from typing import Self

import msgspec
import numpy as np

from penstock.core.descriptors import Descriptors, OffsetArray, TransferOp
from penstock.core.errors import ErrorInfo, ProtocolError, TransferError
from penstock.core.framing import FrameCodec, UnknownFrame
from penstock.core.wire import Wire, encode

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
