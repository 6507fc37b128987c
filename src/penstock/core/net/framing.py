"""Frames: four length bytes (little-endian) and one msgpack message with a tag.

Unknown fields are ignored and missing ones take their defaults, so that neighbouring versions understand each
other; a frame with an unknown tag is given as `UnknownFrame`, to be counted and skipped.
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
    """Stands for a frame that a newer peer sent: its tag, or the known one with something new inside."""

    tag: str


class _Tag(Wire, frozen=True):
    type: str


_ERRORS = (msgspec.DecodeError, RecursionError, UnicodeDecodeError)
_tag_decoder = msgspec.msgpack.Decoder(_Tag)


class FrameCodec(Generic[M]):
    """Encodes and decodes one connection's messages."""

    def __init__(self, union: Any, *, lenient_tags: tuple[str, ...] = ()) -> None:
        """Know the messages of `union`.

        Args:
            union: tagged structs.
            lenient_tags: messages whose unknown content makes them an `UnknownFrame` and not an error.
        """
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(union)
        self.tags = frozenset(str(kind.__struct_config__.tag) for kind in union.__args__)
        """Of every message it knows."""
        self._strict_tags = self.tags - {*lenient_tags}

    def encode(self, message: M) -> bytes:
        """Encode one message with its length in front."""
        frame = bytearray(LENGTH_BYTES)
        self._encoder.encode_into(message, frame, LENGTH_BYTES)
        frame[:LENGTH_BYTES] = (len(frame) - LENGTH_BYTES).to_bytes(LENGTH_BYTES, "little")
        return bytes(frame)

    def decode(self, payload: bytes) -> M | UnknownFrame:
        """Decode one message, its length taken off.

        Raises:
            ProtocolError: it is no message, or a known one with impossible content.
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
    """Cuts a stream of bytes into frames. Holds less than one frame and one read; no byte is moved more than twice."""

    def __init__(self, frame_bytes_max: int) -> None:
        self.frame_bytes_max = frame_bytes_max
        self._buffer = bytearray()

    @property
    def buffered_bytes(self) -> int:
        return len(self._buffer)

    def feed(self, data: bytes) -> list[bytes]:
        """Take what arrived and give every frame that is complete now, lengths taken off.

        Raises:
            ProtocolError: a frame is longer than `frame_bytes_max`; the stream cannot be read any further.
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
