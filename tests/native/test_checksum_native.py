"""Checksums: both native ways against the Python reference."""

import numpy as np
import pytest

from penstock.core.native import native
from penstock.transfer.regions.checksum import checksum_ranges_python

pytestmark = pytest.mark.skipif(native is None, reason="installed with PENSTOCK_NATIVE=OFF")


@pytest.mark.parametrize("way", ["checksum_ranges", "checksum_ranges_portable"])
def test_ranges_of_any_length_and_alignment(way):
    random = np.random.default_rng(0)
    array = random.integers(0, 256, 200_000, np.uint8)
    lengths = np.concatenate([np.arange(40), [127, 128, 383, 384, 385, 6143, 6144, 6145, 19_000, 190_000]])
    offsets = random.integers(0, 17, len(lengths))
    ranges = (offsets + array.ctypes.data).astype(np.uint64), lengths.astype(np.uint64)
    np.testing.assert_array_equal(getattr(native, way)(*ranges), checksum_ranges_python(*ranges))
