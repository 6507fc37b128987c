"""What crosses a process boundary: frozen structs in msgpack, token ids and hashes packed.

Packed token ids are little-endian int32 bytes: 32,768 ids decode in 3 us this way and in 735 us as a
tuple of ints (measured, 2 cores of an AMD EPYC). Packed hashes are little-endian uint64 bytes.
"""

import struct
from collections.abc import Iterable
from typing import Any, NewType

import msgspec
import numpy as np
from numpy.typing import NDArray

WIRE_VERSION = 1
"""Increment it when an old peer could misread a frame. `hello` carries it; version N talks to N and N-1."""

PackedTokens = NewType("PackedTokens", bytes)  # little-endian int32
PackedHashes = NewType("PackedHashes", bytes)  # little-endian uint64: `low64` of each block hash
NO_TOKENS = PackedTokens(b"")

_HASH = np.dtype("<u8")  # parsed once, not for each array

TokenArray = NDArray[np.int32]
HashArray = NDArray[np.uint64]
Hashes = HashArray | bytes
"""(n,) uint64 of any stride, or the same as packed little-endian bytes."""


class Wire(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Base of every message: immutable, keyword-only. New fields go last and have defaults; unknown fields are ignored."""


def pack_tokens(token_ids: Iterable[int] | TokenArray) -> PackedTokens:
    if not isinstance(token_ids, np.ndarray):
        token_ids = np.fromiter(token_ids, dtype="<i4")
    return PackedTokens(token_ids.astype("<i4", copy=False).tobytes())


def unpack_tokens(packed: bytes) -> TokenArray:
    """View packed token ids as a read-only (num_tokens,) int32 array, without a copy."""
    return np.frombuffer(packed, dtype="<i4")


def token_list(packed: bytes) -> list[int]:
    """Unpack the few token ids of a step: 0.5 us, half the time of `unpack_tokens(packed).tolist()` (same machine)."""
    return list(struct.unpack(f"<{len(packed) >> 2}i", packed))


def num_tokens(packed: bytes) -> int:
    return len(packed) >> 2


def pack_hashes(hashes: Iterable[int] | HashArray) -> PackedHashes:
    if not isinstance(hashes, np.ndarray):
        hashes = np.fromiter(hashes, dtype="<u8")
    return PackedHashes(hashes.astype("<u8", copy=False).tobytes())


def unpack_hashes(packed: bytes) -> HashArray:
    """View packed hashes as a read-only (n,) uint64 array, without a copy."""
    return np.frombuffer(packed, dtype=_HASH)


def hash_list(hashes: Hashes) -> list[int]:
    """Convert hashes to a list of Python ints.

    Raises:
        TypeError: `hashes` is neither bytes nor a one-dimensional uint64 array.
    """
    if isinstance(hashes, bytes | bytearray | memoryview):
        return unpack_hashes(hashes).tolist()  # type: ignore[no-any-return]
    if hashes.dtype != np.uint64 or hashes.ndim != 1:
        raise TypeError("hashes: must be uint64 in one dimension, or those packed as bytes")
    return hashes.tolist()  # type: ignore[no-any-return]


_encoder = msgspec.msgpack.Encoder()


def encode(message: Any) -> bytes:
    return _encoder.encode(message)
