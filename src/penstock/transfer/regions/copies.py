"""Copies between addresses, in slices so that they can be cancelled."""

import asyncio
from collections.abc import Callable
from concurrent.futures import Executor
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

import numpy as np

from penstock.core.descriptors import Descriptors, OffsetArray, RangePairs
from penstock.core.errors import ChecksumMismatch, TransferError, TransferRefused
from penstock.transfer.regions.ranges import (
    Stop,
    Sums,
    checksum_ranges,
    coalesce,
    copy_ranges,
    copy_summed,
    settled,
)

SUMMED_BYTES_MAX = 4 << 20
"""Longest range of a copy with `sums`: threads share ranges, and a sum should find its bytes in the cache."""
_SLICE_BYTES = 64 << 20
"""Bytes between two checks for a cancellation in Python. Each check waits for the interpreter's lock, which a busy event loop
releases every 5 ms only."""


class Reach(Protocol):
    """How bytes are copied between two addresses."""

    def copy(
        self, targets: OffsetArray, sources: OffsetArray, lengths: OffsetArray, threads: int, stop: Stop
    ) -> None:
        """Copy ranges; may stop early once `stop` is set.

        Raises:
            TransferError: it failed.
        """
        ...

    def copy_summed(
        self, targets: OffsetArray, sources: OffsetArray, lengths: OffsetArray, threads: int, stop: Stop
    ) -> Sums | None:
        """Copy ranges, and compute the checksum of each as this process sees it after the copy; None if stopped.

        Raises:
            TransferError: it failed.
        """
        ...


class Mapped:
    """Both sides are mapped in this process."""

    def copy(
        self, targets: OffsetArray, sources: OffsetArray, lengths: OffsetArray, threads: int, stop: Stop
    ) -> None:
        copy_ranges(targets, sources, lengths, threads, stop)

    def copy_summed(
        self, targets: OffsetArray, sources: OffsetArray, lengths: OffsetArray, threads: int, stop: Stop
    ) -> Sums | None:
        return copy_summed(targets, sources, lengths, threads, stop)


_MAPPED = Mapped()


class CopyMove:
    """Copies ranges from addresses to addresses: the `Move` of transports that reach memory directly."""

    def __init__(
        self,
        targets: OffsetArray,
        sources: OffsetArray,
        lengths: OffsetArray,
        *,
        executor: Executor,
        threads: int,
        inline_bytes_max: int,
        checksum: bool,
        reach: Reach = _MAPPED,
    ) -> None:
        """Prepare a copy.

        Args:
            targets: (n,) uint64 addresses.
            sources: (n,) uint64 addresses.
            lengths: (n,) uint64 bytes.
            executor: runs copies that are too long for the event loop.
            threads: native threads that share one copy.
            inline_bytes_max: copies up to this size run in the event loop.
            checksum: whether to compare each range with its source afterwards; sources are mapped here.
            reach: how to copy.
        """
        self._targets = targets
        self._sources = sources
        self._lengths = lengths
        self._reach = reach
        self._executor = executor
        self._threads = threads
        self._is_small = int(lengths.sum()) <= inline_bytes_max
        self._checksum = checksum
        self._slices: list[tuple[int, int]] | None = None  # cut when first needed
        self._runs: set[_Run] = set()

    def run_now(self) -> bool:
        if not self._is_small:
            return False
        self._copy_part(slice(None), 1, np.zeros(1, np.uint8), None)
        return True

    async def run(self, sums: Sums | None = None) -> None:
        """Copy everything.

        Args:
            sums: (n,), filled with the checksums of the ranges, each at most `SUMMED_BYTES_MAX` long; None for none.
        """
        if self._slices is None:
            self._targets, self._sources, self._lengths = _cut_long(
                self._targets, self._sources, self._lengths
            )
            self._slices = _cut(self._lengths)
        run = _Run()
        self._runs.add(run)
        try:
            await on_thread(self._executor, partial(self._copy, sums), run.stop)
        finally:
            self._runs.discard(run)
        if run.error is not None:
            raise run.error

    def end(self, error: TransferError) -> None:
        """Have every running `run` raise this error soon."""
        for run in self._runs:
            run.error = error
            run.stop[0] = 1

    def _copy(self, sums: Sums | None, stop: Stop) -> None:
        for first, end in self._slices or ():
            if not stop[0]:
                self._copy_part(slice(first, end), self._threads, stop, sums)

    def _copy_part(self, part: slice, threads: int, stop: Stop, sums: Sums | None) -> None:
        sources, lengths = self._sources[part], self._lengths[part]
        if sums is None and not self._checksum:
            self._reach.copy(self._targets[part], sources, lengths, threads, stop)
            return
        arrived = self._reach.copy_summed(self._targets[part], sources, lengths, threads, stop)
        if arrived is None:
            return
        if sums is not None:
            sums[part] = arrived
        if self._checksum and not np.array_equal(sent := checksum_ranges(sources, lengths), arrived):
            index = int(np.argmax(sent != arrived))
            raise ChecksumMismatch(
                f"range of {int(lengths[index])} bytes: checksum {int(arrived[index]):#x} after the copy,"
                f" {int(sent[index]):#x} at the source: somebody writes there meanwhile"
            )


@dataclass(slots=True, eq=False)
class _Run:
    """A running copy, and the error that ends it."""

    stop: Stop = field(default_factory=lambda: np.zeros(1, np.uint8))
    error: TransferError | None = None


async def on_thread(executor: Executor, work: Callable[[Stop], None], stop: Stop | None = None) -> None:
    """Run work on a thread. A cancellation sets `stop` and waits until the work has returned.

    Args:
        executor: runs it.
        work: called with `stop`; its exception is raised here.
        stop: the flag, if the caller wants to set it too.
    """
    stop = np.zeros(1, np.uint8) if stop is None else stop
    future = asyncio.get_running_loop().run_in_executor(executor, work, stop)
    try:
        await asyncio.shield(future)
    except asyncio.CancelledError:
        stop[0] = 1
        await settled(future)
        raise


def _cut_long(
    targets: OffsetArray, sources: OffsetArray, lengths: OffsetArray
) -> tuple[OffsetArray, OffsetArray, OffsetArray]:
    """Cut ranges longer than a slice into slices, except ranges that overlap their own target."""
    if len(lengths) == 0 or int(lengths.max()) <= _SLICE_BYTES:
        return targets, sources, lengths
    slice_bytes = np.uint64(_SLICE_BYTES)
    apart = np.maximum(targets, sources) - np.minimum(targets, sources) >= lengths
    count = np.where(apart, (lengths + slice_bytes - np.uint64(1)) // slice_bytes, np.uint64(1)).astype(
        np.int64
    )
    row = np.repeat(np.arange(len(lengths)), count)
    skip = (np.arange(len(row)) - np.repeat(np.cumsum(count) - count, count)).astype(np.uint64) * slice_bytes
    left = lengths[row] - skip
    return targets[row] + skip, sources[row] + skip, np.where(apart[row], np.minimum(left, slice_bytes), left)


def _cut(lengths: OffsetArray) -> list[tuple[int, int]]:
    """Cut a list into runs of about `_SLICE_BYTES`."""
    if len(lengths) == 0:
        return []
    slice_of = (np.cumsum(lengths) - lengths) // np.uint64(_SLICE_BYTES)
    first = [0, *(int(index) + 1 for index in np.flatnonzero(np.diff(slice_of)))]
    return list(zip(first, [*first[1:], len(lengths)], strict=True))


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
