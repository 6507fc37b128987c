"""Payloads of grant requests and answers of transport `nixl`."""

from typing import Annotated, TypeVar

import msgspec

from penstock.core.descriptors import Descriptors
from penstock.core.errors import ProtocolError
from penstock.core.wire import Wire, pack_hashes, unpack_hashes

_W = TypeVar("_W", bound=Wire)


class Place(Wire, frozen=True):
    """Where a region is, in the process that owns it. `kind` is NIXL's name of that memory."""

    kind: str
    address: Annotated[int, msgspec.Meta(ge=0)]
    device: Annotated[int, msgspec.Meta(ge=0)] = 0


class Given(Wire, frozen=True):
    """The answer to a request for regions: NIXL's metadata of the regions and the address of each."""

    metadata: bytes
    places: dict[int, Place]


class Known(Wire, frozen=True):
    """The answer to a request without regions: metadata of the NIXL agent, and a nonce for a test read."""

    metadata: bytes
    nonce: bytes
    address: Annotated[int, msgspec.Meta(ge=0)]


class SumRanges(Wire, frozen=True):
    """Requests checksums of ranges; columns of little-endian uint64. The answer is one little-endian uint32 per range."""

    region_ids: bytes
    offsets: bytes
    lengths: bytes

    @classmethod
    def of(cls, ranges: Descriptors) -> "SumRanges":
        columns = (pack_hashes(column) for column in (ranges.region_ids, ranges.offsets, ranges.lengths))
        region_ids, offsets, lengths = columns
        return cls(region_ids=region_ids, offsets=offsets, lengths=lengths)

    @property
    def ranges(self) -> Descriptors:
        """The ranges.

        Raises:
            ProtocolError: the columns are invalid, or differ in length.
        """
        if len({len(self.region_ids), len(self.offsets), len(self.lengths)}) != 1 or len(self.offsets) % 8:
            raise ProtocolError(
                f"columns of {len(self.region_ids)}, {len(self.offsets)} and {len(self.lengths)} bytes; expected"
                " equal lengths, 8 bytes a range"
            )
        return Descriptors(
            unpack_hashes(self.region_ids), unpack_hashes(self.offsets), unpack_hashes(self.lengths)
        )


def decode(payload: bytes, kind: type[_W], peer: str) -> _W:
    """Decode a payload of the peer.

    Raises:
        ProtocolError: it is invalid.
    """
    try:
        return msgspec.msgpack.decode(payload, type=kind)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise ProtocolError(f"agent {peer}: a message of {len(payload)} bytes for nixl: {error}") from error
