import numpy as np
import pytest

from penstock.core.native import native
from penstock.transfer.regions import checksum
from penstock.transfer.regions.checksum import checksum_ranges


@pytest.fixture(params=["native", "python"], autouse=True)
def implementation(request, monkeypatch):
    if request.param == "python":
        monkeypatch.setattr(checksum, "native", None)
    elif native is None:
        pytest.skip("installed with PENSTOCK_NATIVE=OFF")


def crc32c(data) -> int:
    array = np.frombuffer(data, np.uint8)
    (total,) = checksum_ranges(np.array([array.ctypes.data], np.uint64), np.array([array.size], np.uint64))
    return int(total)


def one_bit_at_a_time(data: bytes) -> int:
    total = 0xFFFFFFFF
    for byte in data:
        total ^= byte
        for _ in range(8):
            total = total >> 1 ^ (0x82F63B78 if total & 1 else 0)
    return total ^ 0xFFFFFFFF


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
def test_published_sums(data, expected):
    assert crc32c(data) == expected


@pytest.mark.parametrize("size", [1, 7, 8, 9, 255, 256, 257, 384, 385, 511, 513, 1000, 3000])
def test_the_definition(size):
    data = np.random.default_rng(size).integers(0, 256, size, np.uint8).tobytes()
    assert crc32c(data) == one_bit_at_a_time(data)


def test_each_range_has_its_own_sum():
    array = np.random.default_rng(0).integers(0, 256, 20_000, np.uint8)
    offsets = np.array([3, 0, 5000, 19_999, 7], np.uint64)
    lengths = np.array([1000, 0, 15_000, 1, 6144], np.uint64)
    sums = checksum_ranges(offsets + np.uint64(array.ctypes.data), lengths)
    assert sums.dtype == np.uint32
    parts = zip(offsets.tolist(), lengths.tolist(), strict=True)
    assert sums.tolist() == [crc32c(array[start : start + size]) for start, size in parts]


def test_one_changed_bit_changes_the_sum():
    data = bytearray(9000)
    before = crc32c(data)
    data[4000] ^= 8
    assert crc32c(data) != before


def test_columns_of_other_lengths_are_refused():
    with pytest.raises(ValueError, match="of them"):
        checksum_ranges(np.zeros(2, np.uint64), np.zeros(1, np.uint64))
    with pytest.raises(TypeError):
        checksum_ranges(np.zeros(2, np.int64), np.zeros(2, np.int64))
