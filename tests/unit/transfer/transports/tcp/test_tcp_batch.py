"""How a transfer is cut for streams, and how its ranges are packed for the wire."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.core.descriptors import Descriptors, RangePairs
from penstock.core.errors import ChecksumMismatch, ProtocolError
from penstock.transfer.transports.tcp.batch import Batch, check_sums, checksums_of, cut
from penstock.transfer.transports.tcp.frames import PackedRanges


def _pairs(lengths):
    lengths = np.array(lengths, np.uint64)
    starts = np.cumsum(lengths + np.uint64(3)) - lengths
    count = np.arange(len(lengths), dtype=np.uint64)
    return RangePairs(
        Descriptors(count % np.uint64(2) + np.uint64(1), starts, lengths),
        Descriptors(count % np.uint64(3) + np.uint64(7), starts * np.uint64(5), lengths),
        int(lengths.sum()),
    )


def _bytes_of(side):
    """Name every single byte: region and offset, in order."""
    return [
        (region_id, offset + index)
        for region_id, offset, length in zip(
            side.region_ids.tolist(), side.offsets.tolist(), side.lengths.tolist(), strict=True
        )
        for index in range(length)
    ]


@given(
    st.lists(st.integers(1, 40), min_size=1, max_size=30),
    st.integers(1, 9),
    st.integers(1, 12),
)
def test_pieces_are_the_whole_in_order(lengths, parts, ranges_max):
    pairs = _pairs(lengths)
    pieces = cut(pairs, parts, ranges_max)
    for side in ("local", "remote"):
        joined = [place for piece in pieces for place in _bytes_of(getattr(piece, side))]
        assert joined == _bytes_of(getattr(pairs, side))
    for piece in pieces:
        assert piece.lengths.all(), "an empty range"
        assert len(piece) <= ranges_max + 1
        assert piece.total_bytes == int(piece.lengths.sum()) <= -(-pairs.total_bytes // parts)
    assert np.array_equal(pairs.lengths, np.array(lengths, np.uint64)), "the whole was changed"


def test_ranges_are_packed_by_region():
    ranges = Descriptors.joined([Descriptors.of(9, [1, 2], [3, 4]), Descriptors.of(4, 2**63, 5)])
    packed = PackedRanges.pack(ranges, {4: b"four", 9: b"nine"})
    assert packed.regions == (4, 9)
    found, keys = packed.unpack()
    assert keys == {4: b"four", 9: b"nine"}
    assert found.region_ids.tolist() == [9, 9, 4]
    assert found.offsets.tolist() == [1, 2, 2**63]
    assert found.lengths.tolist() == [3, 4, 5]
    one = PackedRanges.pack(Descriptors.of(9, [1, 2], 3), {9: b"nine"})
    assert one.of == b""
    assert one.unpack()[0].region_ids.tolist() == [9, 9]


def _batch(data, *, checksum=True):
    addresses = np.array([data.ctypes.data, data.ctypes.data + 10], np.uint64)
    return Batch(5, addresses, np.array([10, 6], np.uint64), 16, checksum)


def test_checksums_find_the_range_that_changed():
    data = np.arange(16, dtype=np.uint8)
    batch = _batch(data)
    sums = batch.checksums()
    assert len(sums) == batch.checksums_bytes == 8
    batch.check(sums)
    data[12] += 1
    with pytest.raises(ChecksumMismatch, match="range 1, 6 bytes"):
        batch.check(sums)
    with pytest.raises(ProtocolError, match="4 bytes of checksums for 2 ranges"):
        check_sums(batch.addresses, batch.lengths, checksums_of(batch.addresses[:1], batch.lengths[:1]))
    assert _batch(data, checksum=False).checksums() == b""
