"""Checksums: both native ways against the Python reference."""

import numpy as np
import pytest

from penstock.core.native import native
from penstock.transfer.regions.ranges import checksum_ranges_python, copy_summed_python

pytestmark = pytest.mark.skipif(native is None, reason="installed with PENSTOCK_NATIVE=OFF")


@pytest.mark.parametrize("way", ["checksum_ranges", "checksum_ranges_portable"])
def test_ranges_of_any_length_and_alignment(way):
    random = np.random.default_rng(0)
    array = random.integers(0, 256, 200_000, np.uint8)
    lengths = np.concatenate([np.arange(40), [127, 128, 383, 384, 385, 6143, 6144, 6145, 19_000, 190_000]])
    offsets = random.integers(0, 17, len(lengths))
    ranges = (offsets + array.ctypes.data).astype(np.uint64), lengths.astype(np.uint64)
    np.testing.assert_array_equal(getattr(native, way)(*ranges), checksum_ranges_python(*ranges))


@pytest.mark.parametrize("threads", [0, 1, 3])
def test_copies_with_sums_of_any_length_and_alignment(threads):
    random = np.random.default_rng(1)
    source = random.integers(0, 256, 300_020, np.uint8)
    native_target, python_target = np.zeros((2, 800_000), np.uint8)
    lengths = np.array([0, 1, 7, 4096, 32_767, 32_768, 32_769, 70_000, 190_000, 300_000], np.uint64)
    sources = (random.integers(0, 17, len(lengths)) + source.ctypes.data).astype(np.uint64)
    offsets = np.concatenate([[0], np.cumsum(lengths + np.uint64(3))[:-1]]).astype(np.uint64)
    sums = native.copy_summed(offsets + np.uint64(native_target.ctypes.data), sources, lengths, threads)
    expected = copy_summed_python(offsets + np.uint64(python_target.ctypes.data), sources, lengths)
    np.testing.assert_array_equal(sums, expected)
    np.testing.assert_array_equal(native_target, python_target)


@pytest.mark.parametrize("distance", [1, 100, 40_000])
def test_a_copy_with_sums_onto_itself_moves_as_memmove_does(distance):
    array = np.random.default_rng(2).integers(0, 256, 100_000, np.uint8)
    expected = array[: 100_000 - distance].copy()
    address = array.ctypes.data
    columns = (np.array([value], np.uint64) for value in (address + distance, address, len(expected)))
    (found,) = native.copy_summed(*columns, 1)
    np.testing.assert_array_equal(array[distance:], expected)
    (wanted,) = checksum_ranges_python(
        np.array([expected.ctypes.data], np.uint64), np.array([len(expected)], np.uint64)
    )
    assert found == wanted


def test_a_stopped_copy_with_sums_says_so():
    array = np.zeros(10, np.uint8)
    columns = (np.array([value], np.uint64) for value in (array.ctypes.data, array.ctypes.data, 10))
    assert native.copy_summed(*columns, 1, np.ones(1, np.uint8)) is None
