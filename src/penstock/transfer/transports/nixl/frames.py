"""Payloads of grant requests and answers of transport `nixl`."""

from typing import Annotated, TypeVar

import msgspec

from penstock.core.errors import ProtocolError
from penstock.core.wire import Wire

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


def decode(payload: bytes, kind: type[_W], peer: str) -> _W:
    """Decode a payload of the peer.

    Raises:
        ProtocolError: it is invalid.
    """
    try:
        return msgspec.msgpack.decode(payload, type=kind)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise ProtocolError(f"agent {peer}: a message of {len(payload)} bytes for nixl: {error}") from error
