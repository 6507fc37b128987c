"""Names of KV blocks: chained, keyed, 128-bit hashes of token ids.

SipHash-2-4 with 128-bit output, keyed with the deployment's `hash_key`. The root hash covers salt and
block size. A block's hash covers its tokens, its extras and last its parent's hash. With the parent last,
the tokens of many blocks are absorbed in parallel and only the short tail is sequential.
Every native function here has a Python reference (`*_python`), which is the oracle in tests.

Source: Aumasson and Bernstein, "SipHash: a fast short-input PRF", 2012; parent-chained prefix hashes as in
vLLM v1 prefix caching. The choice and its odds of collision: docs/decisions/0003.
"""

import struct
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.core.native import native
from penstock.core.wire import HashArray, TokenArray

HASH_VERSION = 1
"""Increment it when the same tokens would get another hash. Part of every root hash and of the `hello` message."""
KEY_BYTES = 16
DEFAULT_KEY = bytes(KEY_BYTES)
"""For tests and single processes; a deployment generates its own key and stores it."""

Extra = Sequence[tuple[int, bytes]]

_MASK = (1 << 64) - 1
_TOKEN_BYTES = 4
_WORD_BYTES = 8
_SIDE_BY_SIDE_BLOCKS = 24
"""From this many blocks on numpy absorbs tokens faster than a loop over blocks (measured at block size 16)."""


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
        token_ids: (num_tokens,) int32, or the same packed as little-endian bytes, or a sequence of ints.
        block_size: tokens in a block.
        salt: model revision, KV dtype, tenant and the like; different salts never share blocks.
        extra: (token position in `token_ids`, content) of images and the like, in order of position.
        key: 16 bytes, the deployment's hash key.
        parent: hash of the block before the first one, to continue a chain; None starts at the root.

    Returns:
        (num_tokens // block_size, 2) uint64, column 0 is `low64`; a trailing partial block has no hash.

    Raises:
        ValueError: block_size < 1, a key that is not 16 bytes, an extra position out of order or range, or
            token ids that are not 32-bit integers in one dimension.
    """
    if block_size < 1:
        raise ValueError(f"block_size: must be >= 1, got {block_size}")
    tokens = as_tokens(token_ids)
    first = root_hash(block_size, salt, key=key) if parent is None else parent
    by_block = _extra_by_block(extra, block_size, len(tokens)) if extra else {}
    if native is None:
        return block_hashes_python(tokens, block_size, first, by_block, key)
    hashes: HashArray = native.block_hashes(tokens, block_size, first, by_block, key)
    return hashes


def root_hash(block_size: int, salt: bytes, *, key: bytes = DEFAULT_KEY) -> tuple[int, int]:
    """Hash version, block size and salt: the parent of every first block."""
    return siphash128(struct.pack("<4sII", b"root", HASH_VERSION, block_size) + salt, key)


def siphash128(data: bytes, key: bytes) -> tuple[int, int]:
    """Compute SipHash-2-4 with 128-bit output.

    Args:
        data: any length.
        key: 16 bytes.

    Returns:
        (low64, high64): the first and the last 8 bytes of the digest as little-endian integers.

    Raises:
        ValueError: `key` is not 16 bytes long.
    """
    if len(key) != KEY_BYTES:
        raise ValueError(f"key: must be {KEY_BYTES} bytes, got {len(key)}")
    if native is None:
        return siphash128_python(data, key)
    digest: tuple[int, int] = native.siphash128(data, key)
    return digest


def as_tokens(token_ids: Sequence[int] | TokenArray | bytes) -> TokenArray:
    """View or convert token ids as a contiguous (num_tokens,) int32 array.

    Raises:
        ValueError: ids are no integers, exceed 32 bits or are not one-dimensional, or packed bytes end within an id.
    """
    if isinstance(token_ids, bytes | bytearray | memoryview):
        return np.frombuffer(token_ids, dtype="<i4")
    array: NDArray[Any] = np.asarray(token_ids)
    if array.ndim != 1:
        raise ValueError(f"token_ids: must have one dimension, got shape {array.shape}")
    if array.dtype != np.int32 and array.size:
        if array.dtype.kind not in "iu":
            raise ValueError(f"token_ids: must be integers, got {array.dtype}")
        info = np.iinfo(np.int32)
        if not info.min <= int(array.min()) <= int(array.max()) <= info.max:
            raise ValueError(f"token_ids: must fit in 32 bits, got {array.min()} to {array.max()}")
    return np.ascontiguousarray(array, dtype="<i4")


def _extra_by_block(extra: Extra, block_size: int, num_tokens: int) -> dict[int, bytes]:
    """Check extras and encode them per block as (offset in block, length, content), self-delimiting."""
    by_block: dict[int, bytes] = {}
    last = 0
    for position, content in extra:
        if not last <= position < num_tokens:
            raise ValueError(
                f"extra: position {position} must be ascending and below {num_tokens}, the number of tokens"
            )
        last = position
        index, offset = divmod(position, block_size)
        by_block[index] = by_block.get(index, b"") + struct.pack("<II", offset, len(content)) + content
    return by_block


def block_hashes_python(
    tokens: TokenArray, block_size: int, first: tuple[int, int], extra: dict[int, bytes], key: bytes
) -> HashArray:
    """Reference of the native `block_hashes`; a block's message is its tokens, its extras, its parent's low and high half."""
    num_blocks = len(tokens) // block_size
    blocks = tokens[: num_blocks * block_size].reshape(num_blocks, block_size)
    num_words = block_size * _TOKEN_BYTES // _WORD_BYTES if num_blocks >= _SIDE_BY_SIDE_BLOCKS else 0
    states = _absorb_side_by_side(blocks, num_words, key)
    absorbed_bytes = num_words * _WORD_BYTES
    out = np.empty((num_blocks, 2), dtype=np.uint64)
    parent = first
    for index, state in enumerate(states):
        message = blocks[index].tobytes() + extra.get(index, b"") + struct.pack("<QQ", *parent)
        parent = _digest(state, message, absorbed_bytes)
        out[index] = parent
    return out


def siphash128_python(data: bytes, key: bytes) -> tuple[int, int]:
    """Reference of the native `siphash128`."""
    return _digest(_initial_state(key), data, 0)


_State = tuple[int, int, int, int]


def _initial_state(key: bytes) -> _State:
    k0, k1 = struct.unpack("<QQ", key)
    return (
        k0 ^ 0x736F6D6570736575,
        k1 ^ 0x646F72616E646F6D ^ 0xEE,
        k0 ^ 0x6C7967656E657261,
        k1 ^ 0x7465646279746573,
    )


def _digest(state: _State, data: bytes, absorbed_bytes: int) -> tuple[int, int]:
    """Absorb `data` after its first `absorbed_bytes` (whole words, already in `state`), and finish."""
    end = len(data) & ~7
    words = [*struct.unpack_from(f"<{(end - absorbed_bytes) // _WORD_BYTES}Q", data, absorbed_bytes)]
    words.append((len(data) & 0xFF) << 56 | int.from_bytes(data[end:], "little"))
    v0, v1, v2, v3 = state
    for word in words:
        v0, v1, v2, v3 = _rounds(v0, v1, v2, v3 ^ word, 2)
        v0 ^= word
    v0, v1, v2, v3 = _rounds(v0, v1, v2 ^ 0xEE, v3, 4)
    low = v0 ^ v1 ^ v2 ^ v3
    v0, v1, v2, v3 = _rounds(v0, v1 ^ 0xDD, v2, v3, 4)
    return low, v0 ^ v1 ^ v2 ^ v3


def _rounds(v0: int, v1: int, v2: int, v3: int, count: int) -> _State:
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


def _absorb_side_by_side(blocks: TokenArray, num_words: int, key: bytes) -> list[_State]:
    """Absorb the first `num_words` words of every block in parallel; return the state of each block."""
    num_blocks = len(blocks)
    v0, v1, v2, v3 = (np.full(num_blocks, word, dtype=np.uint64) for word in _initial_state(key))
    whole = np.ascontiguousarray(blocks[:, : num_words * _WORD_BYTES // _TOKEN_BYTES])
    for word in whole.view("<u8").T:
        v3 ^= word
        for _ in range(2):
            v0 += v1
            v1 = _rotate_left(v1, 13) ^ v0
            v0 = _rotate_left(v0, 32)
            v2 += v3
            v3 = _rotate_left(v3, 16) ^ v2
            v0 += v3
            v3 = _rotate_left(v3, 21) ^ v0
            v2 += v1
            v1 = _rotate_left(v1, 17) ^ v2
            v2 = _rotate_left(v2, 32)
        v0 ^= word
    return list(zip(v0.tolist(), v1.tolist(), v2.tolist(), v3.tolist(), strict=True))


def _rotate_left(words: NDArray[np.uint64], bits: int) -> NDArray[np.uint64]:
    return words << np.uint64(bits) | words >> np.uint64(64 - bits)
