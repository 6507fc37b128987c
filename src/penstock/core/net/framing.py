"""Frames: four length bytes (little-endian) and one msgpack message with a tag.

Unknown fields are ignored and missing fields take their defaults, so that neighbouring versions understand each
other. A frame with an unknown tag decodes to `UnknownFrame`, which receivers count and skip.
"""

from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import msgspec

from penstock.core.errors import ProtocolError
from penstock.core.wire import Wire

LENGTH_BYTES = 4

M = TypeVar("M")


class Ping(Wire, frozen=True, tag="ping"):
    """Sent to a peer that has been silent for a while; `Pong` answers."""


class Pong(Wire, frozen=True, tag="pong"):
    pass


class Goodbye(Wire, frozen=True, tag="goodbye"):
    """The sender is about to close the connection on purpose."""

    reason: str = ""


@dataclass(frozen=True, slots=True)
class UnknownFrame:
    """A frame of a newer peer: its tag is unknown, or known and lenient with content that does not decode."""

    tag: str


class _Tag(Wire, frozen=True):
    type: str


_ERRORS = (msgspec.DecodeError, RecursionError, UnicodeDecodeError)
_tag_decoder = msgspec.msgpack.Decoder(_Tag)


class FrameCodec(Generic[M]):
    """Encodes and decodes one connection's messages."""

    def __init__(self, union: Any, *, lenient_tags: tuple[str, ...] = ()) -> None:
        """Prepare encoder and decoder.

        Args:
            union: union of the tagged structs of this connection.
            lenient_tags: tags of messages that decode to `UnknownFrame`, not an error, if their content is unknown.
        """
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(union)
        self.tags = frozenset(str(kind.__struct_config__.tag) for kind in union.__args__)
        """Tags of all messages of `union`."""
        self._strict_tags = self.tags - {*lenient_tags}

    def encode(self, message: M) -> bytes:
        """Encode one message, length bytes included."""
        frame = bytearray(LENGTH_BYTES)
        self._encoder.encode_into(message, frame, LENGTH_BYTES)
        frame[:LENGTH_BYTES] = (len(frame) - LENGTH_BYTES).to_bytes(LENGTH_BYTES, "little")
        return bytes(frame)

    def decode(self, payload: bytes) -> M | UnknownFrame:
        """Decode one message without its length bytes.

        Raises:
            ProtocolError: the payload is no message, or a known message with invalid content.
        """
        try:
            message: M = self._decoder.decode(payload)
        except _ERRORS as error:
            tag = _tag_of(payload)
            if tag is None or tag in self._strict_tags:
                raise ProtocolError(
                    f"frame of {len(payload)} bytes, tag {tag or 'none'}: {error}; "
                    "the peer is broken or no Penstock"
                ) from error
            return UnknownFrame(tag)
        return message


def _tag_of(payload: bytes) -> str | None:
    try:
        return _tag_decoder.decode(payload).type
    except _ERRORS:
        return None


class FrameReader:
    """Cuts a stream of bytes into frames. Buffers less than one frame plus one read; copies no byte more than twice."""

    def __init__(self, frame_bytes_max: int) -> None:
        self.frame_bytes_max = frame_bytes_max
        self._buffer = bytearray()

    @property
    def buffered_bytes(self) -> int:
        """Bytes of incomplete frames that it holds."""
        return len(self._buffer)

    def feed(self, data: bytes) -> list[bytes]:
        """Add received bytes; return every frame that is complete now, without length bytes.

        Raises:
            ProtocolError: a frame is longer than `frame_bytes_max`; the rest of the stream is unreadable.
        """
        if not self._buffer:
            frames, used = self._cut(data)
            self._buffer += memoryview(data)[used:]
            return frames
        self._buffer += data
        frames, used = self._cut(self._buffer)
        del self._buffer[:used]  # moves a pointer, not the rest
        return frames

    def _cut(self, data: bytes | bytearray) -> tuple[list[bytes], int]:
        frames: list[bytes] = []
        start = 0
        with memoryview(data) as view:
            while len(data) - start >= LENGTH_BYTES:
                length = int.from_bytes(view[start : start + LENGTH_BYTES], "little")
                if length > self.frame_bytes_max:
                    raise ProtocolError(
                        f"frame of {length} bytes: the limit is {self.frame_bytes_max} (frame_bytes_max); "
                        "raise it on both sides, or the peer is no Penstock"
                    )
                end = start + LENGTH_BYTES + length
                if end > len(data):
                    break
                frames.append(bytes(view[start + LENGTH_BYTES : end]))
                start = end
        return frames, start
