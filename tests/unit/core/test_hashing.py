import numpy as np
import pytest

from penstock.core.hashing import as_tokens, block_hashes, root_hash, siphash128, siphash128_python
from penstock.core.wire import pack_tokens

KEY = bytes(range(16))
# SipHash-2-4-128 of 00 01 02 ... under key 00 .. 0f, by message length; OpenSSL's SIPHASH (size:16) gives the same.
VECTORS = {
    0: "a3817f04ba25a8e66df67214c7550293",
    1: "da87c1d86b99af44347659119b22fc45",
    2: "8177228da4a45dc7fca38bdef60affe4",
    3: "9c70b60c5267a94e5f33b6b02985ed51",
    7: "a1f1ebbed8dbc153c0b84aa61ff08239",
    8: "3b62a9ba6258f5610f83e264f31497b4",
    15: "5493e99933b0a8117e08ec0f97cfc3d9",
    16: "6ee2a4ca67b054bbfd3315bf85230577",
    63: "5150d1772f50834a503e069a973fbd7c",
}


@pytest.mark.parametrize("siphash", [siphash128, siphash128_python])
@pytest.mark.parametrize("length", VECTORS)
def test_siphash_gives_the_reference_vectors(siphash, length):
    low, high = siphash(bytes(range(length)), KEY)
    assert low.to_bytes(8, "little") + high.to_bytes(8, "little") == bytes.fromhex(VECTORS[length])


def test_block_hashes_are_golden():
    """Stored blocks and running peers know these values: a change needs a new HASH_VERSION."""
    hashes = block_hashes(range(40), 16, b"model", [(3, b"image")], key=KEY)
    assert hashes.dtype == np.uint64
    assert hashes.tolist() == [
        [0xF8580A00E5722DCA, 0x95089C06FCA7466D],
        [0x7B06A28FCF2A0D42, 0x663E748D8B790358],
    ]


def test_a_block_is_the_siphash_of_tokens_extras_and_parent():
    tokens = np.arange(6, dtype="<i4")
    parent = root_hash(3, b"salt", key=KEY)
    extra = b"\x01\x00\x00\x00\x02\x00\x00\x00xy"  # offset in the block, length, content
    for row, message in zip(
        block_hashes(tokens, 3, b"salt", [(4, b"xy")], key=KEY),
        (tokens[:3].tobytes(), tokens[3:].tobytes() + extra),
        strict=True,
    ):
        parent = siphash128_python(
            message + parent[0].to_bytes(8, "little") + parent[1].to_bytes(8, "little"), KEY
        )
        assert tuple(row.tolist()) == parent


def test_every_form_of_tokens_gives_the_same_hashes():
    tokens = np.arange(64, dtype=np.int32)
    expected = block_hashes(tokens, 16)
    strided = np.repeat(tokens, 2)[::2]
    for form in (tokens.tolist(), range(64), tokens.astype(np.int64), strided, pack_tokens(tokens)):
        np.testing.assert_array_equal(block_hashes(form, 16), expected)


@pytest.mark.parametrize("num_tokens", [0, 1, 15])
def test_less_than_a_block_has_no_hash(num_tokens):
    assert block_hashes(range(num_tokens), 16).shape == (0, 2)


def test_the_root_covers_block_size_salt_and_key():
    roots = {root_hash(16, b""), root_hash(32, b""), root_hash(16, b"a"), root_hash(16, b"", key=KEY)}
    assert len(roots) == 4


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"block_size": 0}, "block_size: must be >= 1, got 0"),
        ({"key": b"short"}, "key: must be 16 bytes, got 5"),
        ({"extra": [(32, b"x")]}, "extra: position 32 must be ascending and below 32"),
        ({"extra": [(-1, b"x")]}, "extra: position -1 must be ascending"),
        ({"extra": [(9, b"x"), (8, b"y")]}, "extra: position 8 must be ascending"),
        ({"token_ids": [0.5]}, "token_ids: must be integers, got float64"),
        ({"token_ids": [2**31]}, "token_ids: must fit in 32 bits, got 2147483648 to 2147483648"),
        ({"token_ids": [[1], [2]]}, r"token_ids: must have one dimension, got shape \(2, 1\)"),
        ({"token_ids": b"12345"}, "multiple of element size"),
    ],
)
def test_wrong_arguments_are_named(arguments, message):
    with pytest.raises(ValueError, match=message):
        block_hashes(**({"token_ids": range(32), "block_size": 16} | arguments))


def test_as_tokens_views_packed_tokens_without_a_copy():
    packed = pack_tokens([1, 2, 3])
    assert np.shares_memory(as_tokens(packed), np.frombuffer(packed, dtype=np.uint8))
