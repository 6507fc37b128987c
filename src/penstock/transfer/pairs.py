"""Pairing two lists of ranges: what one says of lengths has to fit the other, and neighbours are merged."""

import numpy as np
from numpy.typing import NDArray

from penstock.core.descriptors import Descriptors, RangePairs
from penstock.core.errors import TransferRefused


def pair_ranges(local: Descriptors, remote: Descriptors) -> RangePairs:
    """Pair range i of one list with range i of the other.

    Ranges of no bytes are left out. A range that goes on where the last one ended, on both sides and in the same
    regions, is merged with it.

    Raises:
        TransferRefused: there are more ranges on one side, or two of a pair differ in length.
    """
    if len(local) != len(remote):
        raise TransferRefused(
            f"{len(local)} local ranges for {len(remote)} remote ones; give as many of both"
        )
    lengths = local.lengths
    if not np.array_equal(lengths, remote.lengths):
        wrong = int(np.argmax(lengths != remote.lengths))
        raise TransferRefused(
            f"range {wrong}: {int(lengths[wrong])} bytes here, {int(remote.lengths[wrong])} at the peer; give equal lengths"
        )
    if not lengths.all():
        kept = lengths != 0
        local, remote = _take(local, kept), _take(remote, kept)
        lengths = local.lengths
    if len(lengths) > 1:
        starts = ~(_goes_on(local) & _goes_on(remote))
        if not starts.all():
            first = np.flatnonzero(np.concatenate(([True], starts)))
            lengths = np.add.reduceat(lengths, first)
            local = Descriptors(local.region_ids[first], local.offsets[first], lengths)
            remote = Descriptors(remote.region_ids[first], remote.offsets[first], lengths)
    return RangePairs(local, remote, int(lengths.sum()))


def _goes_on(ranges: Descriptors) -> NDArray[np.bool_]:
    """Say for all ranges but the first whether each begins where the one before it ended: (n - 1,)."""
    ends = ranges.offsets[:-1] + ranges.lengths[:-1]
    same: NDArray[np.bool_] = (ends == ranges.offsets[1:]) & (ranges.region_ids[:-1] == ranges.region_ids[1:])
    return same


def _take(ranges: Descriptors, kept: NDArray[np.bool_]) -> Descriptors:
    return Descriptors(ranges.region_ids[kept], ranges.offsets[kept], ranges.lengths[kept])
