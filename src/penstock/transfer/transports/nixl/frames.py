"""What the `nixl` transports of two agents tell each other in requests for memory and their answers."""

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
    """The answer to a request for regions: NIXL's metadata of these, and where each begins there."""

    metadata: bytes
    places: dict[int, Place]


class Known(Wire, frozen=True):
    """The answer to a request without regions: metadata of NIXL's agent, and random bytes that can be read there as a test."""

    metadata: bytes
    nonce: bytes
    address: Annotated[int, msgspec.Meta(ge=0)]


class SumRanges(Wire, frozen=True):
    """The payload of a request to sum ranges; columns of little-endian uint64. The answer is a little-endian uint32 for each."""

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


def decode(payload: bytes, kind: type[_W], peer: str) -> _W:
    """Read what the peer's transport sent.

    Raises:
        ProtocolError: it is no such message.
    """
    try:
        return msgspec.msgpack.decode(payload, type=kind)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise ProtocolError(f"agent {peer}: a message of {len(payload)} bytes for nixl: {error}") from error
