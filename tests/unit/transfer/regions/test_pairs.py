"""Pairing lists of ranges."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.core.descriptors import Descriptors
from penstock.core.errors import TransferRefused
from penstock.transfer.regions.pairs import pair_ranges

_RANGE = st.tuples(
    st.integers(1, 2), st.integers(0, 40), st.integers(1, 2), st.integers(0, 40), st.integers(0, 6)
)


def _ranges(region_ids: list[int], offsets: list[int], lengths: list[int]) -> Descriptors:
    return Descriptors(*(np.array(column, np.uint64) for column in (region_ids, offsets, lengths)))


def _bytes_of(ranges: Descriptors) -> list[tuple[int, int]]:
    """List every byte, in order."""
    rows = zip(ranges.region_ids.tolist(), ranges.offsets.tolist(), ranges.lengths.tolist(), strict=True)
    return [(region, at) for region, offset, length in rows for at in range(offset, offset + length)]


@given(st.lists(_RANGE, max_size=12))
def test_merged_pairs_name_the_same_bytes_in_the_same_order(rows):
    columns = [list(column) for column in zip(*rows, strict=True)] or [[]] * 5
    local = _ranges(columns[0], columns[1], columns[4])
    remote = _ranges(columns[2], columns[3], columns[4])
    pairs = pair_ranges(local, remote)
    assert _bytes_of(pairs.local) == _bytes_of(local)
    assert _bytes_of(pairs.remote) == _bytes_of(remote)
    assert pairs.total_bytes == sum(columns[4])
    assert (pairs.lengths > 0).all()
    assert len(pairs) <= len(local)


def test_neighbours_on_both_sides_are_merged_and_on_one_side_are_not():
    local = _ranges([1, 1, 1], [0, 10, 20], [10, 10, 10])
    assert len(pair_ranges(local, _ranges([1, 1, 1], [100, 110, 120], [10, 10, 10]))) == 1
    assert len(pair_ranges(local, _ranges([1, 1, 2], [100, 110, 120], [10, 10, 10]))) == 2
    assert len(pair_ranges(local, _ranges([1, 1, 1], [100, 120, 130], [10, 10, 10]))) == 2


def test_lists_that_do_not_fit_are_refused_with_the_place():
    with pytest.raises(TransferRefused, match="2 local ranges for 1 remote ones"):
        pair_ranges(_ranges([1, 1], [0, 1], [1, 1]), _ranges([1], [0], [1]))
    with pytest.raises(TransferRefused, match="range 1: 4 bytes here, 5 at the peer"):
        pair_ranges(_ranges([1, 1], [0, 8], [4, 4]), _ranges([1, 1], [0, 8], [4, 5]))
