"""What the `cuda` transports of two processes say to each other over a link."""

from typing import Annotated

import msgspec

from penstock.core.descriptors import TransferOp
from penstock.core.errors import ErrorInfo, ProtocolError
from penstock.core.wire import Wire, encode


class CudaWay(Wire, frozen=True):
    """Where a region is. `bus_id` names its device, "" for memory of a process."""

    address: Annotated[int, msgspec.Meta(ge=0)]
    bus_id: str = ""


class Ask(Wire, frozen=True, tag="ask"):
    """May I read, or write, this region of device memory? `number` comes back with the answer."""

    number: int
    region_id: int
    key: bytes
    op: TransferOp


class Shared(Wire, frozen=True, tag="shared"):
    """You may: a handle, and where in what it names the region begins. Or `error`."""

    number: int
    handle: bytes = b""
    offset: Annotated[int, msgspec.Meta(ge=0)] = 0
    error: ErrorInfo | None = None


class Gone(Wire, frozen=True, tag="gone"):
    """A region was deregistered: let go of what it was shared by."""

    region_id: int


CudaFrame = Ask | Shared | Gone

_frames: msgspec.msgpack.Decoder[CudaFrame] = msgspec.msgpack.Decoder(CudaFrame)
_ways = msgspec.msgpack.Decoder(CudaWay)


def decode_frame(payload: bytes, peer: str) -> CudaFrame:
    """Read what the peer's transport sent.

    Raises:
        ProtocolError: it is no such message.
    """
    try:
        return _frames.decode(payload)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise ProtocolError(f"agent {peer}: a message of {len(payload)} bytes for cuda: {error}") from error


def decode_way(payload: bytes) -> CudaWay | None:
    """Read where a region is; None if it is not said."""
    try:
        return _ways.decode(payload)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None


def encode_frame(frame: CudaFrame | CudaWay) -> bytes:
    return encode(frame)
