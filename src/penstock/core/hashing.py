"""Names of KV blocks: chained, keyed, 128-bit hashes of token ids.

SipHash-2-4 with 128-bit output, keyed with the deployment's `hash_key`. A root is the hash of salt and
block size; a block's hash covers its tokens, its extras and then its parent's hash. The parent comes last,
so that the tokens of many blocks are absorbed side by side and only the short tail is sequential.
Every native function here has its Python twin (`*_python`), which is the oracle.

Source: Aumasson and Bernstein, "SipHash: a fast short-input PRF", 2012; parent-chained prefix hashes as in
vLLM v1 prefix caching. The choice and its odds of collision: docs/decisions/0003.
"""

import struct
from collections.abc import Sequence

import numpy as np

from penstock.core.wire import HashArray, TokenArray

try:
    from penstock import _native
except ImportError:  # installed with PENSTOCK_NATIVE=OFF
    _native = None  # type: ignore[assignment]

HASH_VERSION = 1
"""Raised whenever the same tokens would get another hash; part of every root and of `hello`."""
KEY_BYTES = 16
DEFAULT_KEY = bytes(KEY_BYTES)
"""For tests and single processes; a deployment makes its own and keeps it."""

Extra = Sequence[tuple[int, bytes]]
_MASK = (1 << 64) - 1


def block_hashes(
    token_ids: Sequence[int] | TokenArray | bytes,
    block_size: int,
    salt: bytes = b"",
    extra: Extra = (),
    *,
    key: bytes = DEFAULT_KEY,
    parent: tuple[int, int] | None = None,
) -> HashArray:
    """Hash every full block, each chained to its parent.

    Equal hashes mean equal prefixes, so a hash is the key everywhere: pool, tiers, events, router.

    Args:
        token_ids: (num_tokens,) int32, or those packed as little-endian bytes, or a sequence of ints.
        block_size: tokens in a block.
        salt: model revision, KV dtype, tenant and the like; different salts never share blocks.
        extra: (token position in `token_ids`, content) of images and the like, in order of position.
        key: 16 bytes, the deployment's.
        parent: the hash before the first block, to go on where another call ended; None starts at the root.

    Returns:
        (num_tokens // block_size, 2) uint64, column 0 is `low64`; a trailing partial block has no hash.

    Raises:
        ValueError: block_size < 1, a key that is not 16 bytes, or an extra position out of order or range.
    """
    if block_size < 1:
        raise ValueError(f"block_size: must be >= 1, got {block_size}")
    if len(key) != KEY_BYTES:
        raise ValueError(f"key: must be {KEY_BYTES} bytes, got {len(key)}")
    tokens = as_tokens(token_ids)
    _check_extra(extra, len(tokens))
    first = parent if parent is not None else root_hash(block_size, salt, key=key)
    hash_blocks = block_hashes_python if _native is None else _native.block_hashes
    return hash_blocks(tokens, block_size, first, _extra_by_block(extra, block_size), key)


def root_hash(block_size: int, salt: bytes, *, key: bytes = DEFAULT_KEY) -> tuple[int, int]:
    """Hash what is before the first block: hash version, block size and salt."""
    return siphash128(struct.pack("<4sII", b"root", HASH_VERSION, block_size) + salt, key)


def as_tokens(token_ids: Sequence[int] | TokenArray | bytes) -> TokenArray:
    """View or convert token ids as a contiguous (num_tokens,) int32 array."""
    if isinstance(token_ids, (bytes, bytearray, memoryview)):
        return np.frombuffer(token_ids, dtype="<i4")
    return np.ascontiguousarray(token_ids, dtype="<i4")


def _check_extra(extra: Extra, num_tokens: int) -> None:
    last = 0
    for position, _ in extra:
        if not last <= position < num_tokens:
            raise ValueError(
                f"extra: position {position} must be ascending and below {num_tokens}, the number of tokens"
            )
        last = position


def _extra_by_block(extra: Extra, block_size: int) -> dict[int, bytes]:
    """Encode extras per block as (offset in block, length, content), self-delimiting."""
    by_block: dict[int, bytes] = {}
    for position, content in extra:
        index, offset = divmod(position, block_size)
        by_block[index] = by_block.get(index, b"") + struct.pack("<II", offset, len(content)) + content
    return by_block


def block_hashes_python(
    tokens: TokenArray, block_size: int, first: tuple[int, int], extra: dict[int, bytes], key: bytes
) -> HashArray:
    """Do what the native `block_hashes` does: message of a block = tokens, extras, parent's low and high half."""
    num_blocks = len(tokens) // block_size
    out = np.empty((num_blocks, 2), dtype=np.uint64)
    parent = first
    for index in range(num_blocks):
        message = tokens[index * block_size : (index + 1) * block_size].tobytes() + extra.get(index, b"")
        parent = siphash128(message + struct.pack("<QQ", *parent), key)
        out[index] = parent
    return out


def siphash128(data: bytes, key: bytes) -> tuple[int, int]:
    """SipHash-2-4 with 128-bit output.

    Returns:
        (low64, high64): the first and the last 8 bytes of the digest as little-endian integers.
    """
    k0, k1 = struct.unpack("<QQ", key)
    state = (
        k0 ^ 0x736F6D6570736575,
        k1 ^ 0x646F72616E646F6D ^ 0xEE,
        k0 ^ 0x6C7967656E657261,
        k1 ^ 0x7465646279746573,
    )
    tail = data[len(data) & ~7 :]
    words = [*struct.unpack(f"<{len(data) // 8}Q", data[: len(data) & ~7])]
    words.append((len(data) & 0xFF) << 56 | int.from_bytes(tail, "little"))
    for word in words:
        v0, v1, v2, v3 = state
        v0, v1, v2, v3 = _rounds(v0, v1, v2, v3 ^ word, 2)
        state = (v0 ^ word, v1, v2, v3)
    v0, v1, v2, v3 = state
    v0, v1, v2, v3 = _rounds(v0, v1, v2 ^ 0xEE, v3, 4)
    low = v0 ^ v1 ^ v2 ^ v3
    v0, v1, v2, v3 = _rounds(v0, v1 ^ 0xDD, v2, v3, 4)
    return low, v0 ^ v1 ^ v2 ^ v3


def _rounds(v0: int, v1: int, v2: int, v3: int, count: int) -> tuple[int, int, int, int]:
    for _ in range(count):
        v0 = (v0 + v1) & _MASK
        v1 = ((v1 << 13) & _MASK | v1 >> 51) ^ v0
        v0 = (v0 << 32) & _MASK | v0 >> 32
        v2 = (v2 + v3) & _MASK
        v3 = ((v3 << 16) & _MASK | v3 >> 48) ^ v2
        v0 = (v0 + v3) & _MASK
        v3 = ((v3 << 21) & _MASK | v3 >> 43) ^ v0
        v2 = (v2 + v1) & _MASK
        v1 = ((v1 << 17) & _MASK | v1 >> 47) ^ v2
        v2 = (v2 << 32) & _MASK | v2 >> 32
    return v0, v1, v2, v3
