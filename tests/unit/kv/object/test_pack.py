"""Heads of packs: what was made is read, and hostile bytes are one error."""

import hashlib
import struct

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.kv.namespace import Namespace
from penstock.transfer.regions.checksum import crc32c
from penstock.transfer.storage.packs import (
    BLOCKS_MAX,
    RECORD,
    Pack,
    PackDamaged,
    count_blocks,
    head_bytes,
    make_head,
    parse_head,
)
from tests.support.slots import BLOCK_BYTES, NAMESPACE, chain

COUNT = 3
SIZE = head_bytes(COUNT) + COUNT * BLOCK_BYTES


def records(count: int = COUNT) -> np.ndarray:
    rows = np.zeros(count, RECORD)
    rows["hash"] = chain(count)
    rows["parent"][1:] = rows["hash"][:-1, 0]
    rows["length"], rows["data_sum"] = BLOCK_BYTES, np.arange(count) + 7
    return rows


NAME, HEAD = make_head(NAMESPACE.digest, BLOCK_BYTES, records())


def parse(data: bytes, name: str = NAME, size_bytes: int = SIZE, **other) -> Pack:
    expected = {"namespace": NAMESPACE.digest, "block_bytes": BLOCK_BYTES} | other
    return parse_head(name, data, size_bytes, **expected)


def test_a_head_says_where_each_block_is():
    assert count_blocks(HEAD) == COUNT
    pack = parse(HEAD + b"what follows is data")
    assert (pack.records == records()).all()
    assert (pack.hashes == chain(COUNT)).all()
    assert pack.offsets.tolist() == [len(HEAD) + n * BLOCK_BYTES for n in range(COUNT)]
    assert pack.size_bytes == SIZE


def test_equal_blocks_give_one_name_and_others_another():
    assert make_head(NAMESPACE.digest, BLOCK_BYTES, records())[0] == NAME
    other = records()
    other["data_sum"][1] += 1
    assert make_head(NAMESPACE.digest, BLOCK_BYTES, other)[0] != NAME


@pytest.mark.parametrize("field", ["model_digest", "dtype", "layout", "block_size", "salt", "adapter"])
def test_a_pack_of_another_namespace_is_refused(field: str):
    fields = {name: getattr(NAMESPACE, name) for name in NAMESPACE.__struct_fields__}
    fields[field] = 8 if field == "block_size" else b"x" if field == "salt" else "x"
    name, head = make_head(Namespace(**fields).digest, BLOCK_BYTES, records())
    with pytest.raises(PackDamaged, match="is of namespace"):
        parse(head, name)


@pytest.mark.parametrize(
    ("data", "size", "text"),
    [
        (b"", SIZE, "at least 48 bytes, and not 0"),
        (b"x" * 200, SIZE, "no pack of version 1: it begins with 7878"),
        (HEAD[:8] + struct.pack("<I", 2) + HEAD[12:], SIZE, "no pack of version 1"),
        (HEAD[:12] + struct.pack("<I", 0) + HEAD[16:], SIZE, f"1 to {BLOCKS_MAX} blocks, and not 0"),
        (HEAD[:12] + struct.pack("<I", 1 << 31) + HEAD[16:], SIZE, "blocks, and not 2147483648"),
        (HEAD[:12] + struct.pack("<I", 4) + HEAD[16:], SIZE, "the head has 176 bytes, but only 144"),
        (HEAD[:-1], SIZE, "the head has 144 bytes, but only 143"),
        (HEAD[:60] + b"?" + HEAD[61:], SIZE, "its head has digest"),
        (HEAD, SIZE - 1, f"has {SIZE - 1} bytes, and not {SIZE}"),
    ],
)
def test_what_is_no_such_pack_is_refused_with_the_reason(data: bytes, size: int, text: str):
    with pytest.raises(PackDamaged, match=text):
        parse(data, size_bytes=size)


def test_blocks_of_another_size_are_refused():
    with pytest.raises(PackDamaged, match="has blocks of 8192 bytes, and not 4096"):
        parse(HEAD, block_bytes=4096)


@settings(max_examples=3 * settings.default.max_examples, deadline=None)
@given(
    changes=st.lists(st.tuples(st.integers(0, len(HEAD) - 1), st.binary(min_size=1, max_size=9)), max_size=4),
    cut=st.integers(0, len(HEAD)) | st.none(),
    rest=st.binary(max_size=40),
)
def test_any_other_bytes_under_the_name_are_one_error(changes, cut, rest):
    data = bytearray(HEAD)
    for at, new in changes:
        data[at : at + len(new)] = new
    data = bytes(data[:cut]) + rest
    if data.startswith(HEAD):
        assert (parse(data).records == records()).all()
    else:
        with pytest.raises(PackDamaged):
            parse(data)


@settings(max_examples=3 * settings.default.max_examples, deadline=None)
@given(
    count=st.integers(0, 20) | st.integers(0, 2**32 - 1), rows=st.integers(0, 8), size=st.integers(0, 2**63)
)
def test_a_forged_head_under_a_name_that_fits_stays_within_its_bytes(count, rows, size):
    """Whoever may write to the bucket can make a head that fits its name and checksum."""
    forged = bytearray(HEAD[:48] + (records(rows).tobytes() if rows else b""))
    struct.pack_into("<I", forged, 12, count)
    struct.pack_into("<I", forged, 40, 0)
    struct.pack_into("<I", forged, 40, crc32c(np.frombuffer(forged, np.uint8)))
    name = hashlib.blake2b(forged, digest_size=16).hexdigest()
    right = head_bytes(rows) + rows * BLOCK_BYTES
    try:
        pack = parse(bytes(forged), name, size)
    except PackDamaged:
        if rows and count == rows:
            assert size != right
            assert len(parse(bytes(forged), name, right).offsets) == rows
    else:
        assert (count, size) == (rows, right)
        assert pack.offsets[-1] + BLOCK_BYTES == size
