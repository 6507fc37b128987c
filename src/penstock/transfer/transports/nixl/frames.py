"""What the `nixl` transports of two agents say to each other: the initiator asks, the owner of the memory answers."""

from typing import Annotated

import msgspec

from penstock.core.descriptors import Descriptors, TransferOp
from penstock.core.errors import ErrorInfo, ProtocolError
from penstock.core.wire import Wire, encode, pack_hashes, unpack_hashes


class Want(Wire, frozen=True, tag="want"):
    """Give access to these regions. `keys` show that they were given; one that names none asks for the agent."""

    ask_id: int
    op: TransferOp
    keys: dict[int, bytes]


class Place(Wire, frozen=True):
    """Where a region is, in the process that owns it. `kind` is NIXL's name of that memory."""

    kind: str
    address: Annotated[int, msgspec.Meta(ge=0)]
    device: Annotated[int, msgspec.Meta(ge=0)] = 0


class Given(Wire, frozen=True, tag="given"):
    """The answer to `Want`: NIXL's metadata of these regions, and where each begins there."""

    ask_id: int
    metadata: bytes
    places: dict[int, Place]


class Known(Wire, frozen=True, tag="known"):
    """The answer to a `Want` of the agent: its metadata, and random bytes that can be read there as a test."""

    ask_id: int
    metadata: bytes
    nonce: bytes
    address: Annotated[int, msgspec.Meta(ge=0)]


class SumRanges(Wire, frozen=True, tag="sum"):
    """Sum these ranges; columns of little-endian uint64."""

    ask_id: int
    keys: dict[int, bytes]
    region_ids: bytes
    offsets: bytes
    lengths: bytes

    @classmethod
    def of(cls, ask_id: int, keys: dict[int, bytes], ranges: Descriptors) -> "SumRanges":
        columns = (pack_hashes(column) for column in (ranges.region_ids, ranges.offsets, ranges.lengths))
        region_ids, offsets, lengths = columns
        return cls(ask_id=ask_id, keys=keys, region_ids=region_ids, offsets=offsets, lengths=lengths)

    @property
    def ranges(self) -> Descriptors:
        """The list.

        Raises:
            ProtocolError: the columns are none, or of different lengths.
        """
        if len({len(self.region_ids), len(self.offsets), len(self.lengths)}) != 1 or len(self.offsets) % 8:
            raise ProtocolError(
                f"columns of {len(self.region_ids)}, {len(self.offsets)} and {len(self.lengths)} bytes; expected"
                " equal lengths, 8 bytes a range"
            )
        return Descriptors(
            unpack_hashes(self.region_ids), unpack_hashes(self.offsets), unpack_hashes(self.lengths)
        )


class Sums(Wire, frozen=True, tag="sums"):
    """The answer to `SumRanges`: a little-endian uint32 for each range."""

    ask_id: int
    sums: bytes


class Refused(Wire, frozen=True, tag="refused"):
    """The answer to what cannot be done."""

    ask_id: int
    error: ErrorInfo


Asked = Want | SumRanges
Answer = Given | Known | Sums | Refused

_decoder: msgspec.msgpack.Decoder[Asked | Answer] = msgspec.msgpack.Decoder(Asked | Answer)


def decode_frame(payload: bytes, peer: str) -> Asked | Answer:
    """Read what the peer's transport sent.

    Raises:
        ProtocolError: it is no such message.
    """
    try:
        return _decoder.decode(payload)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise ProtocolError(f"agent {peer}: a message of {len(payload)} bytes for nixl: {error}") from error


def encode_frame(frame: Asked | Answer) -> bytes:
    return encode(frame)
