"""Frames of messages on a connection between processes, and the greeting that begins one."""

import asyncio
import contextlib
import fcntl
import hashlib
import hmac
import secrets
import sys
import termios
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


UNAUTHENTICATED_FRAME_BYTES_MAX = 4096
"""The longest frame that is read from a peer before its proof."""
NONCE_BYTES = 16
_NEIGHBOURS = 1


class Challenge(Wire, frozen=True, tag="challenge"):
    """The listening side's first frame. `version` is the version of the plane's protocol; `nonce` is new for every connection."""

    version: int
    nonce: bytes

    @classmethod
    def new(cls, version: int) -> "Challenge":
        return cls(version=version, nonce=new_nonce())


def new_nonce() -> bytes:
    return secrets.token_bytes(NONCE_BYTES)


def prove(key: bytes, purpose: bytes, *nonces: bytes) -> bytes:
    """Compute the proof of `key` for one purpose; proofs of different purposes differ."""
    return hmac.digest(key, purpose + b"".join(nonces), hashlib.sha256)


def check_proof(theirs: bytes, ours: bytes, error: str) -> None:
    """Compare a peer's proof with the expected one in constant time.

    Raises:
        ProtocolError: with the text `error`, if they differ.
    """
    if not hmac.compare_digest(theirs, ours):
        raise ProtocolError(error)


def check_version(theirs: int, ours: int, what: str) -> None:
    """Accept a peer's version if it is ours or a neighbour of ours.

    Args:
        theirs: the peer's version.
        ours: this process's version.
        what: begins the error's text, before `theirs`.

    Raises:
        ProtocolError: the versions are incompatible.
    """
    if abs(theirs - ours) > _NEIGHBOURS:
        raise ProtocolError(
            f"{what} {theirs}, this process {ours} and its neighbours; bring both to the same release of Penstock"
        )


_INT_BYTES = 4


def unsent_bytes(transport: asyncio.WriteTransport | None) -> int:
    """Count unsent bytes in this process and in the kernel, which accepts more only in large parts; 0 once disconnected."""
    if transport is None:
        return 0
    sock = transport.get_extra_info("socket")
    in_kernel = bytearray(_INT_BYTES)
    with contextlib.suppress(OSError):  # disconnected
        fcntl.ioctl(sock.fileno(), termios.TIOCOUTQ, in_kernel)
    return transport.get_write_buffer_size() + int.from_bytes(in_kernel, sys.byteorder)
