import numpy as np
import pytest

from penstock.transfer.regions.ranges import checksum_ranges, checksum_ranges_python

IMPLEMENTATIONS = pytest.mark.parametrize("sums_of", [checksum_ranges, checksum_ranges_python])


def crc32c(data, sums_of=checksum_ranges) -> int:
    array = np.frombuffer(data, np.uint8)
    (total,) = sums_of(np.array([array.ctypes.data], np.uint64), np.array([array.size], np.uint64))
    return int(total)


@IMPLEMENTATIONS
@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (b"", 0),
        (b"123456789", 0xE3069283),
        (bytes(32), 0x8A9136AA),
        (b"\xff" * 32, 0x62A8AB43),
        (bytes(range(32)), 0x46DD794E),
        (bytes(range(31, -1, -1)), 0x113FDB5C),
    ],
)
def test_published_sums(sums_of, data, expected):
    assert crc32c(data, sums_of) == expected


@pytest.mark.parametrize("size", [1, 7, 8, 9, 255, 256, 257, 384, 385, 511, 513, 1000, 3000])
def test_the_definition(size):
    data = np.random.default_rng(size).integers(0, 256, size, np.uint8).tobytes()
    total = 0xFFFFFFFF
    for byte in data:
        total ^= byte
        for _ in range(8):
            total = total >> 1 ^ (0x82F63B78 if total & 1 else 0)
    assert crc32c(data) == total ^ 0xFFFFFFFF


def test_columns_of_other_lengths_or_types_are_refused():
    with pytest.raises(ValueError, match="of them"):
        checksum_ranges(np.zeros(2, np.uint64), np.zeros(1, np.uint64))
    with pytest.raises(TypeError):
        checksum_ranges(np.zeros(2, np.int64), np.zeros(2, np.int64))
