"""Pairs two lists of ranges of equal lengths and merges neighbours."""

import numpy as np

from penstock.core.descriptors import Descriptors, RangePairs
from penstock.core.errors import TransferRefused
from penstock.transfer.regions.ranges import coalesce


def pair_ranges(local: Descriptors, remote: Descriptors) -> RangePairs:
    """Pair range i of one list with range i of the other.

    Empty ranges are dropped. A pair that continues the pair before it, on both sides and in the same regions, is merged with it.

    Raises:
        TransferRefused: the lists differ in length, or the ranges of a pair do.
    """
    if len(local) != len(remote):
        raise TransferRefused(
            f"{len(local)} local ranges for {len(remote)} remote ones; give as many of both"
        )
    lengths = local.lengths
    if lengths is not remote.lengths and not np.array_equal(lengths, remote.lengths):
        wrong = int(np.argmax(lengths != remote.lengths))
        raise TransferRefused(
            f"range {wrong}: {int(lengths[wrong])} bytes here, {int(remote.lengths[wrong])} at the peer; give equal lengths"
        )
    merged = coalesce(local.offsets, remote.offsets, lengths, local.region_ids, remote.region_ids)
    local_offsets, remote_offsets, lengths, local_regions, remote_regions = merged
    return RangePairs(
        Descriptors(local_regions, local_offsets, lengths),
        Descriptors(remote_regions, remote_offsets, lengths),
        int(lengths.sum()),
    )


def cut_pairs(pairs: RangePairs, bytes_max: int) -> RangePairs:
    """Cut ranges longer than `bytes_max`."""
    lengths, most = pairs.lengths, np.uint64(bytes_max)
    if not len(lengths) or int(lengths.max()) <= bytes_max:
        return pairs
    count = ((lengths + most - np.uint64(1)) // most).astype(np.int64)
    row = np.repeat(np.arange(len(lengths)), count)
    skip = (np.arange(len(row)) - np.repeat(np.cumsum(count) - count, count)).astype(np.uint64) * most
    cut = np.minimum(lengths[row] - skip, most)
    local, remote = (
        Descriptors(side.region_ids[row], side.offsets[row] + skip, cut)
        for side in (pairs.local, pairs.remote)
    )
    return RangePairs(local, remote, pairs.total_bytes)
