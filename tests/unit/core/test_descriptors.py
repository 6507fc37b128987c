"""Lists of ranges, as users make them."""

import numpy as np
import pytest

from penstock.core.descriptors import Descriptors


def _rows(ranges: Descriptors) -> list[tuple[int, int, int]]:
    return list(
        zip(ranges.region_ids.tolist(), ranges.offsets.tolist(), ranges.lengths.tolist(), strict=True)
    )


def test_ranges_blocks_strides_and_joined_lists():
    assert _rows(Descriptors.of(3, [5, 9], [1, 2])) == [(3, 5, 1), (3, 9, 2)]
    assert _rows(Descriptors.of(3, [5, 9], 4)) == [(3, 5, 4), (3, 9, 4)]
    assert _rows(Descriptors.of(3, 5, 4)) == [(3, 5, 4)]
    assert _rows(Descriptors.blocks(2, [4, 0], 16)) == [(2, 64, 16), (2, 0, 16)]
    assert _rows(Descriptors.strided(1, 10, 100, 3, 8)) == [(1, 10, 8), (1, 110, 8), (1, 210, 8)]
    joined = Descriptors.joined([Descriptors.of(1, 0, 4), Descriptors.of(2, 8, 4)])
    assert _rows(joined) == [(1, 0, 4), (2, 8, 4)]
    assert joined.total_bytes == 8
    assert len(Descriptors.joined([])) == 0


def test_an_array_that_is_a_view_with_strides_is_taken():
    every_second = np.arange(8, dtype=np.uint64)[::-2]
    ranges = Descriptors.of(1, every_second, 1)
    assert ranges.offsets.tolist() == [7, 5, 3, 1]
    assert ranges.offsets.flags.c_contiguous


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (lambda: Descriptors.of(1, [-1], 4), "offsets: -1 is negative"),
        (lambda: Descriptors.of(1, [0.5], 4), "offsets: dtype float64"),
        (lambda: Descriptors.of(1, [[0]], 4), r"offsets: shape \(1, 1\)"),
        (lambda: Descriptors.of(1, [0, 1, 2], [4, 4]), "2 for 3 offsets"),
        (lambda: Descriptors.blocks(1, [0], 0), "block_bytes: must be >= 1"),
        (lambda: Descriptors.strided(1, 0, -8, 2, 4), "none may be negative"),
    ],
)
def test_what_is_no_list_of_ranges_is_refused(make, why):
    with pytest.raises(ValueError, match=why):
        make()
