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
